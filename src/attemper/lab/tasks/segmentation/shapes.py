"""Made-up pictures of discs, boxes and rings on a rough background: segmentation in seconds, without any files."""

import functools

import torch
from torch import Tensor

from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.seed_streams import generator
from attemper.lab.tasks.segmentation.masks import NOTHING
from attemper.lab.tasks.segmentation.sources import MemoryMasks
from attemper.lab.tasks.segmentation.task import MaskShape, SegmentationTask
from attemper.lab.tasks.split import FIXED

CLASSES = ("background", "disc", "box", "ring")
COLOURS = ((128, 128, 128), (170, 90, 90), (90, 170, 90), (90, 90, 170))
"""Of the classes, red, green and blue: a shape's own colour is some way off, so that colour alone is not enough."""
SPREAD = 80
ROUGHNESS = 40
TRAINING, TEST = 240, 80
SIDE = 32
MOST_SHAPES = 3
UNLABELLED = 1
"""Pixels at the border of a shape that have no label, as in many data sets."""


def open_shapes(name: str, *, size: int = SIDE, train: int | None = None, test: int | None = None) -> SegmentationTask:
    """Up to three shapes per image: which class a pixel is of shows in its form, and in its colour to a part.

    size: side of the images in pixels.
    """
    return SegmentationTask(
        name=name,
        shape=MaskShape(channels=3, height=size, width=size, classes=len(CLASSES)),
        fingerprint=of_parts("shapes", str(size), str((TRAINING, TEST))),
        pool=lambda: _drawn(size, "training", TRAINING),
        held_out=lambda: _drawn(size, "test", TEST),
        classes=CLASSES,
        numbers=tuple(range(len(CLASSES))),
        train=train,
        test_images=test,
    )


@functools.cache
def _drawn(size: int, part: str, images: int) -> MemoryMasks:
    """Always the same pictures."""
    draws = generator(FIXED, "shapes", part)
    pairs = [_picture(size, draws) for _ in range(images)]
    masks = torch.stack([mask for _, mask in pairs])
    return MemoryMasks(torch.stack([image for image, _ in pairs]), masks, list(masks))


def _picture(size: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """One image uint8 (3, size, size) and its mask uint8 (size, size); later shapes lie on top."""

    y, x = torch.arange(size)[:, None].float(), torch.arange(size).float()
    image = _surface(0, size, draws)
    mask = torch.zeros(size, size, dtype=torch.uint8)
    for _ in range(int(torch.randint(1, MOST_SHAPES + 1, (), generator=draws))):
        kind = int(torch.randint(1, len(CLASSES), (), generator=draws))
        radius = _uniform(0.15, 0.3, draws) * size
        top, left = (_uniform(radius, size - radius, draws) for _ in range(2))
        across, down = (x - left).abs(), (y - top).abs()
        far = torch.maximum(across, down) if CLASSES[kind] == "box" else (across**2 + down**2).sqrt()
        inside = far <= radius
        if CLASSES[kind] == "ring":
            inside &= far > radius / 2
        image = torch.where(inside, _surface(kind, size, draws), image)
        mask[inside] = kind
        mask[(far - radius).abs() <= UNLABELLED / 2] = NOTHING
    return image.round().clamp(0, 255).byte(), mask


def _uniform(low: float, high: float, draws: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=draws))


def _surface(kind: int, size: int, draws: torch.Generator) -> Tensor:
    """A rough surface in the colour of a class, or near it, float32 (3, size, size)."""
    colour = torch.tensor(COLOURS[kind])[:, None, None]
    off = (torch.rand(3, 1, 1, generator=draws) - 0.5) * 2 * SPREAD
    return colour + off + (torch.rand(3, size, size, generator=draws) - 0.5) * ROUGHNESS
