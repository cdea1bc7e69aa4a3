"""The clips of ESC-50, by its own table."""

import csv
import io
from pathlib import Path

from attemper.errors import UnreadableError
from attemper.files import read_text
from attemper.lab.errors import DataError
from attemper.lab.tasks.audio.reading import ENDINGS
from attemper.lab.tasks.broken import Broken, settle
from attemper.lab.tasks.listing import Item, Kind, Listing

SOUNDS = Kind("audio file", "audio files", ENDINGS)
ESC50_FOLDS = 5


def list_esc50(folder: Path, fold: int, broken: Broken = "refuse") -> Listing:
    """ESC-50 as it is published: 'audio' with the clips and 'meta/esc50.csv', which says class and fold of each.

    fold: the one of five that becomes the test set. Clips that were cut from one recording are in one fold.
    """
    if fold > ESC50_FOLDS:
        raise DataError(f"fold is {fold}; ESC-50 has {ESC50_FOLDS} of them, counted from 1.")
    table = folder / "meta" / "esc50.csv"
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(table), newline="")))
    except (UnreadableError, csv.Error) as error:
        raise DataError(f"The table '{table}' cannot be read: {error} 'esc50:' takes ESC-50's own folder.") from None
    names: dict[int, str] = {}
    items: list[Item] = []
    problems: dict[str, str] = {}
    for line, row in enumerate(rows, start=2):  # the first line has the names of the columns
        try:
            items.append(_item(row, names, fold))
        except ValueError as error:
            problems[f"line {line}"] = str(error)
    notes = settle(problems, len(rows), f"rows of '{table}'", broken)
    if sorted(names) != list(range(len(names))) or len(names) < 2:
        raise DataError(f"The classes of '{table}' are {sorted(names)}; they must be counted from 0 without a gap.")
    if not any(item.held for item in items) or all(item.held for item in items):
        raise DataError(f"No row of '{table}' is in fold {fold}, or every row is.")
    return Listing(folder, tuple(items), tuple(names[target] for target in range(len(names))), tuple(notes))


def _item(row: dict[str, str | None], names: dict[int, str], fold: int) -> Item:
    """The clip of a row; a `ValueError` says why there is none. names: of the classes so far, its own is added."""
    needed = ("filename", "fold", "target", "category", "src_file")
    if missing := [key for key in needed if not row.get(key)]:
        raise ValueError(f"it has no {missing[0]}; it needs {', '.join(needed)}")
    name, part, number, category, recording = (str(row[key]) for key in needed)
    for key, value in (("fold", part), ("target", number)):
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"its {key} is {value!r}; it must be a whole number")
    if name != Path(name).name or not name.isprintable():
        raise ValueError(f"{name!r} is no name of a file")
    target = int(number)
    if names.setdefault(target, category) != category:
        raise ValueError(f"class {target} is '{category}' here, and was '{names[target]}' before")
    return Item(f"audio/{name}", target, int(part) == fold, recording)
