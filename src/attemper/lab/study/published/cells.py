"""The published figures as data: one TOML file per source, one reader.

A file has a `[paper]` and tables; a table has columns and rows, and a cell is a text as it was printed: "85.24 ± 0.75",
"80.5", "+0.9" (added to the first row), "≈ 92" (roughly), "–" (the publication has a dash) or "" (nothing legible).
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from attemper.errors import ParameterError, quoted, shown, suggestion
from attemper.lab.errors import DataError

SOURCES = ("explicit", "cb", "graying", "skips", "dropkey", "attentiondrop")
"""The files, in the order in which their tables are listed."""
NUMBER = r"[0-9]+(?:\.[0-9]+)?"
CELL = re.compile(rf"(?P<mark>[+≈])?\s*(?P<value>{NUMBER})(?:\s*±\s*(?P<deviation>{NUMBER}))?")
DASH = "–"
PAPER = {"name": str, "short": str, "cited": str, "copy": str, "third_party": bool}
TABLE = {"title": str, "about": str, "where": str, "columns": list, "rows": dict}


@dataclass(frozen=True)
class Cell:
    """One printed cell."""

    text: str = ""
    value: float | None = None
    """None: a dash, or nothing that can be read."""
    deviation: float | None = None

    @property
    def added(self) -> bool:
        """Whether it is printed as what comes on top of the first row."""
        return self.text.startswith("+")

    def __str__(self) -> str:
        return self.text


def parse_cell(text: str) -> Cell:
    """A cell from its text.

    >>> parse_cell("85.24 ± 0.75")
    Cell(text='85.24 ± 0.75', value=85.24, deviation=0.75)
    >>> parse_cell("–").value, parse_cell("+0.9").added
    (None, True)
    """
    if not isinstance(text, str):
        raise DataError(f"A cell is {shown(text)}; it must be a text such as '85.24 ± 0.75'.")
    if text in ("", DASH):
        return Cell(text)
    found = CELL.fullmatch(text)
    if found is None:
        raise DataError(
            f"A cell is {quoted(text)}; it must be such as '85.24 ± 0.75', '80.5', '+0.9', '≈ 92', '–', ''."
        )
    deviation = found["deviation"]
    return Cell(text, float(found["value"]), None if deviation is None else float(deviation))


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Where figures come from."""

    name: str
    short: str
    cited: str
    copy: str
    """What of it was read."""
    third_party: bool
    """Figures are not from the paper itself, but from notes about it."""


@dataclass(frozen=True, kw_only=True)
class Printed:
    """A table as it was printed, or what stands in sentences, as one."""

    key: str
    """Source and table, such as 'cb/S5'."""
    paper: Paper
    title: str
    about: str
    where: str
    """Page or section, as far as our copy shows it."""
    third_party: bool
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Cell, ...]]

    @property
    def source(self) -> str:
        """The source in a line, marked where the figures are from notes.

        >>> read_printed("cb/S4").source
        "Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023, supplement, table S4"
        """
        title = self.title if self.where == "notes" else self.title[0].lower() + self.title[1:]
        return f"{self.paper.cited}, {title}{' †' if self.third_party else ''}"

    def cell(self, row: str, column: str) -> Cell:
        """One cell; a name that there is not is an error that tells the right one."""
        if row not in self.rows:
            raise ParameterError(f"{self.key} has no row '{row}'.{suggestion(row, self.rows)}")
        if column not in self.columns:
            raise ParameterError(f"{self.key} has no column '{column}'.{suggestion(column, self.columns)}")
        return self.rows[row][self.columns.index(column)]


def parse_source(source: str, text: str) -> dict[str, Printed]:
    """The tables of one file, by key. source: what it is called, for keys and errors."""
    try:
        whole = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DataError(f"The published figures of '{source}' are no TOML: {error}") from None
    head = whole.pop("paper", None)
    if not isinstance(head, dict) or head.keys() != PAPER.keys():
        raise DataError(f"The published figures of '{source}' need a [paper] with {', '.join(PAPER)}.")
    _check_types(f"{source}, [paper]", head, PAPER)
    paper = Paper(**head)
    return {f"{source}/{name}": _table(f"{source}/{name}", paper, given) for name, given in whole.items()}


def _check_types(what: str, given: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        if type(given[name]) is not kind:
            raise DataError(f"{what}: '{name}' is {shown(given[name])}; it must be a {kind.__name__}.")


def _table(key: str, paper: Paper, given: Any) -> Printed:
    if not isinstance(given, dict) or given.keys() - {"third_party"} != TABLE.keys():
        raise DataError(f"The published table '{key}' needs {', '.join(TABLE)}; got {shown(given)}.")
    third_party = given.get("third_party", paper.third_party)
    _check_types(key, {**given, "third_party": third_party}, {**TABLE, "third_party": bool})
    columns = tuple(given["columns"])
    if not columns or not all(isinstance(column, str) and column for column in columns):
        raise DataError(f"{key}: columns are {shown(list(columns))}; they must be names.")
    if len(set(columns)) < len(columns):
        raise DataError(f"{key}: two columns have one name.")
    rows = {name: _row(f"{key}, '{name}'", cells, len(columns)) for name, cells in given["rows"].items()}
    texts = {name: given[name] for name in ("title", "about", "where")}
    if not rows or not all(texts.values()):
        raise DataError(f"{key}: {'a title, about or where is empty' if rows else 'there are no rows'}.")
    return Printed(key=key, paper=paper, third_party=third_party, columns=columns, rows=rows, **texts)


def _row(what: str, cells: Any, width: int) -> tuple[Cell, ...]:
    if not isinstance(cells, list) or len(cells) != width:
        raise DataError(f"{what}: a row is a list of {width} cells, one per column; got {shown(cells)}.")
    try:
        return tuple(parse_cell(cell) for cell in cells)
    except DataError as error:
        raise DataError(f"{what}: {error}") from None


@functools.cache
def all_printed() -> Mapping[str, Printed]:
    """Every table of every source, by key."""
    folder = resources.files("attemper.lab.study.published").joinpath("data")
    texts = {source: folder.joinpath(f"{source}.toml").read_text(encoding="utf-8") for source in SOURCES}
    return {key: table for source, text in texts.items() for key, table in parse_source(source, text).items()}


def read_printed(key: str) -> Printed:
    """One published table.

    >>> read_printed("explicit/cifar10").cell("Explicit V / explicit", "Accuracy (%)").value
    86.38
    """
    tables = all_printed()
    if key not in tables:
        raise ParameterError(f"There is no published table '{key}'.{suggestion(key, tables)}")
    return tables[key]
