"""The user's own images: a folder of them, decoded where that can be done."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attemper.errors import UnreadableError
from attemper.lab.counting import counted
from attemper.lab.errors import DataError
from attemper.lab.tasks.sample_files import files_below
from attemper.lab.tasks.source import decode

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
NAMED = 5
"""Names of images that cannot be decoded: so many are shown."""


@dataclass(frozen=True)
class Images:
    """Images of one size."""

    pixels: Tensor
    """uint8 (B, 3, size, size)"""
    names: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    """Names of files that could not be decoded."""

    @property
    def warning(self) -> str:
        """What was skipped, in words; empty where nothing was."""
        if not self.skipped:
            return ""
        rest = f" and {len(self.skipped) - NAMED} more" if len(self.skipped) > NAMED else ""
        many = counted(len(self.skipped), "image could not be decoded and was", "images could not be decoded and were")
        return f"{many} skipped: {', '.join(self.skipped[:NAMED])}{rest}"


def image_files(folder: Path) -> list[Path]:
    """The files of a folder that are called like images, by name and at any depth; raises where there is none."""
    if not folder.is_dir():
        raise DataError(f"'{folder}' is not a folder; --images wants one with image files in it.")
    files = files_below(folder, ENDINGS)
    if not files:
        raise DataError(f"'{folder}' has no image in it (looked for {', '.join(ENDINGS)}).")
    return files


def read_images(folder: Path, size: int, most: int) -> Images:
    """The first images of a folder, by name and at any depth, cut to their middle square and resized.

    size: side in pixels. most: so many images are read.
    """
    files = image_files(folder)
    pixels, names, skipped = [], [], []
    for file in files:
        name = file.relative_to(folder).as_posix()
        try:
            pixels.append(decode(file, size, turn=True))
            names.append(name)
        except UnreadableError:
            skipped.append(name)
        if len(pixels) == most:
            break
    if not pixels:
        shown = ", ".join(skipped[:NAMED]) + (", …" if len(skipped) > NAMED else "")
        raise DataError(f"Of {counted(len(skipped), 'image')} in '{folder}', none can be decoded: {shown}.")
    return Images(torch.stack(pixels), tuple(names), tuple(skipped))
