"""Images of noise with masks in any number and size: what a run costs can be measured before its data is there."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from attemper.lab.tasks import source as memory
from attemper.lab.tasks.augment import check
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.seed_streams import generator
from attemper.lab.tasks.segmentation.masks import NOTHING
from attemper.lab.tasks.segmentation.sources import MemoryMasks, targets_of
from attemper.lab.tasks.segmentation.task import MaskShape, SegmentationTask
from attemper.lab.tasks.split import FIXED

DIFFERENT = 64
"""So many different images there are, fewer where they are large; the rest repeat them."""
MOST_BYTES = 2**26
"""Of the different images."""


def open_noise_masks(
    name: str, *, size: int = 512, classes: int = 150, train: int = 20_210, test: int = 2_000
) -> SegmentationTask:
    """Noise of the size of ADE20K, by default. Nothing can be learnt from it.

    size: side of the images in pixels. classes: at most 255.
    """
    check("classes", classes, 2, NOTHING, whole=True)
    draws = generator(FIXED, "noise-masks")
    different = max(1, min(DIFFERENT, MOST_BYTES // (4 * size**2)))
    images = torch.randint(256, (different, 3, size, size), generator=draws, dtype=torch.uint8)
    masks = torch.randint(classes, (different, size, size), generator=draws).byte()
    pool = MemoryMasks(images, masks, list(masks))
    return SegmentationTask(
        name=name,
        shape=MaskShape(channels=3, height=size, width=size, classes=classes),
        fingerprint=of_parts("noise-masks", *map(str, (size, classes, train, test))),
        pool=lambda: RepeatedMasks(pool, torch.arange(train)),
        held_out=lambda: RepeatedMasks(pool, torch.arange(test)),
        classes=tuple(map(str, range(classes))),
        numbers=tuple(range(classes)),
    )


@dataclasses.dataclass
class RepeatedMasks:
    """A few images that stand for many: sample n is number `indices[n]`, counted round and round."""

    pool: MemoryMasks
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def targets(self) -> Tensor:
        return targets_of(self.pool.masks[self.indices % len(self.pool)])

    @property
    def in_memory(self) -> bool:
        """Whether real data of this size would be: runs treat it the same way."""
        return 5 * len(self) * self.pool.masks[0].numel() <= memory.MEMORY_LIMIT

    def take(self, indices: Tensor) -> "RepeatedMasks":
        return dataclasses.replace(self, indices=self.indices[indices.cpu()])

    def to(self, device: torch.device) -> "RepeatedMasks":
        return dataclasses.replace(self, pool=self.pool.to(device))

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self.pool.batches(self.indices[order.cpu()] % len(self.pool), batch_size)

    def statistics(self) -> tuple[Tensor, Tensor]:
        return self.pool.statistics()

    def truth(self, position: int) -> Tensor:
        return self.pool.truth(int(self.indices[position]) % len(self.pool))
