"""From an image file in memory to what a source gives out: decoded, cut and augmented by itself, in a worker."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.lab.tasks.augment import Augmentation
from attemper.lab.tasks.sample_files import open_image
from attemper.lab.tasks.seed_streams import drawing_from
from attemper.lab.threads import threads

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the channels of ImageNet, from 0 to 1: what timm takes for data of which it knows nothing else."""

INTERPOLATION = "bicubic"


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What happens to one image.

    size: side of the result. crop: share of the shorter side that the middle square keeps.
    augmentation: all that concerns one image at a time; what mixes images is left to the whole batch.

    timm's own transforms decode and cut. Of a 'resized-crop' the part is cut out of the image as it is stored, so it
    comes first, wherever it was written.
    """

    size: int
    crop: float
    augmentation: Augmentation = dataclasses.field(default_factory=Augmentation)

    def augmented(self, augmentation: Augmentation) -> tuple[Preparation, Augmentation]:
        """With the part of an augmentation that concerns single images, and the part that is left."""
        alone: list[Any] = []
        mixed: list[Any] = []
        for transform in augmentation.transforms:
            (mixed if transform.stage == "mix" else alone).append(transform)
        return dataclasses.replace(self, augmentation=Augmentation(tuple(alone))), Augmentation(tuple(mixed))

    def __call__(self, data: bytes, seed: int) -> Tensor:
        """An image file → uint8 (3, size, size).

        seed: of the stream from which this image's numbers are drawn.
        """
        image = open_image(data)
        with seeded(seed), threads(1):
            pixels: Tensor = self._cut(image)
            for transform in self._later("pixels"):
                pixels = transform(pixels[None])[0]
            inputs = self._later("inputs")
            return self._through_inputs(pixels, inputs) if inputs else pixels

    @cached_property
    def _first(self) -> Any:
        return next((each for each in self.augmentation.transforms if each.name == "resized-crop"), None)

    def _later(self, stage: str) -> list[Any]:
        return [each for each in self.augmentation.transforms if each.stage == stage and each is not self._first]

    @cached_property
    def _cut(self) -> Callable[[Any], Tensor]:
        from timm.data.transforms_factory import create_transform

        if self._first is None:
            made = create_transform(self.size, crop_pct=self.crop, interpolation=INTERPOLATION, use_prefetcher=True)
        else:
            made = create_transform(
                self.size,
                is_training=True,
                scale=(self._first.scale, 1.0),
                hflip=self._first.flip,
                interpolation=self._first.interpolation,
                color_jitter=None,  # type: ignore[arg-type]
                use_prefetcher=True,
            )
        transform: Callable[[Any], Tensor] = made
        return transform

    def _through_inputs(self, pixels: Tensor, transforms: list[Any]) -> Tensor:
        """Apply what works on a model's inputs, and go back to bytes: they travel between processes and to a device."""
        mean, deviation = (255 * torch.tensor(each)[:, None, None] for each in (MEAN, DEVIATION))
        inputs = ((pixels.float() - mean) / deviation)[None]
        for transform in transforms:
            inputs = transform(inputs)
        return (inputs[0] * deviation + mean).round().clamp(0, 255).byte()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context manager: inside it, torch, Python and numpy draw from one stream; timm's transforms use all of them."""
    python, words = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with drawing_from(seed):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(words)
