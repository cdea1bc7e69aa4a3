"""One file of annotations in COCO's JSON, read with everything that is wrong with it collected."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVar

from attemper.errors import UnreadableError
from attemper.files import read_json
from attemper.lab.errors import DataError
from attemper.lab.tasks.faults import Fault, Faults
from attemper.lab.tasks.json_keys import Key, as_key, as_text
from attemper.lab.tasks.notifications import progress

MOST_BYTES = 2**31
"""Of a file of annotations; COCO's largest has a fifth of it."""
MOST_BOXES = 1000
"""Of one image; what an image with more of them shows, no query can tell apart."""
STEP = 20_000
SLACK = 1.0
"""Pixels by which boxes reach out of their images by rounding alone."""
PARTS = ("images", "annotations", "categories")

NO_SIZE = Fault("box has no size", "boxes have no size")
OUTSIDE = Fault("box lies outside of its image", "boxes lie outside of their images")
BEYOND = Fault(
    "box reaches out of its image, and is cut off there", "boxes reach out of their images, and are cut off there"
)
WRONG_ENTRY = Fault("entry is not what COCO writes", "entries are not what COCO writes")
SAME_ID = Fault(
    "id is there more than once, and only the first counts", "ids are there more than once, and only the first counts"
)
TWICE = Fault("annotation is there more than once", "annotations are there more than once")
SAME_FILE = Fault("file name is there more than once", "file names are there more than once")
NO_IMAGE = Fault("box is of an image that is not listed", "boxes are of images that are not listed")
NO_CATEGORY = Fault("box is of a category that is not listed", "boxes are of categories that are not listed")
TOO_MANY = Fault(f"image has more than {MOST_BOXES:,} boxes", f"images have more than {MOST_BOXES:,} boxes")
LEADS_OUT = Fault("name of an image leads out of the folder", "names of images lead out of the folder")

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Box:
    """An object: its category, its corners in pixels, its area, and whether it is a crowd. key: the annotation's id."""

    category: Key
    corners: tuple[float, float, float, float]
    area: float
    crowd: bool
    key: Key | None = None


@dataclasses.dataclass
class Image:
    """An image and what is in it. size: width and height, if the file says so."""

    name: str
    size: tuple[int, int] | None
    boxes: list[Box] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Annotations:
    """What one file says, without what is wrong with it."""

    path: Path
    images: list[Image]
    categories: dict[Key, str]
    faults: Faults
    annotated: bool = True
    """Whether the file has annotations, whatever they are worth."""


def read_annotations(path: Path, *, published: bool = True) -> Annotations:
    """The images of a file with their boxes. A file that is none of COCO's objects is an error; all else is collected.

    Images without boxes are kept. Corners lie inside of the image where its size is known.

    published: there must be a list of annotations. Those of a test set are often kept back.
    """
    held = read_json(path, most=MOST_BYTES)
    if not published and isinstance(held, dict):
        held = {"annotations": [], **held}
    lists = _lists(held, path)
    faults = Faults()
    images, categories = _keyed(lists["images"], "image", _image, faults), Listed[str]()
    if lists["annotations"] or published:
        categories = _keyed(lists["categories"], "category", _category, faults)
    seen: set[Key] = set()
    for place, entry in enumerate(lists["annotations"]):
        if place % STEP == 0:
            progress(f"reading {path.name}", place, len(lists["annotations"]))
        _add_box(entry, place, images, categories, seen, faults)
    progress(f"reading {path.name}", len(lists["annotations"]), len(lists["annotations"]))
    return Annotations(
        path, _usable(images.found.values(), faults), categories.found, faults, bool(lists["annotations"])
    )


def _usable(images: Iterable[Image], faults: Faults) -> list[Image]:
    """The images without those that have too many boxes. What is wrong with them goes to the faults."""
    names: set[str] = set()
    kept = []
    for image in images:
        if image.name in names:
            faults.add(SAME_FILE, image.name)
        names.add(image.name)
        if len(image.boxes) > MOST_BOXES:
            faults.add(TOO_MANY, image.name, f"{len(image.boxes):,}")
        else:
            kept.append(image)
    return kept


def _lists(held: Any, path: Path) -> dict[str, list[Any]]:
    """The three lists of the file."""
    if not isinstance(held, dict):
        raise DataError(
            f"'{path}' is no COCO JSON: it holds {_kind_of(held)}; it must be an object with {', '.join(PARTS)}."
        )
    missing = [part for part in PARTS if not isinstance(held.get(part), list)]
    if missing:
        has = ", ".join(repr(str(key))[:40] for key in list(held)[:8]) or "nothing"
        raise DataError(
            f"'{path}' is no COCO JSON of objects: it has no list of {' and of '.join(missing)}. It has {has}."
        )
    for part in ("images", "categories"):
        if not held[part]:
            raise DataError(f"'{path}' names no {part}.")
    return {part: held[part] for part in PARTS}


@dataclasses.dataclass(frozen=True)
class Listed(Generic[Item]):
    """The entries of a list by their ids, and the ids of those that cannot be used."""

    found: dict[Key, Item] = dataclasses.field(default_factory=dict)
    spoilt: set[Key] = dataclasses.field(default_factory=set)

    def __contains__(self, key: Key) -> bool:
        return key in self.found or key in self.spoilt


