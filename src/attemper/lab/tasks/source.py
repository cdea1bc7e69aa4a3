"""Samples by index: all in memory as uint8 where they fit, else read from disk while training runs."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks.sample_files import open_image

MEMORY_LIMIT = 2 * 1024**3
"""Bytes of images above which a data set is read from disk in batches instead of being held in memory."""

SAMPLE = 10_000
"""How many images are read to estimate mean and deviation of a data set that is not held in memory."""


class Source(Protocol):
    """A set of samples with what is to be predicted of them."""

    @property
    def targets(self) -> Tensor:
        """Class of every sample, int64 (N); of sequences, that of every position, (N, T)."""
        ...

    def __len__(self) -> int: ...

    @property
    def in_memory(self) -> bool: ...

    def take(self, indices: Tensor) -> Source:
        """Only these samples, in this order."""
        ...

    def to(self, device: torch.device) -> Source:
        """The same samples, given out on a device."""
        ...

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs as they are stored and targets, in the order of these indices; the last batch may be smaller."""
        ...

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of every channel, two float32 tensors (C)."""
        ...


@dataclasses.dataclass
class MemorySource:
    """Images in one uint8 tensor (N, C, H, W), on the device where they are used."""

    images: Tensor
    targets: Tensor
    in_memory: bool = dataclasses.field(default=True, init=False)
    groups: Tensor | None = None
    """Images that must not be separated have the same number, int64 (N); None: every image is alone."""
    facts: Mapping[str, Tensor] = dataclasses.field(default_factory=dict, kw_only=True)
    """What metrics need to know of a sample and models are not told, on the CPU, by name: (N, …) each."""

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> MemorySource:
        return dataclasses.replace(
            self,
            images=self.images[indices],
            targets=self.targets[indices],
            groups=chosen(self.groups, indices),
            facts=facts_of(self.facts, indices),
        )

    def to(self, device: torch.device) -> MemorySource:
        return dataclasses.replace(self, images=self.images.to(device), targets=self.targets.to(device))

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in order.to(self.targets.device).split(batch_size):
            yield self.images[indices], self.targets[indices]

    def statistics(self) -> tuple[Tensor, Tensor]:
        return channel_statistics(self.images)


def chosen(groups: Tensor | None, indices: Tensor) -> Tensor | None:
    """The groups of some samples; None: there are none."""
    return None if groups is None else groups[indices.to(groups.device)]


def facts_of(facts: Mapping[str, Tensor], indices: Tensor) -> dict[str, Tensor]:
    """The facts of some samples."""
    return {name: each[indices.cpu()] for name, each in facts.items()}


def start_method(workers: int) -> str | None:
    """How so many worker processes of a loader begin: forked where that is safe; None: as torch would.

    The processes of a study are spawned, and would spawn theirs. Each of them would import torch, for every epoch and
    every evaluation anew.
    """
    return "fork" if workers and sys.platform == "linux" else None


@dataclasses.dataclass
class LazySource:
    """Images that are decoded when they are asked for.

    load: index → uint8 (C, H, W). It is called in worker processes, so it must be picklable.
    targets: of every sample that `load` knows, cut down to `indices`: a class, or a tensor of any shape, (N, …).
    """

    load: Callable[[int], Tensor]
    targets: Tensor
    indices: Tensor | None = None
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    workers: int = dataclasses.field(default_factory=lambda: max(0, min(8, (os.cpu_count() or 1) - 1)))
    in_memory: bool = dataclasses.field(default=False, init=False)
    groups: Tensor | None = None
    facts: Mapping[str, Tensor] = dataclasses.field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if self.indices is None:
            self.indices = torch.arange(len(self.targets))

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> Self:
        assert self.indices is not None
        return dataclasses.replace(
            self,
            targets=self.targets[indices],
            indices=self.indices[indices],
            groups=chosen(self.groups, indices),
            facts=facts_of(self.facts, indices),
        )

    def to(self, device: torch.device) -> Self:
        return dataclasses.replace(self, device=device)

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.indices is not None
        order = order.cpu()
        loader = torch.utils.data.DataLoader(
            _Chosen(self.load, self.indices[order], self.targets[order]),
            batch_size=batch_size,
            num_workers=self.workers,
            multiprocessing_context=start_method(self.workers),
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else it would draw from the stream of the stochastic methods
        )
        for images, targets in loader:
            yield images.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def statistics(self) -> tuple[Tensor, Tensor]:
        step = max(1, len(self) // SAMPLE)
        order = torch.arange(0, len(self), step)
        cpu = dataclasses.replace(self, device=torch.device("cpu"))
        return channel_statistics(torch.cat([images for images, _ in cpu.batches(order, 256)]))


@dataclasses.dataclass
class _Chosen(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Some samples, in the order in which a loader shall give them."""

    load: Callable[[int], Tensor]
    indices: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        return self.load(int(self.indices[position])), self.targets[position]


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of uint8 (N, C, H, W), exact sums of integers.

    A channel that never changes gets the deviation 1, so that dividing by it does no harm.
    """
    histogram = torch.stack(
        [torch.bincount(channel.flatten().int(), minlength=256) for channel in images.cpu().unbind(1)]
    )
    values = torch.arange(256, dtype=torch.float64)
    weights = histogram.double() / histogram.sum(1, keepdim=True)
    mean = weights @ values
    deviation = ((weights @ values.square()) - mean.square()).clamp(min=0).sqrt()
    return mean.float(), torch.where(deviation > 1e-6, deviation, 1.0).float()


def decode(file: Path | Any, size: int, *, turn: bool = False) -> Tensor:
    """An image file, or an open image, as uint8 (3, size, size): the middle square of it, resized.

    A file that is no image is an `UnreadableError` that says why.

    turn: upright, as its EXIF data say. Published figures on test sets are without.
    """
    from PIL import Image, ImageOps
    from torchvision.transforms.v2.functional import pil_to_tensor

    from attemper.lab.tasks.image_files import as_rgb, upright

    def prepare(image: Any) -> Any:
        return as_rgb(upright(image) if turn else image)

    image = prepare(file) if isinstance(file, Image.Image) else open_image(file, prepare)
    fitted = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    pixels: Tensor = pil_to_tensor(fitted)
    return pixels


def found_under(root: Path, path: str, kind: Callable[[Path], bool] = Path.is_dir, what: str = "a folder") -> Path:
    """A path under the data root, or from where the program runs."""
    found = next((each for each in (root / path, Path(path)) if kind(each)), None)
    if found is None:
        raise DataError(f"'{path}' is not {what}, neither under the data root '{root}' nor from here.")
    return found
