"""Mask files: a number for every pixel, and why a file is none that can be used."""

from __future__ import annotations

from typing import Any

import numpy as np

from attemper.errors import UnreadableError
from attemper.lab.tasks.sample_files import open_image

Numbers = np.ndarray[Any, np.dtype[np.uint8]]

INDEXED = ("L", "P", "1")
"""Modes of Pillow whose pixels are numbers of 8 bits: grey values, places in a palette, and ink or none."""
FULL_ADE = "_seg"
"""How the names of masks end in the full ADE20K."""
OVERFLOW = 2**8
NOTHING = 255
"""The class of a pixel that is not labelled, as masks are stored here; in files, unless something else is said."""


def read_mask(data: bytes, name: str = "") -> Numbers:
    """The numbers of a mask's pixels, uint8 (height, width), as they are stored: a palette is not looked at.

    name: of the file, without its ending; some data sets are known by it.
    """
    found: Numbers | None = None

    def prepare(image: Any) -> Any:
        nonlocal found
        if image.format == "JPEG":
            raise UnreadableError("it is a JPEG, which changes numbers; masks must be PNG")
        if image.mode not in INDEXED:
            raise UnreadableError(_not_indexed(image, name))
        found = np.asarray(image, dtype=np.uint8)
        return image

    open_image(data, prepare)
    assert found is not None
    return found


def _not_indexed(image: Any, name: str) -> str:
    """Why the pixels of a mask are no numbers of classes, and what can be done."""
    if image.mode in ("RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr"):
        if name.endswith(FULL_ADE):
            return "it codes objects by colours, as the full ADE20K does; ADEChallengeData2016 has masks of 150 classes"
        return _not_colours(image)
    depth = "16 bits" if image.mode.startswith("I;16") or image.mode == "I" else f"Pillow's mode {image.mode}"
    highest = int(np.asarray(image).max(initial=0))
    if highest < OVERFLOW:
        return f"its numbers are of {depth}, though none is above {highest}; save it with 8 bits: Image.convert('L')"
    return f"its numbers are of {depth} and go up to {highest:,}; classes are numbers of 8 bits, from 0 to 255"


def _not_colours(image: Any) -> str:
    """What a mask of colours is, and how it becomes one of numbers, where that can be told from it."""
    colours = np.asarray(image.convert("RGB")).reshape(-1, 3)
    if (colours == colours[:, :1]).all():
        return f"three equal channels ({image.mode}) in place of one: keep one of them, Image.getchannel(0)"
    count = len(np.unique(colours, axis=0))
    return f"{count:,} colours ({image.mode}) in place of class numbers: write numbers, as a PNG of mode L or P"
