"""Augmentation of images together with their boxes, by torchvision's transforms (v2), image by image.

Every number is drawn on the CPU from the stream of the batch, so that all recipes of a seed see the same images.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from attemper.lab.tasks.augment import Augment, Augmentation, Transform, check, parse_augmentation
from attemper.lab.tasks.boxes.canvas import SHOWN, fitted
from attemper.lab.tasks.boxes.shape import BOX, CLASS, NONE
from attemper.lab.tasks.seed_streams import drawing_from

SMALLEST = 2.0
"""Pixels: what is left of a box after a crop and is narrower or lower than this is no object to be found any more."""
MEAN = (124, 116, 104)
"""What stands round an image that was made smaller: ImageNet's mean colour."""


@dataclasses.dataclass(frozen=True)
class Flip(Transform):
    """Mirror every image with probability `p`."""

    name: ClassVar[str] = "flip"

    p: float = 0.5

    def __post_init__(self) -> None:
        check("p", self.p, 0, 1)

    def on(self, size: int) -> list[Any]:
        from torchvision.transforms import v2

        return [v2.RandomHorizontalFlip(self.p)]


@dataclasses.dataclass(frozen=True)
class Crop(Transform):
    """Cut out a part with at least one object in it, as SSD does, and make it as large as fits. torchvision's.

    least: the smallest side of the part, as a share of the image's.
    """

    name: ClassVar[str] = "crop"

    least: float = 0.5

    def __post_init__(self) -> None:
        check("least", self.least, 0.05, 1)

    def on(self, size: int) -> list[Any]:
        from torchvision.transforms import v2

        return [v2.RandomIoUCrop(min_scale=self.least), _Fit(size)]


@dataclasses.dataclass(frozen=True)
class Scale(Transform):
    """Resize every image by a factor from `least` to `most`, and cut a part out of what is larger than the canvas."""

    name: ClassVar[str] = "scale"

    least: float = 0.6
    most: float = 1.4

    def __post_init__(self) -> None:
        check("least", self.least, 0.05, 20)
        check("most", self.most, self.least, 20)

    def on(self, size: int) -> list[Any]:
        from torchvision.transforms import v2

        return [v2.ScaleJitter((size, size), (self.least, self.most), antialias=True), _CutTo(size)]


@dataclasses.dataclass(frozen=True)
class ZoomOut(Transform):
    """Put an image on a larger plain one with probability `p`, up to `most` times as wide, and resize the whole."""

    name: ClassVar[str] = "zoom-out"

    most: float = 2.0
    p: float = 0.5

    def __post_init__(self) -> None:
        check("most", self.most, 1, 10)
        check("p", self.p, 0, 1)

    def on(self, size: int) -> list[Any]:
        from torchvision.transforms import v2

        return [v2.RandomZoomOut(list(MEAN), (1.0, self.most), self.p), _Fit(size)]


@dataclasses.dataclass(frozen=True)
class Photometric(Transform):
    """Change brightness, contrast, saturation and hue, each with probability `p`. torchvision's."""

    name: ClassVar[str] = "photometric"

    p: float = 0.5

    def __post_init__(self) -> None:
        check("p", self.p, 0, 1)

    def on(self, size: int) -> list[Any]:
        from torchvision.transforms import v2

        return [v2.RandomPhotometricDistort(p=self.p)]


KINDS: dict[str, type[Any]] = {kind.name: kind for kind in (Flip, Crop, Scale, ZoomOut, Photometric)}


class _Fit:
    """Resizes an image with its boxes so that its longer side is that of the canvas."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        from torchvision.transforms import v2

        height, width = sample["image"].shape[-2:]
        across, down = fitted(width, height, self.size)
        resized: dict[str, Any] = v2.Resize((down, across), antialias=True)(sample)
        return resized


class _CutTo:
    """Cuts a part of random place out of an image that is larger than the canvas."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        from torchvision.transforms import v2

        height, width = sample["image"].shape[-2:]
        cut: dict[str, Any] = v2.RandomCrop((min(height, self.size), min(width, self.size)))(sample)
        return cut


@dataclasses.dataclass(frozen=True)
class BoxAugmentation:
    """Several transforms, one after the other, on every image of a batch and its boxes."""

    transforms: tuple[Any, ...]

    def __call__(
        self, images: Tensor, targets: Tensor, *, classes: int, to_input: Callable[[Tensor], Tensor], seed: int
    ) -> tuple[Tensor, Tensor]:
        size = images.shape[-1]
        steps = [step for transform in self.transforms for step in transform.on(size)]
        with drawing_from(seed):
            changed = [_changed(image, rows, steps) for image, rows in zip(images, targets, strict=True)]
        canvases, rows = zip(*changed, strict=True)
        return to_input(torch.stack(canvases)), torch.stack(rows)

    def __str__(self) -> str:
        return str(Augmentation(self.transforms))


def _changed(image: Tensor, rows: Tensor, steps: list[Any]) -> tuple[Tensor, Tensor]:
    """One image and its boxes after all steps, on a canvas again."""
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    size = image.shape[-1]
    height, width = int((image[3, :, 0] > 0).sum()), int((image[3, 0] > 0).sum())
    there = rows[:, CLASS] >= 0
    boxes = tv_tensors.BoundingBoxes(rows[there, BOX] * size, format="XYXY", canvas_size=(height, width))
    sample = {
        "image": tv_tensors.Image(image[:3, :height, :width]),
        "boxes": boxes,
        "labels": there.nonzero().flatten(),
    }
    finish = v2.SanitizeBoundingBoxes(min_size=SMALLEST)
    for step in (*steps, v2.ClampBoundingBoxes(), finish):
        sample = step(sample)
    canvas, found = torch.zeros_like(image), torch.zeros_like(rows)
    down, across = sample["image"].shape[-2:]
    canvas[:3, :down, :across] = sample["image"]
    canvas[3, :down, :across] = SHOWN
    found[:, CLASS] = NONE
    kept = len(sample["labels"])
    found[:kept] = rows[sample["labels"]]
    found[:kept, BOX] = sample["boxes"].as_subclass(Tensor).to(rows.dtype) / size
    return canvas, found


def box_augmentation(text: str) -> Augment:
    """What the `augment` of a budget means where images have boxes, such as 'flip+crop(least=0.3)+photometric'."""
    parsed = parse_augmentation(text, KINDS)
    return BoxAugmentation(parsed.transforms) if parsed.transforms else parsed
