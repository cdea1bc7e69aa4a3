"""Images whose names and classes stand in a table: a CSV with a row for each."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from attemper.errors import suggestion
from attemper.files import read_bytes
from attemper.lab.errors import DataError
from attemper.lab.tasks.base import ImageTask
from attemper.lab.tasks.broken import Broken, settle
from attemper.lab.tasks.folder import open_listing
from attemper.lab.tasks.image_files import IMAGES
from attemper.lab.tasks.listing import TEST, Item, Listing
from attemper.lab.tasks.source import found_under

FILES = ("file", "filename", "file_name", "path", "filepath", "image", "image_path", "img", "name", "id", "image_id")
LABELS = ("label", "labels", "class", "class_name", "target", "category", "y", "species", "breed", "diagnosis")
SPLITS = ("split", "set", "part", "subset", "fold")
GROUPS = ("group", "patient", "patient_id", "subject", "person", "session", "scene")
"""What columns are called, in any case."""


def open_csv(
    name: str,
    path: str,
    root: Path,
    *,
    size: int = 64,
    folder: str | None = None,
    file: str | None = None,
    label: str | None = None,
    split: str | None = None,
    group: str | None = None,
    broken: Broken = "refuse",
    train: int | None = None,
    test: int | None = None,
) -> ImageTask:
    """The images that a CSV lists, cut to their middle square and resized.

    path: the CSV, relative to the data root or to where the program runs. Names of files are relative to its folder, or
        to `folder`; an ending such as .jpg may be left out.
    size: side of the images in pixels.
    file, label, split, group: what the columns are called, where it is none of the usual names. Rows whose split is
        test (else validation) are the test set; without such a column a fixed fifth is. Files of one group are not
        separated.
    broken: what becomes of files that are not there or cannot be decoded: refuse, or skip.
    """
    table = found_under(root, path, Path.is_file, "a file")
    beside = table.parent if folder is None else found_under(root, folder)
    listing = list_table(table, beside, file, label, split, group, broken)
    return open_listing(name, listing, root, size=size, broken=broken, train=train, test=test)


def list_table(
    table: Path,
    folder: Path,
    file: str | None = None,
    label: str | None = None,
    split: str | None = None,
    group: str | None = None,
    broken: Broken = "refuse",
) -> Listing:
    """The files that a table names, relative to a folder."""
    header, rows = _rows(table)
    columns = [_column(header, table, *each) for each in (("file", file, FILES, True), ("label", label, LABELS, True))]
    parts = _column(header, table, "split", split, SPLITS, split is not None)
    groups = _column(header, table, "group", group, GROUPS, group is not None)
    names, labels = ([row[column or 0].strip() for row in rows] for column in columns)
    found, problems = _files(folder, names)
    problems |= {name: "it has no label" for name, each in zip(names, labels, strict=True) if not each}
    notes = settle(problems, len(names), f"rows of '{table}'", broken, verb="have no file or no label")
    good = [index for index, name in enumerate(names) if name not in problems]
    classes = sorted({labels[index] for index in good})
    if len(classes) < 2:
        raise DataError(f"'{table}' has {len(classes)} classes in its column '{header[columns[1] or 0]}'; it needs 2.")
    held = _held([rows[index][parts].strip().lower() for index in good] if parts is not None else None, table)
    items = tuple(
        Item(
            found[names[index]],
            classes.index(labels[index]),
            held[place] if held else None,
            rows[index][groups].strip() or None if groups is not None else None,
        )
        for place, index in enumerate(good)
    )
    return Listing(folder, items, tuple(classes), tuple(notes))


def _rows(table: Path) -> tuple[list[str], list[list[str]]]:
    try:
        text = read_bytes(table).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"'{table}' is no text in UTF-8.") from None
    first = text.partition("\n")[0]
    delimiter = max((",", ";", "\t", "|"), key=first.count)
    try:
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if any(map(str.strip, row))]
    except csv.Error as error:
        raise DataError(f"'{table}' cannot be read as a CSV: {error}.") from None
    if len(rows) < 2 or len(rows[0]) < 2:
        raise DataError(f"'{table}' is no table of file names and labels: it needs a line of names and two columns.")
    header = [each.strip() for each in rows[0]]
    if odd := next((number for number, row in enumerate(rows[1:], 2) if len(row) != len(header)), None):
        raise DataError(f"Row {odd} of '{table}' has {len(rows[odd - 1])} columns, and the first has {len(header)}.")
    return header, rows[1:]


def _column(
    header: Sequence[str], table: Path, option: str, given: str | None, usual: Sequence[str], needed: bool
) -> int | None:
    lower = [each.lower() for each in header]
    wanted = [given.lower()] if given is not None else list(usual)
    found = next((lower.index(name) for name in wanted if name in lower), None)
    if found is None and needed:
        raise DataError(
            f"'{table}' has no column '{given or usual[0]}'.{suggestion(given or '', header)} It has: "
            f"{', '.join(header)}; say which one is meant with the option {option}."
        )
    return found


def _files(folder: Path, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The files behind names, and why others have none. Nothing outside of the folder is opened."""
    found, problems = {}, {}
    inside = folder.resolve()
    for name in names:
        path = next(
            (each for each in (name, *(name + end for end in IMAGES.endings)) if (folder / each).is_file()), None
        )
        if path is None:
            problems[name] = "there is no such file"
        elif not (folder / path).resolve().is_relative_to(inside):
            problems[name] = f"it lies outside of '{folder}'"
        else:
            found[name] = path
    twice = len(names) - len(set(names))
    if twice:
        raise DataError(f"{twice} of {len(names)} rows name a file that another row names, too.")
    return found, problems


def _held(parts: Sequence[str] | None, table: Path) -> list[bool] | None:
    """Whether each row is of the test set; None: no row says so."""
    if parts is None:
        return None
    there = set(parts)
    test = next((name for name in TEST if name in there), None)
    if test is None:
        return None
    if len(there) == 1:
        raise DataError(f"All rows of '{table}' are of the part '{test}'; some must be for training.")
    return [part == test for part in parts]
