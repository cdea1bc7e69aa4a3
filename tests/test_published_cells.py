"""The published figures as data: read strictly, and the same as a second copy that somebody typed from the sources."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attemper.errors import AttemperError, ParameterError
from attemper.lab.errors import DataError
from attemper.lab.study.published import catalogue
from attemper.lab.study.published.cells import SOURCES, Cell, all_printed, parse_cell, parse_source, read_printed
from typed_cells import CELLS, DISAGREEMENTS

HEAD = {"name": "A paper", "short": "Paper", "cited": "A paper, 2026", "copy": "all of it", "third_party": False}
TABLE: dict[str, Any] = {
    "title": "Table 1", "about": "accuracy", "where": "page 1", "columns": ["a", "b"], "rows": {"none": ["1.5", ""]},
}  # fmt: skip


def printed(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        signs = {'"': '\\"', "\\": "\\\\"}
        return (
            '"'
            + "".join(signs.get(c, c if ord(c) >= 32 and ord(c) != 127 else f"\\u{ord(c):04x}") for c in value)
            + '"'
        )
    if isinstance(value, list):
        return f"[{', '.join(map(printed, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{printed(key)} = {printed(each)}' for key, each in value.items())}}}"
    return str(value)


def source(table: Any = TABLE, head: Any = HEAD) -> str:
    return f"paper = {printed(head)}\none = {printed(table)}\n"


# ------------------------------------------------------------------------------------------------- two copies of all
Key = tuple[str, str, str]


def ours() -> dict[Key, Any]:
    found = {}
    for key, table in all_printed().items():
        for row, cells in table.rows.items():
            for column, cell in zip(table.columns, cells, strict=True):
                value = cell.value if cell.deviation is None else (cell.value, cell.deviation)
                found[key, row.lower(), column.lower()] = (value, cell.text)
    return found


def theirs() -> dict[Key, Any]:
    return {(table, row, column): value for table, cells in CELLS.items() for (row, column), value in cells.items()}


def test_every_cell_is_the_same_in_a_second_copy() -> None:
    first, second = ours(), theirs()
    differing = {key: (first[key], value) for key, value in second.items() if key in first and first[key][0] != value}
    assert not differing


def test_no_cell_is_missing_in_either_copy() -> None:
    first, second = ours(), theirs()
    assert not sorted(second.keys() - first.keys())
    assert not sorted(key for key in first.keys() - second.keys() if first[key][1]), "a cell that nobody else has read"
    assert len(second) > 400


def test_sources_that_contradict_themselves_are_shown_with_both_figures() -> None:
    table, text = read_printed("cb/S2"), read_printed("cb/S2-text")
    base = table.cell("ViT-S distilled", "FGSM [%]").value
    assert base is not None
    for name in ("ViT-S distilled + CB", "ViT-S distilled + CB_S"):
        by_table, by_text = table.cell(name, "FGSM [%]").value, text.cell(name, "FGSM").value
        assert by_table is not None
        assert by_text == pytest.approx(by_table - base + 1.0)
        assert ("cb/S2-text", name.lower(), "fgsm") in DISAGREEMENTS
    robustness = next(each for each in catalogue() if each.key == "cb-robustness")
    titles = [column.title for column in robustness.columns]
    assert "FGSM, %" in titles
    assert "FGSM, gain by the text" in titles
    [row] = [row for row in robustness.rows if row.name == "cb"]
    shown = dict(zip(titles, row.cells, strict=True))
    assert (shown["FGSM, %"].value, shown["FGSM, gain by the text"].value) == (15.5, 4.7)


def test_main_rows_of_explicit_dropout_are_the_best_cells_of_its_ablation() -> None:
    """What the paper's two tables say about each other: a slip in copying either would break it."""
    main, ablation = read_printed("explicit/cifar10"), read_printed("explicit/cifar10-ablation")
    for component in ("Q", "K", "V", "AV"):
        cells = [cell for name, row in ablation.rows.items() if name.startswith(f"{component} ") for cell in row]
        assert len(cells) == 16
        best = max((cell.value, cell.deviation) for cell in cells)
        found = main.cell(f"Explicit {component} / explicit", "Accuracy (%)")
        assert (found.value, found.deviation) == best


def test_every_printed_table_belongs_to_a_table_that_is_listed() -> None:
    used = {key for table in catalogue() for key in table.printed}
    assert used == set(all_printed())
    assert {key.partition("/")[0] for key in used} == set(SOURCES)


def test_figures_from_notes_are_marked() -> None:
    for table in all_printed().values():
        assert ("†" in table.source) == table.third_party
        assert table.third_party == (table.where in ("notes", "summary, results", "summary, limitations"))


# ---------------------------------------------------------------------------------------------------------- the reader
numbers = st.integers(0, 200_000).map(lambda hundredths: f"{hundredths / 100:.2f}")


