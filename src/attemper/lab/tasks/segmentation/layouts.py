"""Which images have which masks, and which of them are for training: by the folders and lists that people use."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from attemper.errors import UnreadableError
from attemper.files import read_text
from attemper.lab.counting import counted
from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import listed, shown
from attemper.lab.tasks.faults import Fault, Faults
from attemper.lab.tasks.image_files import IMAGES
from attemper.lab.tasks.sample_files import files_below

Part = Literal["training", "validation", "test"]
Zero = Literal["unlabelled", "background"]

PARTS: dict[Part, tuple[str, ...]] = {
    "training": ("training", "train"),
    "validation": ("validation", "val", "valid"),
    "test": ("test", "testing"),
}
"""What folders and lists of a part are called, in any case."""
IMAGE_FOLDERS = ("images", "image", "imgs", "img", "img_dir")
MASK_FOLDERS = ("annotations", "masks", "labels", "annotation", "mask", "label", "ann_dir")
MASKS = (".png", ".bmp", ".tif", ".tiff", ".gif")
"""Formats that keep every number as it is."""
LOSSY = (".jpg", ".jpeg")
IMAGE_ENDING = re.compile(rf"({'|'.join(map(re.escape, IMAGES.endings))})$", re.IGNORECASE)
SEPARATOR = re.compile(r"[_.\- ]")
MOST_TEXT = 2**24
"""Bytes of a list of names."""
LISTED_TWICE = Fault("image is in a list more than once", "images are in a list more than once")
VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
TRIMAP = ("pet", "background", "border")
"""What 1, 2 and 3 are in the trimaps of Oxford-IIIT Pet."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """An image and its mask; None: there is no such file."""

    name: str
    """Without ending, relative to the folder of its part."""
    image: Path | None
    mask: Path | None
    several: str = ""
    """The endings, where several files have this name, so that none is meant."""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What a folder holds.

    parts: "training" always; "validation" and "test" where the folder has such. classes: their names, where they are
    known. zero: whether 0 is a class, background, or no label, in this layout. notes: what is left out, in sentences.
    faults: what is wrong with lists.
    """

    folder: Path
    parts: Mapping[Part, tuple[Pair, ...]]
    classes: tuple[str, ...] | None
    zero: Zero
    notes: tuple[str, ...] = ()
    faults: Faults = dataclasses.field(default_factory=Faults)


@dataclasses.dataclass(frozen=True)
class Named:
    """The files of a folder by their names without endings. several: names of more than one file → their endings."""

    files: dict[str, Path]
    several: dict[str, str]


def list_pairs(folder: Path) -> Pairs:
    """The images and masks of a folder, in whichever of the known layouts it is."""
    inside = {each.name.lower(): each for each in folder.iterdir() if each.is_dir()}
    if "jpegimages" in inside or "segmentationclass" in inside:
        found = _voc(folder, inside)
    elif "images" in inside and (inside["images"].parent / "annotations" / "trimaps").is_dir():
        found = _pets(folder)
    elif (images := _first(inside, IMAGE_FOLDERS)) and (masks := _first(inside, MASK_FOLDERS)):
        found = _side_by_side(folder, images, masks)
    elif parts := _parts_of(folder):
        found = _part_by_part(folder, parts)
    else:
        raise DataError(_unknown(folder))
    if not found.parts.get("training"):
        raise DataError(f"'{folder}' has no training images with masks.")
    return dataclasses.replace(found, classes=found.classes or class_names(folder))


def _unknown(folder: Path) -> str:
    deeper = [
        each
        for each in sorted(folder.glob("*")) + sorted(folder.glob("*/*"))
        if each.is_dir() and any((each / name).is_dir() for name in (*IMAGE_FOLDERS, "JPEGImages"))
    ]
    hint = f" '{deeper[0]}' looks like one: name that." if deeper else ""
    return (
        f"'{folder}' has no layout of segmentation that is known: 'images' beside 'annotations' (or "
        "'masks', 'labels'), both with 'training' and 'validation' inside or with the files themselves; 'train' and "
        f"'val' with such a pair inside; or VOC's 'JPEGImages', 'SegmentationClass' and 'ImageSets/Segmentation'.{hint}"
    )


