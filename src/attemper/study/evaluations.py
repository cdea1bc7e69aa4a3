"""The table of a study's evaluations: calibration and robustness of every recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

__all__ = ["evaluation_rows", "evaluation_table", "figure_names", "figure_text", "figures_of"]

NOTHING = {"mean": None, "deviation": None, "share": True}


def figure_names(summary: dict[str, Any]) -> list[str]:
    """The figures that at least one recipe has, in their order."""
    every = [figure for row in summary["recipes"] for figure in (row.get("evaluation") or {}).get("figures", ())]
    return list(dict.fromkeys(figure["name"] for figure in every))


def figures_of(row: dict[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """A recipe's figures by these names, one each; an empty one where it has none."""
    known = {figure["name"]: figure for figure in (row.get("evaluation") or {}).get("figures", ())}
    return [known.get(name, {**NOTHING, "name": name}) for name in names]


def evaluation_rows(summary: dict[str, Any]) -> list[list[str]]:
    """A heading and one line per recipe, as text; nothing where nothing was evaluated. Shares are in per cent."""
    names = figure_names(summary)
    if not names:
        return []
    units = {name: unit for row in summary["recipes"] for name, unit in _units(row)}
    header = ["recipe", *(f"{name}{units.get(name, '')}" for name in names)]
    return [
        header,
        *([row["name"], *(figure_text(figure) for figure in figures_of(row, names))] for row in summary["recipes"]),
    ]


def _units(row: dict[str, Any]) -> list[tuple[str, str]]:
    figures = (row.get("evaluation") or {}).get("figures", ())
    return [(figure["name"], " %" if figure["share"] else "") for figure in figures]


def figure_text(figure: dict[str, Any]) -> str:
    """Mean ± deviation."""
    mean, deviation = figure["mean"], figure["deviation"]
    if mean is None:
        return "–"
    factor, digits = (100, 2) if figure["share"] else (1, 3)
    text = f"{factor * mean:.{digits}f}"
    text = text if deviation is None else f"{text} ± {factor * deviation:.{digits}f}"
    return text.replace("-", "−")


def evaluation_table(summary: dict[str, Any]) -> Table | None:
    """The table for a terminal, means alone; None where nothing was evaluated. One recipe stands upright."""
    names = figure_names(summary)
    if not names:
        return None
    rows = evaluation_rows(summary)
    cells = [[cell.partition(" ±")[0] for cell in row] for row in rows]
    if len(cells) == 2:
        cells = [list(pair) for pair in zip(*cells, strict=True)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(cells[0]):
        table.add_column(title, justify="right" if index else "left", min_width=5, no_wrap=not index)
    for row in cells[1:]:
        table.add_row(*(Text(cell) for cell in row))
    return table
