"""The images that questions are about: whole, as squares of one size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks import source
from attemper.lab.tasks.broken import reason_of, shown
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.image_files import as_rgb, upright
from attemper.lab.tasks.sample_files import open_image
from attemper.lab.tasks.scan_files import look_through
from attemper.lab.tasks.source import LazySource, MemorySource, Source


def squeeze(file: Path, size: int) -> Tensor:
    """An image file as uint8 (3, size, size). Nothing is cut off, since a question can be about any part of it."""
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    image = open_image(file, lambda opened: as_rgb(upright(opened)))
    pixels: Tensor = pil_to_tensor(image.resize((size, size), Image.Resampling.BICUBIC))
    return pixels


@dataclasses.dataclass
class ImageFiles:
    """Some files as squares; in memory where all of them fit."""

    files: Sequence[Path]
    size: int

    @property
    def fits(self) -> bool:
        return len(self.files) * 3 * self.size**2 <= source.MEMORY_LIMIT

    @cached_property
    def source(self) -> Source:
        """The images in the order of the files; the target of each is its number."""
        numbers, load = torch.arange(len(self.files)), Squeezer(list(self.files), self.size)
        if not self.fits:
            return LazySource(load, numbers)
        pixels = look_through("decoding images", range(len(self.files)), load)
        empty = torch.empty(0, 3, self.size, self.size, dtype=torch.uint8)
        return MemorySource(torch.stack(pixels) if pixels else empty, numbers)

    def fingerprint(self) -> str:
        """Of contents where the images are held in memory; of names and sizes where that would take long."""
        parts: list[str | bytes] = [str(self.size)]
        for file in self.files:
            try:
                parts += [file.name, file.read_bytes() if self.fits else str(file.stat().st_size)]
            except OSError as error:
                raise _unreadable(file, error) from None
        return of_parts(*parts)


@dataclasses.dataclass
class Squeezer:
    """Number of a file → its image. Goes to worker processes, so it can be pickled."""

    files: list[Path]
    size: int

    def __call__(self, index: int) -> Tensor:
        try:
            return squeeze(self.files[index], self.size)
        except Exception as error:  # it was whole when it was examined; what Pillow raises depends on the format
            raise _unreadable(self.files[index], error) from None


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(f"'{shown(str(file))}' is not an image that can be read: {reason_of(error, file)}.")
