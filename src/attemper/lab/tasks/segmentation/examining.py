"""A look at every image and every mask of a set: whatever is wrong with any of them is found at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attemper.errors import MissingFileError, UnreadableError
from attemper.files import atomic_write, read_bytes, read_json
from attemper.lab.counting import counted
from attemper.lab.tasks.broken import reason_of, reason_of_bytes
from attemper.lab.tasks.faults import UNREADABLE, Fault
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.image_files import TURNED, as_rgb, orientation, upright
from attemper.lab.tasks.sample_files import MOST_BYTES, open_image
from attemper.lab.tasks.scan_files import CACHE, look_through
from attemper.lab.tasks.segmentation.layouts import Pair
from attemper.lab.tasks.segmentation.masks import NOTHING, Numbers, read_mask

VERSION = 3
"""Raised when the same files would be examined with another outcome."""

NO_IMAGE = Fault("mask has no image", "masks have no image")
NO_MASK = Fault("image has no mask", "images have no mask")
NEITHER = Fault("name of a list has neither image nor mask", "names of lists have neither image nor mask")
BAD_MASK = Fault("mask cannot be used", "masks cannot be used")
OTHER_SIZE = Fault("mask has another size than its image", "masks have another size than their image")
NO_CLASS = Fault("mask has numbers that are no class", "masks have numbers that are no class")
SEVERAL = Fault(
    "name has files of several endings, so that none is meant",
    "names have files of several endings, so that none is meant",
)
EMPTY = Fault("mask has no labelled pixel", "masks have no labelled pixel")
OF_MASKS = (NO_IMAGE, BAD_MASK, OTHER_SIZE, NO_CLASS, EMPTY)
"""Where it is the mask that is to be looked at."""

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclasses.dataclass(frozen=True)
class Looked:
    """What is known of a pair.

    faults: what is wrong with the files, as kinds with reasons. size: of the mask. values: the numbers in it.
    turned: the image is to be turned, as its EXIF data say, to lie below its mask. image, mask: hashes of the files.
    unclear: EXIF data turn the image, and it has the size of its mask either way.
    """

    faults: tuple[tuple[Fault, str], ...] = ()
    size: Size = (0, 0)
    values: tuple[int, ...] = ()
    turned: bool = False
    image: str = ""
    mask: str = ""
    unclear: bool = False


def examine(pairs: Sequence[Pair], root: Path) -> list[Looked]:
    """Decode every image and every mask once; what came of it is kept under the data root."""
    import PIL

    files = [file for pair in pairs for file in (pair.image, pair.mask)]
    cache = root / CACHE / f"{of_parts(f'masks {VERSION}, Pillow {PIL.__version__}', *map(_stamp, files))}.masks.json"
    if (found := _remembered(cache, len(pairs))) is not None:
        return found
    found = look_through("checking images and masks", pairs, look)
    if root.is_dir():  # a folder somewhere else: nothing is made here that nobody asked for
        try:
            atomic_write(cache, json.dumps([dataclasses.astuple(each) for each in found]), durable=False)
        except OSError:
            return found  # a data root that cannot be written: they are looked at again next time
    return found


def look(pair: Pair) -> Looked:
    """What is wrong with the files of a pair, all of it, or what is in them."""
    faults = []
    picture = mask = None
    if pair.image is pair.mask is None:
        return Looked(((NEITHER, ""),))
    try:
        if pair.image is None:
            faults.append((NO_IMAGE, ""))
        else:
            picture = _look_at_image(pair.image)
    except UnreadableError as error:
        faults.append((UNREADABLE, reason_of(error, pair.image)))
    try:
        if pair.mask is None:
            faults.append((NO_MASK, ""))
        else:
            mask = _look_at_mask(pair.mask)
    except UnreadableError as error:
        faults.append((BAD_MASK, reason_of(error, pair.mask)))
    if picture is None or mask is None:
        return Looked(tuple(faults), values=() if mask is None else mask[1])
    (stored, upright_size, of_image, way), (size, values, of_mask) = picture, mask
    if size not in (stored, upright_size):
        return Looked(((OTHER_SIZE, f"{_written(size)} pixels, and the image {_written(stored)}"),), size, values)
    unclear = way in TURNED and stored == upright_size
    return Looked((), size, values, size != stored, of_image, of_mask, unclear)


def ways_up(looked: Sequence[Looked]) -> tuple[list[Looked], list[str]]:
    """The same with those that were unclear turned as most of the others, and what is to be said about images.

    That an image is to be turned is known where it then has the size of its mask, and has not else.
    """
    upright = any(each.turned for each in looked)
    unclear = sum(each.unclear for each in looked)
    found = [dataclasses.replace(each, turned=each.turned or (each.unclear and upright)) for each in looked]
    turned = sum(each.turned for each in found)
    notes = [f"Images that are turned to lie below their masks, as their EXIF data say: {turned:,}."] * bool(turned)
    if unclear:
        images = counted(unclear, "image is", "images are")
        how = "seen, as others are" if upright else "stored"
        notes.append(f"{images} turned by EXIF data and of one size either way: taken as {how}.")
    return found, notes


def _written(size: Size) -> str:
    return f"{size[1]} × {size[0]}"


def _look_at_image(file: Path) -> tuple[Size, Size, str, int]:
    """Height and width, as it is stored and as it is to be seen, a hash, and which way up EXIF data say it is."""
    data = bytes_of(file)
    sizes: list[Size] = []
    way = 1

    def prepare(image: Any) -> Any:
        nonlocal way
        way = orientation(image)
        stored = as_rgb(image)
        for each in (stored, upright(image)):
            sizes.append((each.height, each.width))
        return stored

    open_image(data, prepare)
    return sizes[0], sizes[1], hashlib.sha256(data).hexdigest(), way


def _look_at_mask(file: Path) -> tuple[Size, tuple[int, ...], str]:
    """Height and width, the numbers in it, and a hash."""
    data = bytes_of(file)
    mask = read_mask(data, file.stem)
    return (mask.shape[0], mask.shape[1]), tuple(np.unique(mask).tolist()), hashlib.sha256(data).hexdigest()


def bytes_of(file: Path) -> bytes:
    """A file's contents; raises where its beginning shows that it is no image."""
    try:
        data = read_bytes(file, most=MOST_BYTES)
    except MissingFileError as error:
        raise UnreadableError("No such file") from error
    if reason := reason_of_bytes(data):
        raise UnreadableError(reason)
    return data


