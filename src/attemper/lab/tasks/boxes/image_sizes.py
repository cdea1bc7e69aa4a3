"""How large image files are, by their first bytes, and which way up they are to be seen."""

import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attemper.errors import UnreadableError
from attemper.files import atomic_write, read_json
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.image_files import TURNED, orientation, stamp
from attemper.lab.tasks.scan_files import CACHE, look_through

HEAD = 2**18
"""Bytes in which nearly every format says how large an image is; the others are read whole."""
ON_ITS_SIDE = range(5, 9)
"""EXIF orientations in which width and height change places."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Width and height as they are stored, and as they are seen; None: the file cannot be read.

    turned: EXIF data turn or mirror the image, which width and height need not tell.
    """

    stored: tuple[int, int] | None
    seen: tuple[int, int] | None
    turned: bool = False


def sizes_of(files: Sequence[Path], root: Path) -> list[Size]:
    """The sizes of some files; what came of it is kept under the data root, by names, sizes and times of the files."""
    stamps = [stamp(file) for file in files]
    cache = root / CACHE / f"{of_parts('image sizes 2', *stamps)}.sizes.json"
    try:
        held = read_json(cache)
        found = [Size(_pair(stored), _pair(seen), bool(turned)) for stored, seen, turned in held]
        if len(found) == len(files):
            return found
    except (UnreadableError, ValueError, TypeError):
        pass  # not looked through before, or damaged: it is made anew
    found = look_through("reading the sizes of images", files, size_of)
    if root.is_dir():
        try:
            atomic_write(cache, json.dumps([dataclasses.astuple(each) for each in found]), durable=False)
        except OSError:
            return found  # nothing can be kept there: the next start looks again
    return found


def size_of(file: Path) -> Size:
    """The size of one file, by its first bytes or, where these do not tell, by all of them."""
    for most in (HEAD, -1):
        try:
            with open(file, "rb") as opened:
                return _size(opened.read(most))
        except Exception:  # what Pillow raises depends on the format
            continue
    return Size(None, None)


def _size(data: bytes) -> Size:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        stored = (image.width, image.height)
        way = orientation(image)
        return Size(stored, stored[::-1] if way in ON_ITS_SIDE else stored, way in TURNED)


def _pair(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    width, height = value
    return int(width), int(height)
