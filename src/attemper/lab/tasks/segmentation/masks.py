"""Mask files: a number for every pixel, and why a file is none that can be used."""

from __future__ import annotations

from typing import Any

import numpy as np

from attemper.errors import UnreadableError
from attemper.lab.tasks.sample_files import open_image

Numbers = np.ndarray[Any, np.dtype[np.uint8]]

INDEXED = ("L", "P", "1")
"""Modes of Pillow whose pixels are numbers of 8 bits: grey values, places in a palette, and ink or none."""
COLOURED = ("RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr", "HSV", "LAB")
FULL_ADE = "_seg"
"""How the names of masks end in the full ADE20K."""
OVERFLOW = 2**8
NOTHING = 255
"""The class of a pixel that is not labelled, as masks are stored here; in files, unless something else is said."""


def read_mask(data: bytes, name: str = "") -> Numbers:
    """The numbers of a mask's pixels, uint8 (height, width), as they are stored: a palette is not looked at.

    Numbers up to 255 are taken from files of 16 or 32 bits and from three equal channels, too.

    name: of the file, without its ending; some data sets are known by it.
    """
    found: Numbers | None = None

    def prepare(image: Any) -> Any:
        nonlocal found
        if image.format == "JPEG":
            raise UnreadableError("it is a JPEG, which changes numbers; masks must be PNG")
        found = _numbers(image, name)
        return image

    open_image(data, prepare)
    assert found is not None
    return found


def _numbers(image: Any, name: str) -> Numbers:
    if image.mode in INDEXED:
        return np.asarray(image, dtype=np.uint8)
    if image.mode in COLOURED:
        colours = np.asarray(image.convert("RGB"))
        if name.endswith(FULL_ADE):
            raise UnreadableError(
                "it codes objects by colours, as the full ADE20K does; ADEChallengeData2016 has masks of 150 classes"
            )
        if (colours != colours[..., :1]).any():
            count = len(np.unique(colours.reshape(-1, 3), axis=0))
            raise UnreadableError(
                f"{count:,} colours ({image.mode}) in place of class numbers: write numbers, as a PNG of mode L or P"
            )
        return colours[..., 0]
    wide = np.asarray(image)
    if image.mode == "F":
        raise UnreadableError("its pixels are floating-point numbers; classes are whole ones, from 0 to 255")
    lowest, highest = int(wide.min(initial=0)), int(wide.max(initial=0))
    if lowest < 0 or highest >= OVERFLOW:
        raise UnreadableError(f"its numbers go from {lowest:,} to {highest:,}; classes are those from 0 to 255")
    return wide.astype(np.uint8)
