"""All files of a set in COCO's JSON, checked together: images that can be used, their boxes, the classes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from attemper.errors import UnreadableError
from attemper.lab.counting import counted
from attemper.lab.errors import DataError
from attemper.lab.tasks import source
from attemper.lab.tasks.boxes.canvas import CanvasLoader
from attemper.lab.tasks.boxes.coco_folder import Found, Part, candidates, find_annotations, image_folder
from attemper.lab.tasks.boxes.coco_json import Annotations, Box, Image, inside, read_annotations
from attemper.lab.tasks.boxes.image_sizes import Size, sizes_of
from attemper.lab.tasks.boxes.shape import CHANNELS, CLASS, COLUMNS, NONE
from attemper.lab.tasks.broken import Broken, listed, shown
from attemper.lab.tasks.faults import UNREADABLE, Fault, Faults
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.image_files import examine
from attemper.lab.tasks.json_keys import Key
from attemper.lab.tasks.scan_files import look_through
from attemper.lab.tasks.source import LazySource, MemorySource, Source
from attemper.lab.tasks.split import joined

OTHER_SIZE = Fault(
    "image has another size than the annotations say", "images have another size than the annotations say"
)
OTHER_NAME = Fault("category has another name in another file", "categories have another name in another file")
SAME_NAME = Fault(
    "category has the name of another, and they count as one", "categories have the name of another, and count as one"
)
NOWHERE = Fault("file of annotations has its images nowhere", "files of annotations have their images nowhere")


@dataclasses.dataclass(frozen=True)
class Sample:
    """An image that can be used. size: as it is seen, in pixels. upright: whether EXIF data turn it."""

    file: Path
    part: Part
    size: tuple[int, int]
    upright: bool
    boxes: tuple[Box, ...]
    contents: int
    """The first sample with the same bytes."""


@dataclasses.dataclass
class CocoSet:
    """The samples of all parts in the order of their files. names: of the categories, each once."""

    folder: Path
    size: int
    samples: list[Sample]
    names: Sequence[str]
    notes: list[str]

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The categories that have a box somewhere, in the order of their first file."""
        used = {box.category for sample in self.samples for box in sample.boxes}
        return tuple(name for name in self.names if name in used)

    @cached_property
    def number(self) -> dict[Key, int]:
        """Category → its class."""
        return {name: at for at, name in enumerate(self.classes)}

    @cached_property
    def most_boxes(self) -> int:
        return max((len(sample.boxes) for sample in self.samples), default=0)

    @property
    def fits(self) -> bool:
        return len(self.samples) * CHANNELS * self.size**2 <= source.MEMORY_LIMIT

    def indices(self, part: Part) -> Tensor:
        return torch.tensor([at for at, sample in enumerate(self.samples) if sample.part == part], dtype=torch.int64)

    @cached_property
    def groups(self) -> Tensor | None:
        """Numbers of groups: copies of one image have the same; None: there are none."""
        firsts = [sample.contents for sample in self.samples]
        return None if len(set(firsts)) == len(firsts) else joined(len(firsts), firsts)

    @cached_property
    def fingerprint(self) -> str:
        """Of sizes, boxes and contents where the images are held in memory; where that would take long, of file sizes
        in place of contents."""
        parts: list[str | bytes] = [str(self.size), *self.classes]
        for sample in self.samples:
            boxes = [(self.number[box.category], *box.corners, box.area, box.crowd) for box in sample.boxes]
            parts.append(f"{sample.part} {sample.size} {sample.upright} {boxes}")
            try:
                parts.append(sample.file.read_bytes() if self.fits else str(sample.file.stat().st_size))
            except OSError as error:
                raise DataError(f"'{shown(str(sample.file))}' cannot be read: {error.strerror or error}.") from None
        return of_parts(*parts)

    def source(self, indices: Tensor) -> Source:
        """Some of the samples."""
        chosen = [self.samples[index] for index in indices.tolist()]
        load = CanvasLoader([(sample.file, sample.upright) for sample in chosen], self.size)
        groups = source.chosen(self.groups, indices)
        targets = self.targets(chosen)
        facts = {"size": torch.tensor([sample.size for sample in chosen], dtype=torch.int64).view(-1, 2)}
        if not self.fits:
            return LazySource(load, targets, groups=groups, facts=facts)
        pixels = look_through("decoding images", range(len(chosen)), load)
        empty = torch.empty(0, CHANNELS, self.size, self.size, dtype=torch.uint8)
        return MemorySource(torch.stack(pixels) if pixels else empty, targets, groups=groups, facts=facts)

    def targets(self, samples: Sequence[Sample]) -> Tensor:
        """(samples, most boxes, columns), float32."""
        rows = torch.full((len(samples), max(1, self.most_boxes), COLUMNS), 0.0)
        rows[..., CLASS] = NONE
        for at, sample in enumerate(samples):
            side = float(max(sample.size))
            for place, box in enumerate(sample.boxes):
                corners = [corner / side for corner in box.corners]
                rows[at, place] = torch.tensor([self.number[box.category], *corners, box.area, float(box.crowd)])
        return rows

    def described(self) -> list[str]:
        """What whoever checks the files wants to know."""
        boxes = [box for sample in self.samples for box in sample.boxes]
        counts = Counter(str(box.category) for box in boxes)
        empty = sum(not sample.boxes for sample in self.samples)
        small = sum(
            min(box.corners[2] - box.corners[0], box.corners[3] - box.corners[1]) * self.size / max(sample.size) < 4
            for sample in self.samples
            for box in sample.boxes
        )
        lines = [
            f"{counted(len(boxes), 'box', 'boxes')} in {counted(len(self.samples), 'image')}, at most "
            f"{self.most_boxes:,} in one; {counted(empty, 'image')} without any, "
            f"{counted(sum(box.crowd for box in boxes), 'crowd')}",
            "boxes by class: " + listed(f"{shown(name)} {count:,}" for name, count in counts.most_common()),
        ]
        if small:
            are = counted(small, "box is", "boxes are")
            lines.append(f"at size={self.size}, {are} narrower or lower than 4 pixels")
        return lines