# ---------------------------------------------------------------------------------------------------------- by folders
def _side_by_side(folder: Path, images: Path, masks: Path) -> Pairs:
    """images/training beside annotations/training, or the files themselves in both."""
    with_masks, with_images = _parts_of(masks), _parts_of(images)
    if not with_masks and not with_images:
        return Pairs(folder, {"training": _paired(images, masks)}, None, "unlabelled")
    notes, parts = [], {}
    for part in PARTS:
        here, there = with_images.get(part), with_masks.get(part)
        if here is not None and there is None and part != "training":
            notes.append(f"'{here}' is not used: there are no masks for it.")
        elif here is not None or there is not None:
            parts[part] = _paired(here or images / part, there or masks / part)
    return Pairs(folder, _with_test(parts), None, "unlabelled", tuple(notes))


def _part_by_part(folder: Path, inside: Mapping[Part, Path]) -> Pairs:
    """train/images beside train/masks."""
    parts: dict[Part, tuple[Pair, ...]] = {}
    for part, where in inside.items():
        named = {each.name.lower(): each for each in where.iterdir() if each.is_dir()}
        images, masks = _first(named, IMAGE_FOLDERS), _first(named, MASK_FOLDERS)
        if images is None or masks is None:
            raise DataError(f"'{where}' must have 'images' and 'annotations' (or 'masks', 'labels') inside.")
        parts[part] = _paired(images, masks)
    return Pairs(folder, _with_test(parts), None, "unlabelled")


def _with_test(parts: dict[Part, tuple[Pair, ...]]) -> dict[Part, tuple[Pair, ...]]:
    """A set without a test part is tested on its validation part, and validated on a part of training."""
    if "test" not in parts and "validation" in parts:
        parts["test"] = parts.pop("validation")
    return parts


def _parts_of(folder: Path) -> dict[Part, Path]:
    inside = {each.name.lower(): each for each in sorted(folder.iterdir()) if each.is_dir()}
    found = {part: _first(inside, names) for part, names in PARTS.items()}
    return {part: where for part, where in found.items() if where is not None}


def _first(inside: Mapping[str, Path], names: Iterable[str]) -> Path | None:
    return next((inside[name] for name in names if name in inside), None)


def _paired(images: Path, masks: Path) -> tuple[Pair, ...]:
    """Every image below a folder, and every mask below another, by their names without endings.

    Where no mask is called as an image, what all names of a folder have at their ends is left out: 'a_mask', 'b_mask'.
    """
    pictures, labels = _by_name(images, IMAGES.endings), _by_name(masks, (*MASKS, *LOSSY))
    if not pictures.files.keys() & labels.files.keys():
        pictures, labels = _without_common_ends(pictures), _without_common_ends(labels)
    return tuple(_pair(name, pictures, labels) for name in sorted(pictures.files.keys() | labels.files.keys()))


def _pair(name: str, images: Named, masks: Named) -> Pair:
    several = ", ".join(each.several[name] for each in (images, masks) if name in each.several)
    return Pair(name, images.files.get(name), masks.files.get(name), several)


def _without_common_ends(named: Named) -> Named:
    """The same under shorter names."""
    short = {file: name for name, file in _without_common_end(named.files).items()}
    return Named(
        {name: file for file, name in short.items()},
        {short[named.files[name]]: endings for name, endings in named.several.items()},
    )


def _without_common_end(files: Mapping[str, Path]) -> dict[str, Path]:
    """Files by their names without the last words that all of them have, such as '_mask' or '_gtFine_labelIds'.

    >>> sorted(_without_common_end({"10_mask": Path(), "20_mask": Path()}))
    ['10', '20']
    """
    common = os.path.commonprefix([name[::-1] for name in files])[::-1]  # noqa: RUF071 — of characters, not of folders
    words = SEPARATOR.search(common)
    return {name[: len(name) - len(common) + words.start()] if words else name: file for name, file in files.items()}


def _by_name(folder: Path, endings: Iterable[str]) -> Named:
    found: dict[str, list[Path]] = {}
    for file in files_below(folder, tuple(endings)):
        if file.name.startswith("."):
            continue  # such as ._a.png, which macOS leaves beside a.png
        found.setdefault(file.relative_to(folder).with_suffix("").as_posix(), []).append(file)
    several = {name: ", ".join(file.suffix for file in files) for name, files in found.items() if len(files) > 1}
    return Named({name: files[0] for name, files in found.items()}, several)


