"""Which files a set of clips has, and which class each of them belongs to."""

import csv
import dataclasses
from pathlib import Path

from attemper.lab.errors import DataError
from attemper.lab.tasks.audio.reading import ENDINGS
from attemper.lab.tasks.folder import TEST_FOLDERS

ESC50_FOLDS = 5


@dataclasses.dataclass(frozen=True)
class Clip:
    """One file."""

    name: str
    """Relative to the folder of the set."""
    target: int
    held: bool | None = None
    """Whether it is of the test set; None: a fixed part of all clips will be."""
    recording: str | None = None
    """What it was cut from, where that is known: cuts of one recording are not separated."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of a set, in a fixed order, and the names of its classes."""

    folder: Path
    clips: tuple[Clip, ...]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What was left out, in sentences."""


def list_folder(folder: Path) -> Listing:
    """A folder with one subfolder per class, as GTZAN's; or with 'train' and 'test' (or 'val') that have them."""
    part = next((each for each in TEST_FOLDERS if (folder / each).is_dir()), None)
    if part is None or not (folder / "train").is_dir():
        classes = _class_folders(folder)
        return Listing(folder, tuple(_clips(folder, folder, classes, None)), classes, tuple(_loose(folder)))
    classes = _class_folders(folder / "train")
    for name in _class_folders(folder / part):
        if name not in classes:
            first = next(iter(_sounds(folder / part / name)), folder / part / name)
            raise DataError(f"'{first}' is of class '{name}', which '{folder / 'train'}' does not have.")
    training = _clips(folder, folder / "train", classes, False)
    notes = (*_loose(folder / "train"), *_loose(folder / part))
    return Listing(folder, (*training, *_clips(folder, folder / part, classes, True)), classes, notes)


def _class_folders(folder: Path) -> tuple[str, ...]:
    names = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if len(names) < 2:
        raise DataError(f"'{folder}' has {len(names)} class folders; there must be at least 2, one per class.")
    return tuple(names)


def _loose(folder: Path) -> list[str]:
    """A line about files that have no class, if there are any."""
    found = sorted(each for each in folder.iterdir() if each.is_file() and each.suffix.lower() in ENDINGS)
    if not found:
        return []
    return [f"Left out, since they lie in no class folder: {len(found)} audio files, '{found[0]}' first."]


def _sounds(folder: Path) -> list[Path]:
    return sorted(
        each for each in folder.rglob("*") if each.suffix.lower() in ENDINGS and not each.name.startswith(".")
    )


def _clips(base: Path, folder: Path, classes: tuple[str, ...], held: bool | None) -> list[Clip]:
    found = []
    for target, name in enumerate(classes):
        inside = _sounds(folder / name) if (folder / name).is_dir() else []
        if not inside:
            raise DataError(
                f"The class folder '{folder / name}' has no audio file in it (looked for {', '.join(ENDINGS)})."
            )
        found += [Clip(file.relative_to(base).as_posix(), target, held) for file in inside]
    return found


def list_esc50(folder: Path, fold: int) -> Listing:
    """ESC-50 as it is published: 'audio' with the clips and 'meta/esc50.csv', which says class and fold of each.

    fold: the one of five that becomes the test set. Clips that were cut from one recording are in one fold.
    """
    if fold > ESC50_FOLDS:
        raise DataError(f"fold is {fold}; ESC-50 has {ESC50_FOLDS} of them, counted from 1.")
    table = folder / "meta" / "esc50.csv"
    try:
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"'{table}' cannot be read: {error}. 'esc50:' takes ESC-50's own folder.") from None
    names: dict[int, str] = {}
    clips = []
    for row in rows:
        try:
            name, target, part = str(row["filename"]), int(row["target"]), int(row["fold"])
            category, recording = str(row["category"]), str(row["src_file"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"A row of '{table}' cannot be read ({error!r}): {dict(row)}. It needs filename, fold, target, "
                "category and src_file."
            ) from None
        if names.setdefault(target, category) != category:
            raise DataError(
                f"'{name}' is of class {target} '{category}' in '{table}', and class {target} was "
                f"'{names[target]}' before."
            )
        clips.append(Clip(f"audio/{name}", target, part == fold, recording))
    if sorted(names) != list(range(len(names))) or len(names) < 2:
        raise DataError(f"The classes of '{table}' are {sorted(names)}; they must be counted from 0 without a gap.")
    if not any(clip.held for clip in clips) or all(clip.held for clip in clips):
        raise DataError(f"No row of '{table}' is in fold {fold}, or every row is.")
    return Listing(folder, tuple(clips), tuple(names[target] for target in range(len(names))))
