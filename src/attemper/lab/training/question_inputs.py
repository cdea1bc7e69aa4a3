"""What a model that answers questions takes and gives, kept beside its weights so that no data is needed to use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attemper.errors import UnreadableError
from attemper.lab.tasks.vocabulary import MARKS, Vocabulary
from attemper.lab.tasks.vqa.shape import QuestionShape
from attemper.lab.tasks.vqa.task import QuestionTask


@dataclass(frozen=True)
class QuestionInputs:
    """size: side of the images in pixels. length: tokens of a question, the mark before it included.

    words: the vocabulary. several: an answer may be right beside others, as where several people were asked.
    mean, deviation: of every channel, in levels from 0 to 255.
    """

    size: int
    length: int
    words: tuple[str, ...]
    answers: tuple[str, ...]
    several: bool
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def of(cls, task: QuestionTask) -> QuestionInputs:
        mean, deviation = (tuple(each.tolist()) for each in task.statistics_on(torch.device("cpu")))
        shape = task.shape
        return cls(shape.height, shape.length, task.vocabulary.words, task.classes, task.several, mean, deviation)

    @classmethod
    def from_json(cls, text: str) -> QuestionInputs:
        """As `to_json` wrote it."""
        try:
            held: Mapping[str, Any] = json.loads(text)
            found = cls(
                int(held["size"]),
                int(held["length"]),
                tuple(map(str, held["words"])),
                tuple(map(str, held["answers"])),
                bool(held["several"]),
                tuple(map(float, held["mean"])),
                tuple(map(float, held["deviation"])),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableError(f"what the weights say of their questions cannot be read ({error!r})") from error
        fits = len(found.mean) == len(found.deviation) == 3 and found.words[: len(MARKS)] == MARKS
        if not fits or min(found.size, found.length, len(found.answers)) < 1:
            raise UnreadableError("what the weights say of their questions does not fit together")
        return found

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def shape(self) -> QuestionShape:
        return QuestionShape(3, self.size, self.size, len(self.words), self.length, len(self.answers))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.words)

    def to_input(self, images: Tensor, words: Tensor) -> Tensor:
        """uint8 (B, 3, size, size) and numbers of words (B, length) → what the model takes."""
        x = images.float()
        mean, deviation = (x.new_tensor(each)[:, None, None] for each in (self.mean, self.deviation))
        return self.shape.join((x - mean) / deviation, words)
