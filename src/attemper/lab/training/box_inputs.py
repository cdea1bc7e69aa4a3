"""What a model that finds objects takes and gives, kept beside its weights so that it can be used without its data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from attemper.errors import UnreadableError
from attemper.lab.tasks.boxes.shape import BoxShape
from attemper.lab.tasks.boxes.task import BoxTask


@dataclass(frozen=True)
class BoxInputs:
    """size: side of the canvas in pixels. classes: their names. boxes: of the image of the data that had most."""

    size: int
    classes: tuple[str, ...]
    boxes: int

    @classmethod
    def of(cls, task: BoxTask) -> BoxInputs:
        return cls(task.shape.size, task.classes, task.shape.boxes)

    @classmethod
    def from_json(cls, text: str) -> BoxInputs:
        """As `to_json` wrote it."""
        try:
            held: Mapping[str, Any] = json.loads(text)
            found = cls(int(held["size"]), tuple(map(str, held["classes"])), int(held["boxes"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableError(f"what the weights say of their boxes cannot be read ({error!r})") from error
        if min(found.size, found.boxes, len(found.classes)) < 1:
            raise UnreadableError("what the weights say of their boxes does not fit together")
        return found

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def shape(self) -> BoxShape:
        return BoxShape(self.size, len(self.classes), self.boxes)