@given(numbers, st.none() | numbers, st.sampled_from(["", "+", "≈ "]))
def test_a_cell_says_what_was_printed(value: str, deviation: str | None, mark: str) -> None:
    text = mark + value + ("" if deviation is None else f" ± {deviation}")
    cell = parse_cell(text)
    assert cell == Cell(text, float(value), None if deviation is None else float(deviation))
    assert cell.added == (mark == "+")
    assert str(cell) == text


@pytest.mark.parametrize("text", ["", "–"])
def test_a_cell_without_a_number_has_none(text: str) -> None:
    assert parse_cell(text) == Cell(text, None, None)


@given(st.text(max_size=12))
def test_any_other_text_is_refused_and_named(text: str) -> None:
    if re.fullmatch(r"[+≈]?\s*[0-9]+(\.[0-9]+)?(\s*±\s*[0-9]+(\.[0-9]+)?)?", text) or text in ("", "–"):
        return
    with pytest.raises(DataError, match="A cell is"):
        parse_cell(text)


cells = st.sampled_from(["", "–", "80.5", "+0.9", "≈ 92", "85.24 ± 0.75"])
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=8)


@given(
    st.lists(names, min_size=1, max_size=3, unique=True),
    st.lists(names, min_size=1, max_size=3, unique=True),
    st.data(),
)
def test_what_is_written_is_read(columns: list[str], rows: list[str], data: st.DataObject) -> None:
    grid = {row: [data.draw(cells) for _ in columns] for row in rows}
    [table] = parse_source("x", source({**TABLE, "columns": columns, "rows": grid})).values()
    assert table.key == "x/one"
    assert table.columns == tuple(columns)
    assert {row: [cell.text for cell in found] for row, found in table.rows.items()} == grid
    for row in rows:
        for column in columns:
            assert table.cell(row, column).text == grid[row][columns.index(column)]


WRONG: dict[str, tuple[str, str]] = {
    "no TOML": ("one = ", "no TOML"),
    "no paper": ("one = {}", "need a \\[paper\\]"),
    "a paper without its copy": (source(head={"name": "x"}), "need a \\[paper\\]"),
    "a paper that is no table": ("paper = 3", "need a \\[paper\\]"),
    "a name that is a number": (source(head={**HEAD, "name": 3}), "'name' is 3"),
    "a table that is a number": (source(3), "'x/one' needs"),
    "a table without rows": (source({key: each for key, each in TABLE.items() if key != "rows"}), "'x/one' needs"),
    "a word that there is not": (source({**TABLE, "colunms": []}), "'x/one' needs"),
    "rows that are none": (source({**TABLE, "rows": {}}), "no rows"),
    "no columns": (source({**TABLE, "columns": []}), "columns are"),
    "columns that are numbers": (source({**TABLE, "columns": [1, 2]}), "columns are"),
    "one column twice": (source({**TABLE, "columns": ["a", "a"]}), "two columns"),
    "a row too short": (source({**TABLE, "rows": {"none": ["1"]}}), "a list of 2 cells"),
    "a row too long": (source({**TABLE, "rows": {"none": ["1", "2", "3"]}}), "a list of 2 cells"),
    "a row that is a text": (source({**TABLE, "rows": {"none": "12"}}), "a list of 2 cells"),
    "a cell that is a number": (source({**TABLE, "rows": {"none": [1.5, "2"]}}), "'none': A cell is 1.5"),
    "a cell that is no number": (source({**TABLE, "rows": {"none": ["many", "2"]}}), "'none': A cell is 'many'"),
    "a row twice": (source() + '[one.rows]\n"none" = ["1", "2"]\n', "no TOML"),
    "a title that is empty": (source({**TABLE, "title": ""}), "empty"),
    "notes that are a word": (source({**TABLE, "third_party": "yes"}), "third_party"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_with_a_mistake_is_refused_and_says_where(case: str) -> None:
    text, says = WRONG[case]
    with pytest.raises(DataError, match=says):
        parse_source("x", text)


@given(st.binary(max_size=60), st.integers(0, 4000), st.integers(0, 30))
def test_a_damaged_file_is_refused_or_read_as_whole_tables(bytes_: bytes, at: int, length: int) -> None:
    good = source()
    text = good[: at % len(good)] + bytes_.decode("utf-8", "replace") + good[at % len(good) + length :]
    try:
        found = parse_source("x", text)
    except AttemperError:
        return
    for table in found.values():
        assert all(len(row) == len(table.columns) for row in table.rows.values())
        assert tomllib.loads(text)


def test_names_that_there_are_not_are_answered_with_those_that_there_are() -> None:
    with pytest.raises(ParameterError, match="Did you mean 'cb/S4'"):
        read_printed("cb/S44")
    table = read_printed("cb/S4")
    with pytest.raises(ParameterError, match="no row 'ViT-X'"):
        table.cell("ViT-X", "Accuracy")
    with pytest.raises(ParameterError, match="Did you mean 'Accuracy'"):
        table.cell("ViT-S", "accuracy")