def read_set(given: Path, size: int, broken: Broken, root: Path) -> CocoSet:
    """A set with everything that is wrong with it told at once: annotations, names, images.

    given: the folder, or one file of annotations. Images that cannot be used are left out with their boxes under
    broken=skip, and boxes that cannot be by themselves.
    """
    parts, notes = find_annotations(given)
    every, unread = _read_all(parts)
    notes += [
        f"'{found.name}' is not used: it has no annotations." for found, told in every if not _published(found, told)
    ]
    read = [(found, told) for found, told in every if _published(found, told)]
    faults = Faults()
    for found, told in read:
        faults.merge(told.faults, found.name if len(parts) > 1 else "")
    names, more = _names([told for _, told in read], faults)
    listings = _listings(read, faults, several=len(parts) > 1)
    samples, turned = _samples(listings, parts[0].folder, faults, root)
    what = f"'{shown(str(given))}'"
    if unread:
        raise DataError("\n  ".join([f"{what} cannot be used:", *unread, *faults.lines()]))
    notes += [*more, *turned, *faults.settle(what, broken, "Correct the annotations and the images")]
    if not any(sample.boxes for sample in samples):
        raise DataError("\n  ".join([f"{what} has no box in any image: there is nothing to find.", *notes]))
    return CocoSet(given, size, samples, names, notes)


def _read_all(parts: Sequence[Found]) -> tuple[list[tuple[Found, Annotations]], list[str]]:
    """What all files say, and why others cannot be read. Of one file alone, that is an error."""
    read, unread = [], []
    for found in parts:
        try:
            read.append((found, read_annotations(found.path, published=found.part != "test")))
        except (DataError, UnreadableError) as error:
            if len(parts) == 1:
                raise
            unread.append(str(error))
    return read, unread


def _published(found: Found, told: Annotations) -> bool:
    """Whether a file can be measured on; the annotations of a test set are often kept back."""
    return told.annotated or found.part != "test"


def _names(read: Sequence[Annotations], faults: Faults) -> tuple[list[str], list[str]]:
    """The names of all categories, by which they are told apart, and what is to be said about them.

    Files that are made one by one number their categories each in its way. Where the names do not agree either, nobody
    knows which is meant.
    """
    known: dict[Key, str] = {}
    notes = []
    for file in read:
        ours, theirs = set(known.values()), set(file.categories.values())
        others = {key: name for key, name in file.categories.items() if known.get(key, name) != name}
        if others and not (ours <= theirs or theirs <= ours):
            for key, name in others.items():
                faults.add(OTHER_NAME, f"category {key}", f"{known[key]} and {name}")
        elif others:
            notes.append(f"'{file.path.name}' numbers its categories in another way: their names tell which is which.")
        if len(theirs) < len(file.categories):
            first = {name: key for key, name in reversed(file.categories.items())}
            for key, name in file.categories.items():
                if first[name] != key:
                    faults.add(SAME_NAME, f"category {key}", f"{name}, as category {first[name]}")
        known = {**file.categories, **known}
    every = [name for file in read for name in file.categories.values()]
    return list(dict.fromkeys(every)), notes


