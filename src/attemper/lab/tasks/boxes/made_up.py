"""Made-up images with coloured shapes on noise, so that everything about boxes can be tried without any file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from attemper.lab.tasks import source
from attemper.lab.tasks.boxes.canvas import SHOWN
from attemper.lab.tasks.boxes.metrics import require_packages
from attemper.lab.tasks.boxes.shape import AREA, BOX, CHANNELS, CLASS, COLUMNS, CROWD, NONE, BoxShape
from attemper.lab.tasks.boxes.task import BoxTask
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.source import MemorySource, Source, facts_of

SHAPES = ("square", "disc", "cross")
MOST = 3
"""Shapes in an image; some images have none."""
TRAIN, TEST = 400, 100
SMALLEST = 32
MOST_DRAWN, MOST_BYTES = 4096, 2**28
"""So many different images at most, fewer where they are large."""


def open_boxes(name: str, *, size: int = 48, train: int = TRAIN, test: int = TEST) -> BoxTask:
    """Squares, discs and crosses of any colour on noise, in images of any proportions.

    size: side of the canvas in pixels. train, test: so many images there are. Of a large number, such as plans are
        measured on, some are drawn and stand for all.
    """
    require_packages()
    side = max(SMALLEST, size)
    return BoxTask(
        name=name,
        shape=BoxShape(size=side, classes=len(SHAPES), boxes=MOST),
        fingerprint=of_parts("boxes 1", *map(str, (side, train, test))),
        pool=lambda: drawn(train, side, 0),
        held_out=lambda: drawn(test, side, 1),
        classes=SHAPES,
    )


def drawn(count: int, size: int, seed: int) -> Source:
    """So many images; above a number, only so many of them differ."""
    different = max(1, min(MOST_DRAWN, MOST_BYTES // (CHANNELS * size**2)))
    pool = draw_shapes(min(count, different), size, seed)
    return pool if count <= different else Repeated(pool, torch.arange(count))


@dataclasses.dataclass
class Repeated:
    """A few images that stand for many."""

    pool: MemorySource
    indices: Tensor

    @property
    def targets(self) -> Tensor:
        return self.pool.targets[self._places(self.indices)]

    @property
    def facts(self) -> dict[str, Tensor]:
        return facts_of(self.pool.facts, self._places(self.indices))

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def in_memory(self) -> bool:
        """Whether real data of this size would be: runs treat it the same way."""
        return len(self) * self.pool.images[0].numel() <= source.MEMORY_LIMIT

    def take(self, indices: Tensor) -> Repeated:
        return Repeated(self.pool, self.indices[indices])

    def to(self, device: torch.device) -> Repeated:
        return Repeated(self.pool.to(device), self.indices)

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        return self.pool.batches(self._places(self.indices[order.cpu()]), batch_size)

    def statistics(self) -> tuple[Tensor, Tensor]:
        return self.pool.statistics()

    def _places(self, indices: Tensor) -> Tensor:
        return indices % len(self.pool)


def draw_shapes(count: int, size: int, seed: int) -> MemorySource:
    """So many images, the first with a shape. Shapes do not touch: which of them is in front would be another task."""
    draw = np.random.default_rng(seed)
    images = np.zeros((count, CHANNELS, size, size), np.uint8)
    rows = np.zeros((count, MOST, COLUMNS), np.float32)
    rows[..., CLASS] = NONE
    sizes = np.zeros((count, 2), np.int64)
    for at, (image, found, shape) in enumerate(zip(images, rows, sizes, strict=True)):
        shape[:] = width, height = _sides(draw, size)
        image[:3, :height, :width] = draw.integers(70, 130, (3, height, width))
        image[3, :height, :width] = SHOWN
        taken = np.zeros((size, size), bool)
        for row in found[: draw.integers(at == 0, MOST + 1)]:
            _put(draw, image, row, taken, (width, height))
        found[:] = found[np.argsort(found[:, CLASS] == NONE, kind="stable")]
    return MemorySource(torch.from_numpy(images), torch.from_numpy(rows), facts={"size": torch.from_numpy(sizes)})


def _sides(draw: np.random.Generator, size: int) -> tuple[int, int]:
    """Width and height of an image, one of which is that of the canvas."""
    short = int(draw.integers(size * 2 // 3, size + 1))
    return (size, short) if draw.random() < 0.5 else (short, size)


def _put(
    draw: np.random.Generator, image: np.ndarray, row: np.ndarray, taken: np.ndarray, sides: tuple[int, int]
) -> None:
    """One shape, where there is room for it; none after some tries."""
    size = image.shape[-1]
    for _ in range(20):
        side = int(draw.integers(size // 5, size // 2))
        left, top = (int(draw.integers(0, most - side + 1)) for most in sides)
        place = np.s_[top : top + side, left : left + side]
        if taken[place].any():
            continue
        taken[place] = True
        kind = int(draw.integers(len(SHAPES)))
        colour = draw.integers(0, 256, 3)
        colour[draw.integers(3)] = draw.choice([0, 255])
        mask = _mask(kind, side)
        image[:3, top : top + side, left : left + side][:, mask] = colour[:, None]
        row[CLASS], row[AREA], row[CROWD] = kind, float(mask.sum()), 0.0
        row[BOX] = np.array([left, top, left + side, top + side]) / size
        return


def _mask(kind: int, side: int) -> np.ndarray:
    """Which pixels of its box a shape fills."""
    across = np.arange(side) - (side - 1) / 2
    y, x = np.meshgrid(across, across, indexing="ij")
    if SHAPES[kind] == "square":
        return np.ones((side, side), bool)
    if SHAPES[kind] == "disc":
        found: np.ndarray = x**2 + y**2 <= (side / 2) ** 2
        return found
    cross: np.ndarray = (np.abs(x) <= side / 6) | (np.abs(y) <= side / 6)
    return cross
