"""Augmentation of images together with their masks, by torchvision's transforms v2.

As for other images, every number is drawn on the CPU from a stream that is named by seed, epoch and batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from attemper.lab.tasks.augment import Augmentation, check, parse_augmentation
from attemper.lab.tasks.seed_streams import drawing_from
from attemper.lab.tasks.segmentation.canvas import FILL
from attemper.lab.threads import threads
from attemper.tempering.outputs import IGNORED


@dataclasses.dataclass(frozen=True)
class ScaleCrop:
    """Resize every image by a random factor, cut out a part as large as before, and mirror it with probability `flip`.

    Where an image is smaller than the part, what lies outside is filled, and ignored in the mask.

    smallest, largest: the range of the factor.
    """

    name: ClassVar[str] = "scale-crop"

    smallest: float = 0.5
    largest: float = 2.0
    flip: float = 0.5

    def __post_init__(self) -> None:
        check("smallest", self.smallest, 0.05, 20)
        check("largest", self.largest, self.smallest, 20)
        check("flip", self.flip, 0, 1)

    def transform(self, size: tuple[int, int]) -> Callable[[Any, Any], tuple[Any, Any]]:
        """For images of some height and width, with their masks."""
        from torchvision import tv_tensors
        from torchvision.transforms import v2

        fill: dict[Any, Any] = {tv_tensors.Image: list(FILL), tv_tensors.Mask: IGNORED}
        made: Callable[[Any, Any], tuple[Any, Any]] = v2.Compose(
            [
                v2.ScaleJitter(size, (self.smallest, self.largest)),
                v2.RandomCrop(size, pad_if_needed=True, fill=fill),
                v2.RandomHorizontalFlip(self.flip),
            ]
        )
        return made


@dataclasses.dataclass(frozen=True)
class Photometric:
    """Change brightness, contrast, saturation and hue of every image by up to `strength` times what SSD does.

    p: each of them is changed with this probability.
    """

    name: ClassVar[str] = "photometric"

    strength: float = 1.0
    p: float = 0.5

    def __post_init__(self) -> None:
        check("strength", self.strength, 0, 1.9)
        check("p", self.p, 0, 1)

    def transform(self, size: tuple[int, int]) -> Callable[[Any, Any], tuple[Any, Any]]:
        """For images of some height and width, with their masks, which stay as they are."""
        from torchvision.transforms import v2

        def about(spread: float) -> tuple[float, float]:
            return 1 - spread * self.strength, 1 + spread * self.strength

        hue = min(0.5, 0.05 * self.strength)
        made: Callable[[Any, Any], tuple[Any, Any]] = v2.RandomPhotometricDistort(
            brightness=about(0.125), contrast=about(0.5), saturation=about(0.5), hue=(-hue, hue), p=self.p
        )
        return made


KINDS: dict[str, type[Any]] = {kind.name: kind for kind in (ScaleCrop, Photometric)}


@dataclasses.dataclass(frozen=True)
class MaskAugmentation:
    """Several transforms of images and masks, in the order in which they were written."""

    transforms: tuple[Any, ...]

    def __call__(
        self, images: Tensor, targets: Tensor, *, classes: int, to_input: Callable[[Tensor], Tensor], seed: int
    ) -> tuple[Tensor, Tensor]:
        """A batch as the source gives it out → inputs and targets of the model.

        images: uint8 (B, 3, H, W). targets: int64 (B, H, W), `IGNORED` where nothing is to be predicted.
        """
        from torchvision import tv_tensors

        size = (images.shape[-2], images.shape[-1])
        steps = [transform.transform(size) for transform in self.transforms]
        pairs = []
        with drawing_from(seed), threads(1):  # on several each small operation would wait for all of them
            for image, mask in zip(images, targets, strict=True):
                pair: tuple[Any, Any] = tv_tensors.Image(image), tv_tensors.Mask(mask)
                for step in steps:
                    pair = step(*pair)
                pairs.append(pair)
        pixels, masks = (
            torch.stack([part.as_subclass(Tensor) for part in parts]) for parts in zip(*pairs, strict=True)
        )
        return to_input(pixels), masks


def parse_mask_augmentation(text: str) -> Augmentation | MaskAugmentation:
    """Read augmentations joined by '+', such as 'scale-crop + photometric'; 'none' changes nothing."""
    found = parse_augmentation(text, KINDS)
    return MaskAugmentation(found.transforms) if found.transforms else found