@dataclasses.dataclass(frozen=True)
class _Listing:
    """An image that is listed. boxes: with the names of their categories. of: its file of annotations, where there are
    several."""

    part: Part
    of: str
    file: Path
    size: tuple[int, int] | None
    boxes: tuple[Box, ...]


def _listings(read: Sequence[tuple[Found, Annotations]], faults: Faults, *, several: bool) -> list[_Listing]:
    """All images of all files, where they are to be found."""
    listings = []
    for found, told in read:
        names = [image.name for image in told.images]
        if not names:
            continue  # all of them were faults
        folder = image_folder(found, names)
        if folder is None:
            places = listed(f"'{shown(str(each))}'" for each in candidates(found))
            faults.add(NOWHERE, found.name, f"'{names[0]}', for one, is in no folder below {places}")
            continue
        listings += [
            _Listing(
                found.part, f"{found.name}: " if several else "", folder / image.name, image.size, _named(image, told)
            )
            for image in told.images
        ]
    return listings


def _named(image: Image, told: Annotations) -> tuple[Box, ...]:
    return tuple(dataclasses.replace(box, category=told.categories[box.category]) for box in image.boxes)


def _samples(listings: Sequence[_Listing], folder: Path, faults: Faults, root: Path) -> tuple[list[Sample], list[str]]:
    """The images that can be used, and what is to be said about them; what is wrong with others goes to the faults."""
    files = [each.file for each in listings]
    examined = examine(files, root)
    sizes = sizes_of(files, root)
    upright, notes = _ways_up([each.size for each in listings], sizes)
    samples: list[Sample] = []
    place: dict[int, int] = {}
    for at, each in enumerate(listings):
        name = str(each.file.relative_to(folder)) if each.file.is_relative_to(folder) else str(each.file)
        if at in examined.problems:
            faults.add(UNREADABLE, name, examined.problems[at])
            continue
        seen, turn = _orientation(each.size, sizes[at], upright)
        if seen is None:
            real = " × ".join(map(str, sizes[at].seen or ()))
            faults.add(OTHER_SIZE, name, f"{real}, and not {' × '.join(map(str, each.size or ()))}")
            continue
        first = place.setdefault(examined.equal[at], len(samples))
        boxes = each.boxes if each.size is not None else _boxes_inside(each, seen, name, faults)
        samples.append(Sample(each.file, each.part, seen, turn, boxes, first))
    return samples, notes


def _boxes_inside(listing: _Listing, size: tuple[int, int], name: str, faults: Faults) -> tuple[Box, ...]:
    """What lies in an image of its boxes, where the annotations have no size of it by which that was seen before."""
    found = []
    for number, box in enumerate(listing.boxes, start=1):
        which = f"box number {number} of {name}" if box.key is None else f"annotation {box.key}"
        found.append(inside(box, size, listing.of + which, name, faults))
    return tuple(box for box in found if box is not None)


def _ways_up(told: Sequence[tuple[int, int] | None], sizes: Sequence[Size]) -> tuple[bool, list[str]]:
    """Whether boxes are meant on upright images where sizes do not tell, as on most of those where they do.

    Boxes are drawn on what a program shows. Some turn an image as its EXIF data say, others do not.
    """
    turned = [(size, each) for size, each in zip(sizes, told, strict=True) if size.turned and each is not None]
    upright = sum((each == size.seen) - (each == size.stored) for size, each in turned) > 0
    unclear = sum(each == size.seen == size.stored for size, each in turned)
    if not unclear:
        return upright, []
    how = "as they are seen" if upright else "as they are stored"
    images = counted(unclear, "image is", "images are")
    return upright, [f"{images} turned by EXIF data, and the sizes do not tell how the boxes are meant: taken {how}."]


def _orientation(told: tuple[int, int] | None, size: Size, upright: bool) -> tuple[tuple[int, int] | None, bool]:
    """The size of an image as its boxes mean it, and whether it is turned for that; None: neither fits.

    upright: whether it is turned where its size does not tell.
    """
    if told is None:
        return size.seen, True
    if told == size.seen == size.stored:
        return size.seen, upright and size.turned
    return (told, told == size.seen) if told in (size.seen, size.stored) else (None, False)
