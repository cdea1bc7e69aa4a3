"""What a trained model takes: the size of its images, how they are normalised, and what its classes are called.

Of a segmentation, also which number in a mask stands for which class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attemper.errors import UnreadableError
from attemper.lab.tasks.base import InputShape, Task
from attemper.lab.tasks.segmentation.task import MaskShape, SegmentationTask


@dataclass(frozen=True)
class ImageInputs:
    """Kept beside the weights of a run on images, so that they can be used without its data."""

    channels: int
    height: int
    width: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    """Of every channel, for pixels from 0 to 1."""
    deviation: tuple[float, ...]
    numbers: tuple[int, ...] = ()
    """Of the classes in masks, where every pixel has a class; empty: a class per image."""

    @classmethod
    def of(cls, task: Task) -> ImageInputs | None:
        """Those of a task; None where its samples are no images, or more is done to them than to normalise them."""
        shape = task.shape
        if isinstance(task, SegmentationTask):
            size = task.shape.channels, task.shape.height, task.shape.width
            return cls(*size, task.classes, task.normalise.mean, task.normalise.deviation, task.numbers)
        if not isinstance(shape, InputShape):
            return None
        levels = [0, 128, 255]
        stored = torch.tensor(levels, dtype=torch.uint8)[:, None, None, None]
        stored = stored.expand(len(levels), shape.channels, shape.height, shape.width)
        try:
            low, middle, high = task.to_input(stored.clone()).double()
        except (RuntimeError, TypeError, ValueError):
            return None
        if low.shape != (shape.channels, shape.height, shape.width):
            return None
        linear = low + (high - low) * (128 / 255)
        plain = bool((low == low[:, :1, :1]).all()) and torch.allclose(middle, linear, rtol=1e-4, atol=1e-4)
        if not plain or bool((high == low).any()):
            return None
        deviation = 1 / (high - low)[:, 0, 0]
        mean = -low[:, 0, 0] * deviation
        names = getattr(task, "classes", None) or tuple(map(str, range(shape.classes)))
        return cls(
            shape.channels, shape.height, shape.width, tuple(map(str, names)), tuple(mean.tolist()),
            tuple(deviation.tolist()),
        )  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> ImageInputs:
        """As `to_json` wrote it."""
        try:
            held: Mapping[str, Any] = json.loads(text)
            found = cls(
                int(held["channels"]),
                int(held["height"]),
                int(held["width"]),
                tuple(map(str, held["classes"])),
                tuple(map(float, held["mean"])),
                tuple(map(float, held["deviation"])),
                tuple(map(int, held.get("numbers", ()))),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableError(f"what the weights say of their inputs cannot be read ({error!r})") from error
        fits = len(found.mean) == len(found.deviation) == found.channels
        if not fits or (found.numbers and len(found.numbers) != len(found.classes)):
            raise UnreadableError("what the weights say of their inputs does not fit together")
        return found

    def to_json(self) -> str:
        held = asdict(self)
        return json.dumps(held if self.numbers else {name: each for name, each in held.items() if name != "numbers"})

    @property
    def shape(self) -> InputShape | MaskShape:
        kind = MaskShape if self.numbers else InputShape
        return kind(self.channels, self.height, self.width, len(self.classes))

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 (B, 3, H, W) → what the model takes; for a model of one channel, grey values."""
        x = pixels.float() / 255
        if self.channels == 1 and x.shape[1] == 3:
            x = (x * torch.tensor(GREY, device=x.device)[:, None, None]).sum(1, keepdim=True)
        mean, deviation = (torch.tensor(each, device=x.device)[:, None, None] for each in (self.mean, self.deviation))
        return (x - mean) / deviation


GREY = (0.299, 0.587, 0.114)
"""How bright red, green and blue are, as Pillow has it."""