# ------------------------------------------------------------------------------------------------------------- by lists
def _voc(folder: Path, inside: Mapping[str, Path]) -> Pairs:
    """Pascal VOC: lists of names say which images are of a part; images that no list names are not used."""
    for name in ("JPEGImages", "SegmentationClass"):
        if name.lower() not in inside:
            raise DataError(f"'{folder}' has no folder '{name}', which the layout of Pascal VOC needs.")
    images = _by_name(inside["jpegimages"], IMAGES.endings)
    masks = _by_name(inside["segmentationclass"], (*MASKS, *LOSSY))
    lists = {file.stem.lower(): file for file in sorted((folder / "ImageSets" / "Segmentation").glob("*.txt"))}
    if not lists:
        pairs = tuple(_pair(name, images, masks) for name in sorted(masks.files))
        return Pairs(folder, {"training": pairs}, None, "background")
    faults, known = Faults(), images.files.keys() | masks.files.keys()
    names = {part: _names_in(found, known, faults) for part, found in _named_lists(lists).items()}
    used = {name for each in PARTS.values() for name in each} | {"trainval"}
    notes = [f"'{file}' is not used: it is the list of no part." for name, file in lists.items() if name not in used]
    if "test" in names and not any(name in masks.files for name in names["test"]):
        notes.append(f"'{lists['test']}' is not used: there are no masks for it.")
        del names["test"]
    if "training" not in names and "trainval" in lists:
        others = {name for each in names.values() for name in each}
        names["training"] = [name for name in _names_in(lists["trainval"], known, faults) if name not in others]
    parts: dict[Part, tuple[Pair, ...]] = {
        part: tuple(_pair(name, images, masks) for name in each) for part, each in names.items()
    }
    return Pairs(folder, _with_test(parts), None, "background", tuple(notes), faults)


def _named_lists(lists: Mapping[str, Path]) -> dict[Part, Path]:
    found = {part: next((lists[name] for name in names if name in lists), None) for part, names in PARTS.items()}
    return {part: file for part, file in found.items() if file is not None}


def _pets(folder: Path) -> Pairs:
    """Oxford-IIIT Pet: a trimap for every image, and two lists."""
    images = _by_name(folder / "images", IMAGES.endings)
    masks = _by_name(folder / "annotations" / "trimaps", (*MASKS, *LOSSY))
    lists: dict[Part, str] = {"training": "trainval.txt", "test": "test.txt"}
    faults, known = Faults(), images.files.keys() | masks.files.keys()
    names = {part: _names_in(folder / "annotations" / file, known, faults) for part, file in lists.items()}
    parts: dict[Part, tuple[Pair, ...]] = {
        part: tuple(_pair(name, images, masks) for name in each) for part, each in names.items()
    }
    return Pairs(folder, parts, TRIMAP, "unlabelled", faults=faults)


def _names_in(file: Path, known: Collection[str], faults: Faults) -> list[str]:
    """What every line names, without the ending of an image: the whole line where there is such a file, since names may
    have blanks, else its first word. One that is there twice is a fault, and counts once.
    """
    names: dict[str, None] = {}
    for line in filter(None, map(str.strip, _lines(file))):
        whole, first = (IMAGE_ENDING.sub("", each) for each in (line, line.split()[0]))
        name = whole if whole in known else first
        if name in names:
            faults.add(LISTED_TWICE, f"{file.name}: {name}")
        names[name] = None
    return list(names)


def _lines(file: Path) -> Iterator[str]:
    try:
        yield from read_text(file, most=MOST_TEXT).splitlines()
    except UnreadableError as error:
        raise DataError(f"'{shown(str(file))}' cannot be read: {error}.") from None


# -------------------------------------------------------------------------------------------------------------- classes
def class_names(folder: Path) -> tuple[str, ...] | None:
    """The names in a set's own file: classes.txt with one per line, or ADE20K's objectInfo150.txt."""
    plain, ade = folder / "classes.txt", folder / "objectInfo150.txt"
    if plain.is_file():
        found = tuple(line.strip() for line in _lines(plain))
        found = found[: len(found) - next((at for at, name in enumerate(reversed(found)) if name), len(found))]
    elif ade.is_file():
        rows = [line.rstrip().split("\t") for line in _lines(ade) if line.strip()]
        whole = tuple(row[-1].strip() for row in rows[1:])
        short = tuple(name.partition(",")[0].strip() for name in whole)
        found = short if len(set(short)) == len(short) else whole
    else:
        return None
    where = plain if plain.is_file() else ade
    if empty := [str(at) for at, name in enumerate(found, 1) if not name]:
        raise DataError(f"'{where}' has no name on line {listed(empty)}; it has one class per line.")
    if twice := sorted({name for name in found if found.count(name) > 1}):
        raise DataError(f"'{where}' names a class more than once: {listed(map(shown, twice))}.")
    if len(found) < 2:
        many = counted(len(found), "class", "classes")
        raise DataError(f"'{where}' names {many}; it needs at least 2, one per line.")
    return found
