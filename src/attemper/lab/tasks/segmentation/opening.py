"""`segment:FOLDER`: a user's images with masks."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.counting import counted
from attemper.lab.errors import DataError
from attemper.lab.tasks import source as memory
from attemper.lab.tasks.broken import Broken, listed
from attemper.lab.tasks.faults import Fault, Faults
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.notifications import note
from attemper.lab.tasks.scan_files import look_through
from attemper.lab.tasks.segmentation.examining import (
    NO_CLASS,
    OF_MASKS,
    SEVERAL,
    Looked,
    Numbering,
    examine,
    numbering,
    ways_up,
)
from attemper.lab.tasks.segmentation.layouts import VOC, Pair, Pairs, Part, Zero, list_pairs
from attemper.lab.tasks.segmentation.masks import NOTHING
from attemper.lab.tasks.segmentation.sources import LazyMasks, MaskFiles, MaskSource, MemoryMasks
from attemper.lab.tasks.segmentation.task import MaskShape, SegmentationTask, kept_of
from attemper.lab.tasks.source import found_under
from attemper.lab.tasks.split import hold_out, joined

MOST_CLASSES = 254
"""Of numbers of 8 bits, 0 and 255 may stand for pixels that are not labelled."""


def open_segment(
    name: str,
    path: str,
    root: Path,
    *,
    size: int = 128,
    width: int | None = None,
    zero: Zero | None = None,
    ignore: int | None = None,
    numbers: Sequence[Any] | None = None,
    broken: Broken = "refuse",
    train: int | None = None,
    test: int | None = None,
) -> SegmentationTask:
    """The images and masks of a folder, in the layouts that `list_pairs` knows.

    size: height in pixels of what a model sees. width: its width; None: the same. An image is resized to fit into it.
    zero: whether 0 in a mask is a class, background, or unlabelled; None: as its layout has it.
    ignore: the number of pixels that count for nothing; None: 255.
    numbers: those that are classes, in their order, such as [0, 255]; all others then count for nothing.
    broken: what becomes of pairs that cannot be used: refuse, or skip.
    train, test: keep only so many images, always the same ones.
    """
    found = list_pairs(found_under(root, path))
    canvas = (size, size if width is None else width)
    chosen = None if numbers is None else _chosen(name, numbers, zero, ignore)
    files = SegmentationFiles(name, found, root, canvas, (zero or found.zero) == "background", ignore, chosen)
    skipped = files.faults.settle(f"'{found.folder}'", broken, remedy=files.remedy)
    limits: dict[Part, int | None] = {"training": train, "test": test}
    parts = {part: files.limited(part, limits.get(part)) for part in files.parts}
    notes = (*found.notes, *skipped, *files.notes)
    for each in notes:
        note(each)
    validation = parts.get("validation")
    return SegmentationTask(
        name=name,
        shape=MaskShape(channels=3, height=canvas[0], width=canvas[1], classes=len(files.classes)),
        fingerprint=files.fingerprint,
        pool=lambda: files.source(parts["training"]),
        held_out=lambda: files.source(parts["test"]),
        numbers=files.numbering.numbers,
        validation=None if validation is None else lambda: files.source(validation),
        classes=files.classes,
        groups=files.groups_of(parts["training"]),
        notes=notes,
    )


def _chosen(name: str, numbers: Any, zero: Zero | None, ignore: int | None) -> tuple[int, ...]:
    """The numbers that a user says are classes."""
    each = tuple(numbers) if isinstance(numbers, list | tuple) else ()
    whole = [n for n in each if isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= NOTHING]
    if len(each) < 2 or len(set(whole)) < len(each):
        raise ParameterError(
            f"'{name}': numbers is {numbers!r}; it must be a list of at least 2 different whole numbers from 0 to 255."
        )
    if zero is not None or ignore is not None:
        raise ParameterError(f"'{name}': numbers says what zero and ignore would say; leave those out.")
    return each


@dataclasses.dataclass
class SegmentationFiles:
    """The pairs of a folder, looked at, and what becomes of each."""

    name: str
    found: Pairs
    root: Path
    canvas: tuple[int, int]
    zero_is_class: bool
    ignore: int | None
    chosen: tuple[int, ...] | None = None

    @cached_property
    def all(self) -> list[tuple[Part, Pair]]:
        return [(part, pair) for part, pairs in self.found.parts.items() for pair in pairs]

    @cached_property
    def _looked(self) -> tuple[list[Looked], list[str]]:
        return ways_up(examine([pair for _, pair in self.all], self.root))

    @property
    def looked(self) -> list[Looked]:
        return self._looked[0]

    @cached_property
    def numbering(self) -> Numbering:
        known = None if self.found.classes is None else len(self.found.classes)
        if self.chosen is not None:
            return Numbering(self.chosen, NOTHING, 0 in self.chosen, chosen=True)
        found = numbering(self.looked, known, zero_is_class=self.zero_is_class, ignored=self.ignore)
        if (count := known or len(found.numbers)) > MOST_CLASSES:
            raise DataError(f"'{self.name}' has {count} classes; at most {MOST_CLASSES} fit into masks of 8 bits.")
        if len(found.numbers) < 2 and any(each.values for each in self.looked):
            others = self._told([each.faults for each in self.looked])
            raise DataError("\n  ".join([self._too_few(found), *others.lines()]))
        return found

    def _too_few(self, found: Numbering) -> str:
        values = sorted({value for each in self.looked for value in each.values})
        first = "0 is a class" if self.zero_is_class else "0 is unlabelled"
        chosen = values if 2 <= len(values) <= 10 else [0, 255]
        return (
            f"The masks of '{self.found.folder}' have {counted(len(found.numbers), 'class', 'classes')}, and 2 are "
            f"needed. Their numbers are {', '.join(map(str, values[:10]))}, where {first} and {found.ignored} is "
            f"ignored; zero=background, zero=unlabelled and ignore=NUMBER say otherwise, and numbers={chosen} "
            "names those that are classes. Classes are numbered one by one, not as shades of grey."
        )

    @cached_property
    def classes(self) -> tuple[str, ...]:
        numbers, names = self.numbering.numbers, self.found.classes
        if names is None and self.zero_is_class and numbers == tuple(range(len(VOC))):
            names = VOC
        if names is None:
            return tuple(map(str, numbers))
        if self.chosen is not None:
            return self._names_of_chosen(names, self.chosen)
        first = 0 if self.zero_is_class else 1
        return tuple(names[number - first] for number in numbers)

    def _names_of_chosen(self, names: tuple[str, ...], chosen: tuple[int, ...]) -> tuple[str, ...]:
        """One name for each of the numbers in their order, or the names of all numbers, of which these are some."""
        if len(names) == len(chosen):
            return names
        first = 0 if self.found.zero == "background" or 0 in chosen else 1
        if beyond := [number for number in chosen if not 0 <= number - first < len(names)]:
            raise DataError(
                f"'{self.found.folder}' names {counted(len(names), 'class', 'classes')}, none of which is "
                f"{listed(map(str, beyond))}; numbers chooses {len(chosen)}. Name each of these, in their order."
            )
        return tuple(names[number - first] for number in chosen)

    @cached_property
    def _faults_of(self) -> list[list[tuple[Fault, str]]]:
        """What is wrong with every pair, as kinds with reasons."""
        return [
            [
                *([(SEVERAL, pair.several)] if pair.several else ()),
                *each.faults,
                *(self.numbering.faults(each.values) if each.values else ()),
            ]
            for (_, pair), each in zip(self.all, self.looked, strict=True)
        ]

    @cached_property
    def faults(self) -> Faults:
        """The same, kind by kind, with the files that are to be looked at, and what is wrong with lists."""
        return self._told(self._faults_of)

    def _told(self, faults_of: Sequence[Iterable[tuple[Fault, str]]]) -> Faults:
        found = Faults()
        found.merge(self.found.faults)
        for (part, pair), faults in zip(self.all, faults_of, strict=True):
            for kind, why in faults:
                file = (pair.mask or pair.image) if kind in OF_MASKS else (pair.image or pair.mask)
                shown = f"{pair.name} ({part})" if file is None else file.relative_to(self.found.folder).as_posix()
                found.add(kind, shown, why)
        return found

    @property
    def remedy(self) -> str:
        """What can be done about the faults."""
        if NO_CLASS not in self.faults.found:
            return "Repair or remove them"
        return "See whether classes.txt, zero= and ignore= say what the numbers mean; repair or remove the others"

    @cached_property
    def _usable(self) -> dict[Part, list[int]]:
        """The numbers of the pairs that can be used. The test set is chosen from all, whether or not they can."""
        members: dict[Part, list[int]] = {}
        for index, (part, _) in enumerate(self.all):
            members.setdefault(part, []).append(index)
        if "test" not in members:
            members["training"], members["test"] = self._held_out(members["training"])
        return {part: [i for i in indices if not self._faults_of[i]] for part, indices in members.items()}

    @cached_property
    def parts(self) -> dict[Part, list[int]]:
        """The same, without training images that validation or test has, too."""
        held = {self.looked[i].image for part, each in self._usable.items() if part != "training" for i in each}
        training = [index for index in self._usable["training"] if self.looked[index].image not in held]
        parts = {**self._usable, "training": training}
        for part, indices in parts.items():
            least = 2 if part == "training" and "validation" not in parts else 1
            if len(indices) < least:
                there = counted(len(indices), f"{part} image")
                raise DataError(f"'{self.name}' has {there} that can be used; it needs at least {least}.")
        return parts

    def limited(self, part: Part, limit: int | None) -> list[int]:
        """So many pairs of a part; before any is decoded."""
        indices = self.parts[part]
        kept = kept_of(self.name, len(indices), limit, part, self.groups_of(indices))
        return indices if kept is None else torch.tensor(indices)[kept].tolist()

    def _held_out(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """A fixed fifth is for test."""
        chosen = torch.tensor(indices)
        kept, held = hold_out(torch.zeros(len(indices), dtype=torch.int64), self.groups_of(indices))
        return chosen[kept].tolist(), chosen[held].tolist()

    def groups_of(self, indices: Sequence[int]) -> Tensor | None:
        """Copies of one image are a group; None: there are none."""
        digests = [self.looked[index].image or str(index) for index in indices]
        return None if len(set(digests)) == len(digests) else joined(len(digests), digests)

    @property
    def notes(self) -> list[str]:
        """What a user should know, in sentences."""
        found = list(self._looked[1])
        if copies := len(self._usable["training"]) - len(self.parts["training"]):
            found.append(f"Left out of training, since validation or test has the same image: {copies:,}.")
        return [*found, *self._unseen(), *self._shifted()]

    def _unseen(self) -> list[str]:
        """A line about classes that no training mask has."""
        seen = {value for index in self.parts["training"] for value in self.looked[index].values}
        there = [number for number in self.numbering.numbers if number in seen]
        missing = [
            name for name, number in zip(self.classes, self.numbering.numbers, strict=True) if number not in seen
        ]
        if not missing:
            return []
        few = len(there) < len(missing) and self.found.classes is None
        alone = f" numbers={there} makes classes of the others alone." if few and len(there) > 1 else ""
        return [f"No training mask has these classes: {listed(missing)}.{alone}"]

    def _shifted(self) -> list[str]:
        """A line where 0 counts for nothing, and the names would fit if it were a class."""
        if self.found.classes is None or self.zero_is_class or self.chosen is not None:
            return []
        with_zero = sum(0 in each.values for each in self.looked)
        last = max((v for each in self.looked for v in each.values if v != self.numbering.ignored), default=0)
        if not with_zero or last >= self.numbering.numbers[-1]:
            return []
        where = f"{with_zero:,} of {counted(len(self.looked), 'mask')}"
        return [
            f"0 counts for nothing and is in {where}, and none has the last class, '{self.classes[-1]}': if "
            f"'{self.classes[0]}' is what 0 stands for, say zero=background."
        ]

    @cached_property
    def fingerprint(self) -> str:
        """Of names, contents and meanings: what a mask's number stands for, and the size of what a model sees."""
        numbers = self.numbering
        texts = [f"{self.canvas} {numbers}", *self.classes]
        for part, indices in sorted(self.parts.items()):
            for index in indices:
                looked = self.looked[index]
                texts.append(f"{part} {self.all[index][1].name} {looked.image} {looked.mask} {looked.turned}")
        return of_parts(*texts)

    def source(self, indices: Sequence[int]) -> MaskSource:
        """Some of the pairs."""
        load = MaskFiles(
            [self.all[index][1] for index in indices],
            [self.looked[index] for index in indices],
            self.numbering,
            self.canvas,
        )
        if load.bytes > memory.MEMORY_LIMIT:
            return LazyMasks(load, torch.arange(len(load)))
        pairs = look_through("decoding images and masks", range(len(load)), load)
        truths = look_through("decoding masks", range(len(load)), load.truth)
        return MemoryMasks(torch.stack([image for image, _ in pairs]), torch.stack([mask for _, mask in pairs]), truths)