def _stamp(file: Path | None) -> str:
    if file is None:
        return "none"
    try:
        about = file.stat()
    except OSError as error:
        return f"{file} {error.errno}"
    return f"{file.absolute()} {about.st_size} {about.st_mtime_ns}"


def _remembered(cache: Path, count: int) -> list[Looked] | None:
    try:
        found = [
            Looked(
                tuple((Fault(*map(str, kind)), str(why)) for kind, why in faults),
                (int(size[0]), int(size[1])),
                tuple(map(int, values)),
                bool(turned),
                str(image),
                str(mask),
                bool(unclear),
            )
            for faults, size, values, turned, image, mask, unclear in read_json(cache)
        ]
    except (UnreadableError, ValueError, KeyError, TypeError, IndexError):
        return None
    return found if len(found) == count else None


# -------------------------------------------------------------------------------------------------------------- classes
@dataclasses.dataclass(frozen=True)
class Numbering:
    """What the numbers in masks mean.

    numbers: of the classes, in their order. ignored: the number of pixels that are not labelled, beside 0 where that
    is no class. chosen: the numbers are some that a user chose; all others count for nothing.
    """

    numbers: tuple[int, ...]
    ignored: int
    zero_is_class: bool
    chosen: bool = dataclasses.field(default=False, repr=False)

    def faults(self, values: Collection[int]) -> list[tuple[Fault, str]]:
        """What is wrong with a mask of these numbers, as kinds with reasons.

        >>> [(kind, why)] = Numbering((1, 2), ignored=255, zero_is_class=False).faults((0, 2, 7))
        >>> kind.one, why
        ('mask has numbers that are no class', '7; the classes are 1 to 2')
        """
        labelled = [value for value in values if self._is_label(value)]
        if not labelled:
            return [(EMPTY, "")]
        if strange := sorted(set(labelled) - set(self.numbers)):
            many = ", ".join(map(str, strange[:5])) + (" …" if len(strange) > 5 else "")
            return [(NO_CLASS, f"{many}; the classes are {self.numbers[0]} to {self.numbers[-1]}")]
        return []

    def _is_label(self, value: int) -> bool:
        if self.chosen:
            return value in self.numbers
        return value != self.ignored and (value > 0 or self.zero_is_class)

    def classes_of(self, values: Numbers) -> Numbers:
        """The numbers of a mask's file → classes from 0, `NOTHING` where there is none."""
        table = np.full(256, NOTHING, dtype=np.uint8)
        table[list(self.numbers)] = np.arange(len(self.numbers))
        return table[values]


def numbering(looked: Iterable[Looked], classes: int | None, *, zero_is_class: bool, ignored: int | None) -> Numbering:
    """What the numbers mean, by the classes that there are; None: as many as the masks have.

    ignored: None is 255.
    """
    ignored = NOTHING if ignored is None else ignored
    first = 0 if zero_is_class else 1
    found = (value for each in looked for value in each.values if value != ignored)
    last = max(found, default=-1) if classes is None else first + classes - 1
    return Numbering(tuple(n for n in range(first, last + 1) if n != ignored), ignored, zero_is_class)
