"""The table of a study's evaluations: calibration and robustness of every recipe."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from attemper.lab.study.decisions import adjusted as adjusted_differences
from attemper.lab.study.statistics import CONFIDENCE, paired_difference

STAR = "* differs from the baseline: paired by seed, p ≤ 0.05 after Holm's correction over all figures of this table."
"""What stands below a table in which something stands out."""
NOTHING = {"mean": None, "deviation": None, "share": True}


def compare_figures(rows: Sequence[dict[str, Any]], baseline: dict[str, Any]) -> None:
    """Give every figure its paired difference to the baseline's, with a p-value corrected over the whole table.

    Many figures are looked at here. Corrected one by one, some of them would always seem significant.
    """
    known = {figure["name"]: figure for figure in _figures(baseline)}
    others = [figure for row in rows if row is not baseline for figure in _figures(row) if figure["name"] in known]
    found = [paired_difference(figure["values"], known[figure["name"]]["values"]) for figure in others]
    for figure, difference in zip(others, adjusted_differences(found), strict=True):
        figure["difference"] = difference


def _figures(row: dict[str, Any]) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = (row.get("evaluation") or {}).get("figures", [])
    return figures


def stands_out(figure: dict[str, Any]) -> bool:
    """Whether the difference to the baseline would stand among all figures of the table."""
    adjusted = (figure.get("difference") or {}).get("adjusted")
    return adjusted is not None and adjusted <= 1 - CONFIDENCE


def figure_names(summary: dict[str, Any]) -> list[str]:
    """The figures that at least one recipe has, in their order."""
    return list(dict.fromkeys(figure["name"] for row in summary["recipes"] for figure in _figures(row)))


def figures_of(row: dict[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """A recipe's figures by these names, one each; an empty one where it has none."""
    known = {figure["name"]: figure for figure in _figures(row)}
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
    return [(figure["name"], " %" if figure["share"] else "") for figure in _figures(row)]


def figure_text(figure: dict[str, Any]) -> str:
    """Mean ± deviation, with a star where it stands out from the baseline."""
    mean, deviation = figure["mean"], figure["deviation"]
    if mean is None:
        return "–"
    factor, digits = (100, 2) if figure["share"] else (1, 3)
    text = f"{factor * mean:.{digits}f}"
    text = text if deviation is None else f"{text} ± {factor * deviation:.{digits}f}"
    return text.replace("-", "−") + (" *" if stands_out(figure) else "")


def evaluation_table(summary: dict[str, Any]) -> Table | None:
    """The table for a terminal, means alone; None where nothing was evaluated.

    Whichever are fewer, recipes or figures, are its columns: it has to fit into 80 characters.
    """
    names = figure_names(summary)
    if not names:
        return None
    rows = evaluation_rows(summary)
    cells = [[cell.partition(" ±")[0] + (" *" if cell.endswith(" *") else "") for cell in row] for row in rows]
    if len(cells) <= len(cells[0]):
        cells = [list(pair) for pair in zip(*cells, strict=True)]
    starred = any(cell.endswith(" *") for row in cells for cell in row)
    table = Table(
        box=None, pad_edge=False, header_style="bold", caption=STAR if starred else None, caption_justify="left"
    )
    for index, title in enumerate(cells[0]):
        table.add_column(title, justify="right" if index else "left", min_width=5, no_wrap=not index, overflow="fold")
    for row in cells[1:]:
        table.add_row(*(Text(cell) for cell in row))
    return table
