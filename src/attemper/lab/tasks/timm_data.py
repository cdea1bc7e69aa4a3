"""Data sets that timm opens: torchvision's, Hugging Face's, WebDataset's, TensorFlow's."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks import source
from attemper.lab.tasks.base import ImageTask, InputShape
from attemper.lab.tasks.broken import listed, reason_of
from attemper.lab.tasks.fingerprint import of_parts, of_tensors
from attemper.lab.tasks.source import LazySource, MemorySource, Source


def open_timm(
    name: str,
    dataset: str,
    root: Path,
    *,
    size: int = 64,
    training: str = "train",
    held_out: str = "validation",
    train: int | None = None,
    test: int | None = None,
) -> ImageTask:
    """The images of a data set that `timm.data.create_dataset(dataset, root)` opens, resized to a square.

    size: side of the images in pixels.
    training, held_out: what the two splits are called there.
    """
    pool, rest = TimmSplit(dataset, root, training, size), TimmSplit(dataset, root, held_out, size)
    classes = int(pool.targets.max()) + 1
    return ImageTask(
        name=name,
        shape=InputShape(channels=3, height=size, width=size, classes=classes),
        fingerprint=of_parts(dataset, str(size), pool.fingerprint, rest.fingerprint),
        pool=lambda: pool.source,
        held_out=lambda: rest.source,
        classes=tuple(map(str, range(classes))),
        train=train,
        test_images=test,
    )


@dataclasses.dataclass
class TimmSplit:
    """One split of a data set; one that comes as a stream is read to its end."""

    name: str
    root: Path
    split: str
    size: int

    @cached_property
    def dataset(self) -> Any:
        from timm.data.dataset_factory import create_dataset

        try:
            return create_dataset(self.name, root=str(self.root), split=self.split, is_training=False)
        except Exception as error:  # whatever the library behind the name raises
            raise DataError(
                f"timm could not open the split '{self.split}' of '{self.name}' under '{self.root}': "
                f"{type(error).__name__}: {error}"
            ) from error

    @property
    def fits(self) -> bool:
        return len(self.dataset) * 3 * self.size**2 <= source.MEMORY_LIMIT

    @cached_property
    def source(self) -> Source:
        if not self.fits:
            return LazySource(self.load, self._read(images=False)[1])
        images, targets = self._read(images=True)
        return MemorySource(images, targets)

    @property
    def targets(self) -> Tensor:
        return self.source.targets

    @cached_property
    def fingerprint(self) -> str:
        """Of images and classes where they are held in memory, else of the classes alone."""
        if isinstance(self.source, MemorySource):
            return of_tensors(self.source.images, self.source.targets)
        return of_tensors(self.source.targets)

    def load(self, index: int) -> Tensor:
        try:
            return source.decode(self.dataset[index][0], self.size)
        except Exception as error:  # whatever the library behind the name raises
            raise DataError(
                f"Sample {index} of the split '{self.split}' of '{self.name}' is not an image that can be read: "
                f"{reason_of(error)}."
            ) from error

    def _read(self, images: bool) -> tuple[Tensor, Tensor]:
        streamed = isinstance(self.dataset, torch.utils.data.IterableDataset)
        if streamed and not images:
            raise DataError(
                f"'{self.name}' is a stream and too large to be held in memory at size {self.size}; open it with "
                "wds: or hf:, or choose a smaller size."
            )
        pixels: list[Tensor] = []
        targets: list[int] = []
        problems: list[str] = []
        for index, sample in enumerate(self._samples(streamed)):
            try:
                image, target = sample()
                if images:
                    pixels.append(source.decode(image, self.size))
                targets.append(int(target))
            except Exception as error:  # whatever the library behind the name raises
                problems.append(f"sample {index} ({reason_of(error)})")
        if problems:
            raise DataError(
                f"{len(problems):,} of {len(targets) + len(problems):,} images of the split '{self.split}' of "
                f"'{self.name}' cannot be read: {listed(problems)}."
            )
        if not targets:
            raise DataError(f"The split '{self.split}' of '{self.name}' is empty.")
        return torch.stack(pixels) if images else torch.empty(0), torch.tensor(targets)

    def _samples(self, streamed: bool) -> Iterator[Callable[[], tuple[Any, Any]]]:
        """What gives each sample, so that one that cannot be read is an error of its own."""
        if streamed:
            return (partial(tuple, sample) for sample in self.dataset)
        return (partial(self.dataset.__getitem__, index) for index in range(len(self.dataset)))
