"""Images of noise in any number and size: what a run costs can be measured before its data is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from attemper.lab.tasks import source
from attemper.lab.tasks.augment import check
from attemper.lab.tasks.base import ImageTask, InputShape
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.seed_streams import generator
from attemper.lab.tasks.source import channel_statistics

DIFFERENT = 256
"""So many different images there are, fewer where they are large; the rest repeat them."""
MOST_BYTES = 2**28
"""Of the different images."""


def open_noise(
    name: str, *, size: int = 224, channels: int = 3, classes: int = 1000, train: int = 1_281_167, test: int = 50_000
) -> ImageTask:
    """Noise of the size of ImageNet, by default. Nothing can be learnt from it."""
    for option, value in {"size": size, "channels": channels, "classes": classes, "train": train, "test": test}.items():
        check(option, value, 1, whole=True)
    pool = noise_images(channels, size)
    return ImageTask(
        name=name,
        shape=InputShape(channels=channels, height=size, width=size, classes=classes),
        fingerprint=of_parts("noise", *map(str, (size, channels, classes, train, test))),
        pool=lambda: NoiseSource(pool, torch.arange(train) % classes),
        held_out=lambda: NoiseSource(pool, torch.arange(test) % classes),
        classes=tuple(map(str, range(classes))),
    )


def noise_images(channels: int, size: int) -> Tensor:
    """The different images, uint8 (N, C, size, size)."""
    different = max(1, min(DIFFERENT, MOST_BYTES // (channels * size**2)))
    return torch.randint(256, (different, channels, size, size), generator=generator(0, "noise"), dtype=torch.uint8)


@dataclasses.dataclass
class NoiseSource:
    """A few images that stand for many.

    pool: uint8 (DIFFERENT, C, H, W). targets: int64 (N).
    """

    pool: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def in_memory(self) -> bool:
        """Whether real data of this size would be: runs treat it the same way."""
        return len(self) * self.pool[0].numel() <= source.MEMORY_LIMIT

    def take(self, indices: Tensor) -> NoiseSource:
        return NoiseSource(self.pool, self.targets[indices])

    def to(self, device: torch.device) -> NoiseSource:
        return NoiseSource(self.pool.to(device), self.targets.to(device))

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in order.to(self.targets.device).split(batch_size):
            yield self.pool[indices % len(self.pool)], self.targets[indices]

    def statistics(self) -> tuple[Tensor, Tensor]:
        return channel_statistics(self.pool)
