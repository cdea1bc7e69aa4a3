"""Image files as people have them: which can be decoded, which are copies, which way up they are."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attemper.errors import MissingFileError, UnreadableError
from attemper.files import atomic_write, read_bytes, read_json
from attemper.lab.tasks.broken import reason_of, reason_of_bytes
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.listing import Kind
from attemper.lab.tasks.notifications import note
from attemper.lab.tasks.sample_files import MOST_BYTES, open_image
from attemper.lab.tasks.scan_files import CACHE, look_through

IMAGES = Kind(
    "image",
    "images",
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".ppm", ".pgm", ".pnm", ".bmp", ".tif", ".tiff", ".webp", ".gif"),
        *(".jp2", ".avif", ".heic", ".heif"),  # not every Pillow reads them: they are tried, so that they are named
    ),
)
VERSION = 1
"""Raised when the same files would be examined with another outcome."""
MANY = 10_000
"""Files from which on a look at all of them takes so long that somebody should know how to avoid it."""
SMALL = (32, 32)
"""A JPEG is decoded at an eighth of its size or so to see whether it is whole; that takes a fraction of the time."""
ORIENTATION = 0x0112
TURNED = range(2, 9)
"""EXIF orientations other than the usual one."""


# --------------------------------------------------------------------------------------------------------------- pixels
def as_rgb(image: Any) -> Any:
    """Pillow's image with red, green and blue of 8 bits each.

    Grey values of 16 bits are scaled to 8; Pillow itself would cut them off at 255, which leaves white. Transparency is
    dropped, and of an animation the first frame is taken.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        import numpy as np

        wide = np.asarray(image, dtype=np.float32)
        return Image.fromarray((wide / 257).round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "whole numbers of 32 bits" if image.mode == "I" else "floating-point numbers"
        raise UnreadableError(f"its pixels are {kind}; save it with 8 or 16 bits per channel")
    return image.convert("RGB")


def upright(image: Any) -> Any:
    """Pillow's image, turned the way that its EXIF data say it is to be seen."""
    from PIL import Image

    turn = Image.Transpose
    ways = {2: turn.FLIP_LEFT_RIGHT, 3: turn.ROTATE_180, 4: turn.FLIP_TOP_BOTTOM, 5: turn.TRANSPOSE}
    ways |= {6: turn.ROTATE_270, 7: turn.TRANSVERSE, 8: turn.ROTATE_90}
    way = ways.get(orientation(image))
    return image if way is None else image.transpose(way)


def orientation(image: Any) -> Any:
    """The number by which EXIF data say how an image is to be turned; 1: not at all."""
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged EXIF data say nothing, and the image may be whole all the same
        return 1


# ---------------------------------------------------------------------------------------------------------- examination
@dataclasses.dataclass(frozen=True)
class Examined:
    """What was found in some files.

    problems: number of a file → why it cannot be used. equal: for every file, the first one with the same contents.
    turned: how many are to be seen another way up than they are stored.
    """

    problems: dict[int, str]
    equal: list[int]
    turned: int


def examine(files: Sequence[Path], root: Path) -> Examined:
    """Decode every file once; what came of it is kept under the data root, by names, sizes and times of the files."""
    import PIL

    parts = [f"images {VERSION}, Pillow {PIL.__version__}", *map(stamp, files)]
    cache = root / CACHE / f"{of_parts(*parts)}.images.json"
    found = _remembered(cache, len(files))
    if found is not None:
        return found
    looked = look_through("checking images", files, _look)
    first: dict[str, int] = {}
    equal = [index if each.reason else first.setdefault(each.digest, index) for index, each in enumerate(looked)]
    problems = {index: each.reason for index, each in enumerate(looked) if each.reason}
    found = Examined(problems, equal, sum(each.turned for each in looked))
    _remember(cache, found, root)
    return found


@dataclasses.dataclass(frozen=True)
class _Look:
    reason: str = ""
    digest: str = ""
    turned: bool = False


def _look(file: Path) -> _Look:
    turned = False

    def prepare(image: Any) -> Any:
        nonlocal turned
        turned = orientation(image) in TURNED
        image.draft(image.mode, SMALL)
        return as_rgb(image)

    try:
        data = read_bytes(file, most=MOST_BYTES)
    except UnreadableError as error:
        cause = error.__cause__
        missing = isinstance(error, MissingFileError)
        return _Look("No such file" if missing else reason_of(cause if isinstance(cause, OSError) else error, file))
    if reason := reason_of_bytes(data):
        return _Look(reason)
    try:
        open_image(data, prepare)
    except UnreadableError as error:
        return _Look(reason_of(error, file))
    return _Look("", hashlib.sha256(data).hexdigest(), turned)


def stamp(file: Path) -> str:
    """What changes when a file does, without its contents."""
    try:
        about = file.stat()
    except OSError as error:
        return f"{file} {error.errno}"
    return f"{file.absolute()} {about.st_size} {about.st_mtime_ns}"


def _remembered(cache: Path, count: int) -> Examined | None:
    try:
        held = read_json(cache)
        problems = {int(index): str(reason) for index, reason in held["problems"].items()}
        equal = list(range(count))
        for index, first in held["copies"].items():
            equal[int(index)] = int(first)
        return Examined(problems, equal, int(held["turned"]))
    except (UnreadableError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


def _remember(cache: Path, found: Examined, root: Path) -> None:
    copies = {index: first for index, first in enumerate(found.equal) if first != index}
    held = {"problems": found.problems, "copies": copies, "turned": found.turned}
    try:
        if not root.is_dir():  # a folder somewhere else: nothing is made here that nobody asked for
            raise FileNotFoundError(2, "there is no data root")
        atomic_write(cache, json.dumps(held), durable=False)
    except OSError as error:
        if len(found.equal) >= MANY:
            note(
                f"What was found in {len(found.equal):,} images cannot be kept in '{cache.parent}' "
                f"({error.strerror or error}): every start decodes all of them again. Name a data root that can be "
                "written, with --data or the variable ATTEMPER_DATA."
            )
