"""All files of a set in COCO's JSON, checked together: images that can be used, their boxes, the classes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks import source
from attemper.lab.tasks.boxes.canvas import CanvasLoader
from attemper.lab.tasks.boxes.coco_folder import Found, Part, find_annotations, image_folder
from attemper.lab.tasks.boxes.coco_json import Annotations, Box, Key, read_annotations
from attemper.lab.tasks.boxes.image_sizes import Size, sizes_of
from attemper.lab.tasks.boxes.shape import CHANNELS, CLASS, COLUMNS, NONE
from attemper.lab.tasks.broken import Broken, listed, shown
from attemper.lab.tasks.faults import Faults
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.image_files import examine
from attemper.lab.tasks.scan_files import look_through
from attemper.lab.tasks.source import LazySource, MemorySource, Source
from attemper.lab.tasks.split import joined

UNREADABLE = "images cannot be read"
OTHER_SIZE = "images have another size than the annotations say"
OTHER_NAME = "categories have another name in another file"


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
    """The samples of all parts in the order of their files, and what their categories are called."""

    folder: Path
    size: int
    samples: list[Sample]
    names: dict[Key, str]
    notes: list[str]

    @cached_property
    def keys(self) -> list[Key]:
        """The categories that have a box somewhere, in the order of their first file."""
        used = {box.category for sample in self.samples for box in sample.boxes}
        return [key for key in self.names if key in used]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.names[key] for key in self.keys)

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
        parts: list[str | bytes] = [str(self.size), *map(str, self.classes)]
        number = {key: at for at, key in enumerate(self.keys)}
        for sample in self.samples:
            boxes = [(number[box.category], *box.corners, box.area, box.crowd) for box in sample.boxes]
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
        number = {key: float(at) for at, key in enumerate(self.keys)}
        rows = torch.full((len(samples), max(1, self.most_boxes), COLUMNS), 0.0)
        rows[..., CLASS] = NONE
        for at, sample in enumerate(samples):
            side = float(max(sample.size))
            for place, box in enumerate(sample.boxes):
                corners = [corner / side for corner in box.corners]
                rows[at, place] = torch.tensor([number[box.category], *corners, box.area, float(box.crowd)])
        return rows

    def described(self) -> list[str]:
        """What whoever checks the files wants to know."""
        boxes = [box for sample in self.samples for box in sample.boxes]
        counts = Counter(self.names[box.category] for box in boxes)
        empty = sum(not sample.boxes for sample in self.samples)
        small = sum(
            min(box.corners[2] - box.corners[0], box.corners[3] - box.corners[1]) * self.size / max(sample.size) < 4
            for sample in self.samples
            for box in sample.boxes
        )
        lines = [
            f"{len(boxes):,} boxes in {len(self.samples):,} images, at most {self.most_boxes:,} in one; "
            f"{empty:,} images without any, {sum(box.crowd for box in boxes):,} crowds",
            "boxes by class: " + listed(f"{shown(name)} {count:,}" for name, count in counts.most_common()),
        ]
        if small:
            lines.append(f"at size={self.size}, {small:,} boxes are narrower or lower than 4 pixels")
        return lines


def read_set(given: Path, size: int, broken: Broken, root: Path) -> CocoSet:
    """A set with everything that is wrong with it told at once: annotations, names, images.

    given: the folder, or one file of annotations. Images that cannot be used are left out with their boxes under
    broken=skip, and boxes that cannot be by themselves.
    """
    parts = find_annotations(given)
    read = [read_annotations(found.path) for found in parts]
    faults = Faults()
    several = len(parts) > 1
    for found, file in zip(parts, read, strict=True):
        faults.merge(file.faults, found.name if several else "")
    names = _names(read, faults)
    samples = _samples(parts, read, faults, root)
    what = f"'{shown(str(given))}'"
    notes = faults.settle(what, broken, "Correct the annotations and the images")
    if not any(box for sample in samples for box in sample.boxes):
        raise DataError(f"{what} has no box in any image: there is nothing to find.")
    return CocoSet(given, size, samples, names, notes)


def _names(read: Sequence[Annotations], faults: Faults) -> dict[Key, str]:
    """What every category is called, in all files alike."""
    names: dict[Key, str] = {}
    for file in read:
        for key, name in file.categories.items():
            if names.setdefault(key, name) != name:
                faults.add(OTHER_NAME, f"category {key}", f"{names[key]} and {name}")
    return names


def _samples(parts: Sequence[Found], read: Sequence[Annotations], faults: Faults, root: Path) -> list[Sample]:
    """The images that can be used; what is wrong with the others goes to the faults."""
    every = []
    for found, told in zip(parts, read, strict=True):
        if not told.images:
            raise DataError(f"'{shown(str(found.path))}' names no image that can be looked for.")
        folder = image_folder(found, [image.name for image in told.images])
        every += [(found.part, image, folder / image.name) for image in told.images]
    files = [file for _, _, file in every]
    examined = examine(files, root)
    sizes = sizes_of(files, root)
    samples: list[Sample] = []
    place: dict[int, int] = {}
    for at, (part, image, file) in enumerate(every):
        base = parts[0].folder
        name = str(file.relative_to(base)) if file.is_relative_to(base) else str(file)
        if at in examined.problems:
            faults.add(UNREADABLE, name, examined.problems[at])
            continue
        seen, turn = _orientation(image.size, sizes[at])
        if seen is None:
            real = " × ".join(map(str, sizes[at].seen or ()))
            faults.add(OTHER_SIZE, name, f"{real}, and not {' × '.join(map(str, image.size or ()))}")
            continue
        first = place.setdefault(examined.equal[at], len(samples))
        samples.append(Sample(file, part, seen, turn, tuple(image.boxes), first))
    return samples


def _orientation(told: tuple[int, int] | None, size: Size) -> tuple[tuple[int, int] | None, bool]:
    """The size of an image as its boxes mean it, and whether it is turned upright for that; None: neither fits.

    Boxes are drawn on what a program shows. Some turn an image as its EXIF data say, others do not: the size in the
    annotations tells, and where it does not, the image is upright.
    """
    if told is None or told == size.seen:
        return size.seen, size.seen != size.stored or told is None
    return (size.stored, False) if told == size.stored else (None, False)