def _keyed(
    entries: list[Any], kind: str, read: Callable[[Mapping[str, Any], Faults], Item | None], faults: Faults
) -> Listed[Item]:
    listed = Listed[Item]()
    for place, entry in enumerate(entries):
        key = as_key(entry.get("id")) if isinstance(entry, dict) else None
        if key is None:
            faults.add(WRONG_ENTRY, f"{kind} number {place + 1}", "it has no id")
        elif key in listed:
            faults.add(SAME_ID, f"{kind} {key}")
        elif (item := read(entry, faults)) is not None:
            listed.found[key] = item
        else:
            listed.spoilt.add(key)
    return listed


def _category(entry: Mapping[str, Any], faults: Faults) -> str | None:
    name = as_text(entry.get("name"))
    if name is not None and name.strip():
        return name.strip()
    faults.add(WRONG_ENTRY, f"category {entry['id']}", _given(entry, "name", "a text"))
    return None


def _image(entry: Mapping[str, Any], faults: Faults) -> Image | None:
    name = as_text(entry.get("file_name"))
    if name is None or not name.strip() or "\0" in name:
        faults.add(WRONG_ENTRY, f"image {entry['id']}", _given(entry, "file_name", "the name of a file"))
        return None
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        faults.add(LEADS_OUT, name)
        return None
    sides = [entry.get("width"), entry.get("height")]
    if sides == [None, None]:
        return Image(str(path), None)
    width, height = (_number(side) for side in sides)
    if width is None or height is None or min(width, height) < 1:
        given = " and ".join(map(_short, sides))
        faults.add(WRONG_ENTRY, name, f"its width and height are {given}, and must be pixels")
        return None
    return Image(str(path), (int(width), int(height)))


def _add_box(
    entry: Any, place: int, images: Listed[Image], categories: Listed[str], seen: set[Key], faults: Faults
) -> None:
    """Put a box to its image, or what is wrong with it to the faults.

    One of an image or of a category that cannot be used is left out: that has been told. Several boxes may have one
    id, which nothing depends on; one that is the same as another is a fault.
    """
    if not isinstance(entry, dict):
        faults.add(WRONG_ENTRY, f"annotation number {place + 1}", "it is no object")
        return
    key = as_key(entry.get("id"))
    where = f"annotation {key}" if key is not None else f"annotation number {place + 1}"
    image_id, category_id = as_key(entry.get("image_id")), as_key(entry.get("category_id"))
    if image_id not in images:
        faults.add(NO_IMAGE, where, f"image {_short(entry.get('image_id'))}")
    if category_id not in categories:
        faults.add(NO_CATEGORY, where, f"category {_short(entry.get('category_id'))}")
    sides = entry.get("bbox")
    numbers = [_number(side) for side in sides] if isinstance(sides, list) and len(sides) == 4 else []
    if len(numbers) != 4 or None in numbers:
        faults.add(WRONG_ENTRY, where, _given(entry, "bbox", "four numbers, [left, top, width, height]"))
        return
    image = images.found.get(image_id)
    if image is None or category_id not in categories.found:
        return
    same = (key, image_id, category_id, *numbers)
    if key is not None and same in seen:
        faults.add(TWICE, where, image.name)
        return
    seen.add(same)
    left, top, width, height = (float(number) for number in numbers if number is not None)
    if width <= 0 or height <= 0:
        faults.add(NO_SIZE, where, f"{image.name}: {left:g}, {top:g}, {width:g} × {height:g}")
        return
    area, whole = _number(entry.get("area")), width * height
    corners = (left, top, left + width, top + height)
    crowd = entry.get("iscrowd") in (1, True)
    box = Box(category_id, corners, whole if area is None or area <= 0 else area, crowd, key)
    kept = box if image.size is None else inside(box, image.size, where, image.name, faults)
    if kept is not None:
        image.boxes.append(kept)


def inside(box: Box, size: tuple[int, int], where: str, name: str, faults: Faults) -> Box | None:
    """The part of a box that is in its image; None where there is no such part.

    where: which annotation it is, and name: of its image, both for the faults.
    """
    left, top, right, bottom = box.corners
    width, height = size
    told = f"{name}: {left:g}, {top:g}, {right - left:g} × {bottom - top:g}, in {width} × {height}"
    if left >= width or top >= height or right <= 0 or bottom <= 0:
        faults.add(OUTSIDE, where, told)
        return None
    if min(left, top) < -SLACK or right > width + SLACK or bottom > height + SLACK:
        faults.add(BEYOND, where, told)
    corners = max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))
    return dataclasses.replace(box, corners=corners)


def _number(value: Any) -> float | None:
    """A finite number of a size that pixels can have."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9 or math.isnan(value):
        return None
    return value


def _kind_of(held: Any) -> str:
    return "nothing" if held is None else f"a {type(held).__name__}"


def _short(value: Any) -> str:
    return repr(value)[:40]


def _given(entry: Mapping[str, Any], name: str, wanted: str) -> str:
    """What an entry has under a name, and what it must have there."""
    if name not in entry:
        return f"it has no {name}, which must be {wanted}"
    return f"its {name} is {_short(entry[name])}, and must be {wanted}"


def is_annotations(path: Path) -> bool:
    """Whether a file's first bytes could be those of a JSON object; unreadable ones are told when they are read."""
    try:
        with open(path, "rb") as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{"
    except OSError as error:
        raise UnreadableError(f"'{path}' cannot be read: {error.strerror or error}.") from error
