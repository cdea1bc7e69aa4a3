"""Files below a folder, and images in them; whatever is wrong with one is told in one line."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from attemper.errors import UnreadableError, first_line
from attemper.files import read_bytes
from attemper.lab.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 2**30
"""Of an image file."""


def files_below(folder: Path, endings: Collection[str]) -> list[Path]:
    """The files with one of these endings, at any depth and in order.

    A folder that is called like a file is none. A link that leads nowhere is in the list: whoever reads it names it.
    """
    return sorted(each for each in folder.rglob("*") if each.suffix.lower() in endings and not each.is_dir())


def subfolders(folder: Path) -> list[Path]:
    """The folders inside of a folder, one per class, in order; those whose names begin with a dot are left out.

    A link that leads nowhere is an error: a class that is not there would be missed by nobody.
    """
    inside = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    for each in inside:
        if each.is_symlink() and not each.exists():
            raise DataError(f"'{each}' is a link that leads nowhere, or to itself. Correct it, or remove it.")
    return [each for each in inside if each.is_dir()]


def open_image(given: Path | bytes, prepare: Callable[[Image], Image] | None = None) -> Image:
    """An image file, or its bytes, in colours. What cannot be decoded is an `UnreadableError` that says why.

    prepare: makes the decoded image of the opened one, if it is more than a change to red, green and blue.

    An image with more pixels than Pillow's limit is refused before it is decoded: it would fill the memory.
    """
    from PIL import Image, UnidentifiedImageError

    _expect_large_images()
    data = given if isinstance(given, bytes) else read_bytes(given, most=MOST_BYTES)
    try:
        with Image.open(io.BytesIO(data)) as opened:
            return opened.convert("RGB") if prepare is None else prepare(opened)
    except UnreadableError:
        raise
    except Image.DecompressionBombError:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise UnreadableError(f"it has more than {most:,} pixels, which is the most that is decoded") from None
    except UnidentifiedImageError as error:
        raise UnreadableError("it is no image that Pillow knows") from error
    except Exception as error:  # of many kinds, by format and by what is wrong
        raise UnreadableError(first_line(error)) from error


@functools.cache
def _expect_large_images() -> None:
    """Pillow warns of images that are half as large as its limit; they are resized at once here."""
    from PIL import Image

    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
