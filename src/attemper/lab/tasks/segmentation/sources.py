"""Images with masks, in memory or read when they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from attemper.errors import UnreadableError
from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import reason_of, shown
from attemper.lab.tasks.image_files import as_rgb, upright
from attemper.lab.tasks.sample_files import open_image
from attemper.lab.tasks.segmentation.canvas import mask_on_canvas, on_canvas
from attemper.lab.tasks.segmentation.examining import Looked, Numbering, bytes_of
from attemper.lab.tasks.segmentation.layouts import Pair
from attemper.lab.tasks.segmentation.masks import NOTHING, read_mask
from attemper.lab.tasks.source import Source, channel_statistics, default_workers, start_method
from attemper.tempering.outputs import IGNORED


@runtime_checkable
class MaskSource(Source, Protocol):
    """A set of images with a class for every pixel."""

    def truth(self, position: int) -> Tensor:
        """The classes of all pixels of a sample's file, uint8 (h, w), `NOTHING` where there is none."""
        ...


def targets_of(masks: Tensor) -> Tensor:
    """uint8 (…) as it is stored → int64, `IGNORED` where nothing is to be predicted."""
    return torch.where(masks == NOTHING, IGNORED, masks.long())


@dataclasses.dataclass
class MemoryMasks:
    """Images uint8 (N, 3, H, W) and masks uint8 (N, H, W) on their canvases; truths: masks as large as their files."""

    images: Tensor
    masks: Tensor
    truths: Sequence[Tensor]
    in_memory: bool = dataclasses.field(default=True, init=False)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def targets(self) -> Tensor:
        return targets_of(self.masks)

    def take(self, indices: Tensor) -> MemoryMasks:
        chosen = [self.truths[index] for index in indices.tolist()]
        return MemoryMasks(self.images[indices], self.masks[indices], chosen)

    def to(self, device: torch.device) -> MemoryMasks:
        return MemoryMasks(self.images.to(device), self.masks.to(device), self.truths)

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in order.to(self.images.device).split(batch_size):
            yield self.images[indices], targets_of(self.masks[indices])

    def statistics(self) -> tuple[Tensor, Tensor]:
        return channel_statistics(self.images)

    def truth(self, position: int) -> Tensor:
        return self.truths[position]


@dataclasses.dataclass
class MaskFiles:
    """Reads pairs of files. It goes to worker processes, so it can be pickled.

    canvas: height and width of what a model sees.
    """

    pairs: list[Pair]
    looked: list[Looked]
    numbering: Numbering
    canvas: tuple[int, int]

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        """An image and its mask on their canvases, both uint8."""
        pair, turned = self.pairs[index], self.looked[index].turned
        assert pair.image is not None

        def prepare(image: Any) -> Any:
            return as_rgb(upright(image) if turned else image)

        try:
            image = on_canvas(open_image(bytes_of(pair.image), prepare), self.canvas)
        except UnreadableError as error:  # it was whole when it was examined
            raise _unreadable(pair.image, error) from None
        return image, mask_on_canvas(self.truth(index), self.canvas)

    def truth(self, index: int) -> Tensor:
        """The classes of a mask, as large as it is in its file."""
        pair = self.pairs[index]
        assert pair.mask is not None
        try:
            numbers = read_mask(bytes_of(pair.mask), pair.mask.stem)
        except UnreadableError as error:
            raise _unreadable(pair.mask, error) from None
        return torch.from_numpy(self.numbering.classes_of(numbers))

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def bytes(self) -> int:
        """What all of it takes in memory."""
        canvas = 4 * self.canvas[0] * self.canvas[1]
        return sum(canvas + each.size[0] * each.size[1] for each in self.looked)


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(f"'{shown(str(file))}' cannot be read any more: {reason_of(error, file)}.")


@dataclasses.dataclass
class LazyMasks:
    """The same, read from files when it is asked for: for sets that do not fit into memory."""

    load: MaskFiles
    indices: Tensor
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    workers: int = dataclasses.field(default_factory=default_workers)
    in_memory: bool = dataclasses.field(default=False, init=False)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def targets(self) -> Tensor:
        return torch.cat([targets for _, targets in self.batches(torch.arange(len(self)), 64)])

    def take(self, indices: Tensor) -> LazyMasks:
        return dataclasses.replace(self, indices=self.indices[indices.cpu()])

    def to(self, device: torch.device) -> LazyMasks:
        return dataclasses.replace(self, device=device)

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        loader = torch.utils.data.DataLoader(
            _Chosen(self.load, self.indices[order.cpu()].tolist()),
            batch_size=batch_size,
            num_workers=self.workers,
            multiprocessing_context=start_method(self.workers),
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else it would draw from the stream of the stochastic methods
        )
        for images, masks in loader:
            yield images.to(self.device, non_blocking=True), targets_of(masks.to(self.device, non_blocking=True))

    def statistics(self) -> tuple[Tensor, Tensor]:
        return channel_statistics(torch.cat([images for images, _ in self.batches(torch.arange(len(self)), 64)]))

    def truth(self, position: int) -> Tensor:
        return self.load.truth(int(self.indices[position]))


@dataclasses.dataclass
class _Chosen(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    load: MaskFiles
    chosen: list[int]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        return self.load(self.chosen[position])
