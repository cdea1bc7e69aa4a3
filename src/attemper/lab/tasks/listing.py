"""Which files a set has, and which class each of them belongs to: by its folder, or by its name."""

import contextlib
import dataclasses
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from attemper.lab.counting import counted
from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import Broken, listed, settle, shown
from attemper.lab.tasks.name_pattern import NamePattern

TRAINING = ("train", "training")
TEST = ("test", "testing", "val", "valid", "validation")
"""Names of folders with a part of a set, in any case; of several for test, the first is taken."""
NO_CLASSES = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
"""Folders that operating systems leave behind."""


Part = tuple[Path, bool | None]
"""A folder, and whether its files are of the test set; None: a part of them will be."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is looked for. one, many: what messages call it. endings: of its files, in lower case."""

    one: str
    many: str
    endings: tuple[str, ...]

    def counted(self, count: int) -> str:
        return counted(count, self.one, self.many)


@dataclasses.dataclass(frozen=True)
class Item:
    """One file."""

    name: str
    """Relative to the folder of the set."""
    target: int
    held: bool | None = None
    """Whether it is of the test set; None: a fixed part of all files will be."""
    group: str | None = None
    """What it was cut from, or who made it, where that is known: files of one group are not separated."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of a set, in a fixed order, and the names of its classes."""

    folder: Path
    items: tuple[Item, ...]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What was left out, in sentences."""

    def path(self, index: int) -> Path:
        return self.folder / self.items[index].name


def list_folder(folder: Path, kind: Kind, label: str | None = None, broken: Broken = "refuse") -> Listing:
    """The files of a folder, or of 'train' and 'test' (or 'val') inside of it.

    label: a pattern by which their names say their class; None: there is one subfolder per class.
    """
    training, test, unused = _parts(folder)
    notes = [f"'{folder / each}' is not used: 'test' is, and validation is split off training." for each in unused]
    parts: list[Part] = [(folder, None)]
    if training is not None and test is not None:
        parts = [(training, False), (test, True)]
    if label is not None:
        return _by_name(folder, parts, kind, NamePattern(label), broken, notes)
    return _by_folder(folder, parts, kind, notes)


def _parts(folder: Path) -> tuple[Path | None, Path | None, list[str]]:
    """The folders for training and test, and those that would do for test, too."""
    inside = {each.name.lower(): each for each in sorted(_subfolders(folder), reverse=True)}
    training = [inside[name] for name in TRAINING if name in inside]
    test = [inside[name] for name in TEST if name in inside]
    if not training or not test:
        return None, None, []
    return training[0], test[0], [each.name for each in test[1:]]


# ------------------------------------------------------------------------------------------------------------ by folder
def _by_folder(folder: Path, parts: list[Part], kind: Kind, notes: list[str]) -> Listing:
    named = [_class_folders(part, kind) for part, _ in parts]
    classes = sorted(named[0])
    if odd := sorted(set(named[0]) ^ set(named[-1])):
        only = (f"only '{(parts[0] if name in named[0] else parts[1])[0].name}' has '{shown(name)}'" for name in odd)
        raise DataError(f"The parts of '{folder}' have different classes: {listed(only)}.")
    items, empty = [], []
    for (part, held), folders in zip(parts, named, strict=True):
        notes = [*notes, *_loose(part, kind)]
        for target, name in enumerate(classes):
            inside = files_in(folders[name], kind.endings)
            empty += [] if inside else [folders[name]]
            items += [Item(file.relative_to(folder).as_posix(), target, held) for file in inside]
    if empty:
        raise DataError(
            f"{len(empty)} of {len(parts) * len(classes)} class folders have no {kind.many} in them: "
            f"{listed(map(_quoted, empty))} (looked for {', '.join(kind.endings)})."
        )
    return Listing(folder, tuple(items), tuple(classes), tuple(notes))


def _class_folders(folder: Path, kind: Kind) -> dict[str, Path]:
    """Class → its folder. Accents may be written in two ways; here they are one."""
    found = {unicodedata.normalize("NFC", each.name): each for each in _subfolders(folder)}
    if len(found) > 1:
        return found
    hint = ""
    if loose := files_in(folder, kind.endings, deep=False):
        hint = (
            f" It has {kind.counted(len(loose))} itself: if their names tell their class, say how with the option "
            "label, such as label='{label}_*'."
        )
    elif found:
        only = next(iter(found.values()))
        inside = len(_subfolders(only))
        hint = f" Its only one, '{shown(only.name)}', has {inside}: name that one instead?" if inside > 1 else ""
    raise DataError(
        f"'{folder}' has {counted(len(found), 'class folder')}; there must be at least 2, one per class.{hint}"
    )


def _loose(folder: Path, kind: Kind) -> list[str]:
    """A line about files that have no class, if there are any."""
    found = files_in(folder, kind.endings, deep=False)
    if not found:
        return []
    return [f"Left out, since they lie in no class folder: {kind.counted(len(found))}, '{shown(str(found[0]))}' first."]


# -------------------------------------------------------------------------------------------------------------- by name
def _by_name(
    folder: Path, parts: list[Part], kind: Kind, pattern: NamePattern, broken: Broken, notes: list[str]
) -> Listing:
    found = [(file, part, held) for part, held in parts for file in files_in(part, kind.endings)]
    if not found:
        raise DataError(f"'{folder}' has no {kind.many} in it (looked for {', '.join(kind.endings)}).")
    fields = [pattern.match(file.relative_to(part).as_posix()) for file, part, _ in found]
    names = [file.relative_to(folder).as_posix() for file, _, _ in found]
    odd = {name: "" for name, each in zip(names, fields, strict=True) if each is None}
    verb = f"do not fit the pattern '{pattern.text}'"
    notes += settle(odd, len(names), f"{kind.many} in '{folder}'", broken, verb=verb, remedy="Correct the pattern")
    classes = sorted({each.label for each in fields if each is not None}, key=_in_order)
    if len(classes) < 2:
        raise DataError(
            f"By the pattern '{pattern.text}', the {kind.many} in '{folder}' are of {len(classes)} classes"
            f"{', ' * len(classes)}{listed(map(_quoted, classes))}; there must be at least 2."
        )
    number = {label: target for target, label in enumerate(classes)}
    items = [
        Item(name, number[each.label], held, each.group)
        for name, each, (_, _, held) in zip(names, fields, found, strict=True)
        if each is not None
    ]
    for part, held in parts if len(parts) > 1 else ():
        if missing := sorted(set(range(len(classes))) - {item.target for item in items if item.held == held}):
            raise DataError(
                f"'{part}' has none of {len(missing)} of {len(classes)} classes: "
                f"{listed(_quoted(classes[target]) for target in missing)}."
            )
    return Listing(folder, tuple(items), tuple(classes), tuple(notes))


def _quoted(name: object) -> str:
    return f"'{shown(str(name))}'"


def _in_order(label: str) -> tuple[int, int, str]:
    """Numbers by their value, before words."""
    return (0, int(label), label) if label.isascii() and label.isdigit() else (1, 0, label)


def describe(listing: Listing, kind: Kind, most: int = 30) -> list[str]:
    """Classes with their numbers of files, in a few lines; no file is opened for it."""
    counts = Counter(item.target for item in listing.items)
    groups = {item.group for item in listing.items if item.group is not None}
    of_groups = f" and of {len(groups):,} groups: {listed(map(shown, sorted(groups)))}" if groups else ""
    lines = [f"{kind.counted(len(listing.items))} of {len(listing.classes):,} classes{of_groups}"]
    for target, name in list(enumerate(listing.classes))[:most]:
        first = next(item.name for item in listing.items if item.target == target)
        lines.append(f"  {shown(name)}: {counts[target]:,}, '{shown(first)}' first")
    if len(listing.classes) > most:
        lines.append(f"  and {len(listing.classes) - most:,} more classes")
    return [*lines, *listing.notes]


# ---------------------------------------------------------------------------------------------------------------- files
def files_in(folder: Path, endings: Iterable[str], *, deep: bool = True) -> list[Path]:
    """Files with one of these endings, sorted; hidden ones, such as ._x.png, are none.

    Links to files are given, those to nothing as well, so that they can be named when they are to be read. Links to
    folders are not followed: they may lead back up, into the other classes.
    deep: those in subfolders as well.
    """
    endings = tuple(endings)
    found: list[Path] = []
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        with _readable(here), os.scandir(here) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if deep and entry.name not in NO_CLASSES:
                        waiting.append(here / entry.name)
                elif os.path.splitext(entry.name)[1].lower() in endings and (entry.is_symlink() or entry.is_file()):
                    found.append(here / entry.name)
    return sorted(found)


def _subfolders(folder: Path) -> list[Path]:
    """One per class. A link that leads nowhere is an error: a class that is not there would be missed by nobody."""
    with _readable(folder), os.scandir(folder) as entries:
        shown = sorted((each for each in entries if not each.name.startswith(".")), key=lambda each: each.name)
    for each in shown:
        if each.is_symlink() and not os.path.exists(each.path):
            where = _quoted(folder / each.name)
            raise DataError(f"{where} is a link that leads nowhere, or to itself. Correct it, or remove it.")
    return [folder / each.name for each in shown if each.is_dir() and each.name not in NO_CLASSES]


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Context manager: a folder that cannot be read is a `DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"The folder {_quoted(folder)} cannot be read: {error.strerror or error}.") from None
