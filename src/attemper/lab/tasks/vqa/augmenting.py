"""Augmentation of images with questions: only what leaves the answers as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

from torch import Tensor

from attemper.lab.tasks.augment import Augment, Augmentation, CropFlip, Transform, check, parse_augmentation
from attemper.lab.tasks.seed_streams import drawing_from
from attemper.lab.tasks.vqa.shape import QuestionShape


@dataclasses.dataclass(frozen=True)
class Shift(Transform):
    """Shift every image by up to `pad` pixels, with black beyond its border.

    pad: in pixels; none: an eighth of the side.
    """

    name: ClassVar[str] = "shift"
    stage: ClassVar[Literal["pixels"]] = "pixels"

    pad: int | None = None

    def __post_init__(self) -> None:
        if self.pad is not None:
            check("pad", self.pad, 0, 1000, whole=True)

    def __call__(self, images: Tensor) -> Tensor:
        return CropFlip(self.pad, flip=0.0)(images)


@dataclasses.dataclass(frozen=True)
class QuestionAugmentation:
    """Transforms of the images in stored rows; the questions beside them stay as they are."""

    transforms: Augmentation
    shape: QuestionShape

    def __call__(
        self, images: Tensor, targets: Tensor, *, classes: int, to_input: Callable[[Tensor], Tensor], seed: int
    ) -> tuple[Tensor, Tensor]:
        """images: rows of `QuestionShape.store`. targets: as they come, and as they go."""
        pixels, words = self.shape.stored(images)
        with drawing_from(seed):
            for transform in self.transforms.transforms:
                pixels = transform(pixels)
        return to_input(self.shape.store(pixels, words)), targets


def parse_question_augmentation(text: str, shape: QuestionShape) -> Augment:
    """Read an augmentation: none, shift or shift(pad)."""
    found = parse_augmentation(text, {"shift": Shift})
    return QuestionAugmentation(found, shape) if found.transforms else found
