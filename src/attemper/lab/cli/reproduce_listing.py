"""What `attemper reproduce` shows of published tables without running them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.lab.cli.printing import say

if TYPE_CHECKING:
    from rich.console import Console

    from attemper.lab.study.published import Table


def listed(table: Table, root: Path | None) -> dict[str, Any]:
    """A table as plain data: where it stands, and what it takes to run it."""
    from attemper.lab.study.published.costs import basis, cost_of
    from attemper.lab.study.published.data_here import missing_data

    missing = missing_data(table, root) if table.can_run else None
    cost = cost_of(table)
    return {
        "name": table.key,
        "title": table.title,
        "paper": table.paper,
        "source": table.source,
        "where": table.where,
        "rows": len(table.rows),
        "columns": [column.title for column in table.columns] if table.rows else [],
        "runs": table.runs("full") if table.can_run else None,
        "waits_for": table.waits_for or None,
        "missing_data": missing,
        "gpu_hours": None if cost is None else round(cost.gpu_hours, 2),
        "scaled_by_operations": None if cost is None else cost.scaled,
        "cost_from": None if cost is None else basis(cost),
    }


def show_tables(screen: Console, tables: Sequence[Table], root: Path | None) -> None:
    """The tables, paper by paper."""
    from attemper.lab.study.published import SCALES
    from attemper.lab.study.published.costs import probes, stored

    for paper in dict.fromkeys(table.paper for table in tables):
        of_paper = [table for table in tables if table.paper == paper]
        say(screen, paper, *_copies(of_paper))
        screen.print(_grid(of_paper, root))
        say(screen, "")
    used = "; ".join(f"{each.name}, {each.date}" for each in probes())
    say(
        screen,
        *(f"--scale {name}: {line}" for name, line in SCALES.items()),
        "",
        "here: whether the full scale can be run on this machine's data; smoke runs need no files.",
        f"full: GPU-hours of the full scale on one {stored()['device']}, by stored probes ({used}), without starting "
        "and without a teacher; ~: scaled by floating-point operations from the nearest probe's model.",
        "'attemper reproduce NAME --cells' shows what was printed, and which settings agree.",
    )


def _copies(tables: Sequence[Table]) -> list[str]:
    """What we have of a paper."""
    copies = dict.fromkeys(figures.paper.copy for table in tables for figures in table.figures)
    return [f"  we have {copy}" for copy in copies]


def _grid(tables: Sequence[Table], root: Path | None) -> Any:
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "table", "stands in", "rows", "here", "full"):
        grid.add_column(title, no_wrap=title in ("name", "full"), overflow="fold", justify=_side(title))
    for table in tables:
        facts = listed(table, root)
        hours = "–" if facts["gpu_hours"] is None else _hours(facts["gpu_hours"], facts["scaled_by_operations"])
        cells = (table.key, _subject(table), _place(table), str(len(table.rows) or "–"), _here(facts), hours)
        grid.add_row(*map(Text, cells))
    return grid


def _subject(table: Table) -> str:
    """The title without the name of the paper, under which it is listed."""
    rest = table.title.removeprefix(table.paper)
    return rest.lstrip(" ,").removeprefix("on ") if rest[:1] in (" ", ",") else table.title


def _side(title: str) -> Any:
    return "right" if title in ("rows", "full") else "left"


def _hours(hours: float, scaled: float | None) -> str:
    text = "< 0.1 h" if hours < 0.05 else f"{hours:,.1f} h" if hours < 10 else f"{hours:,.0f} h"
    return text if scaled is None else f"~ {text}"


def _place(table: Table) -> str:
    if not table.figures:
        return table.source.partition(", ")[2]
    title = table.figures[0].title
    return "notes †" if table.where == "notes" else f"{title}, {table.where}"


def _here(facts: dict[str, Any]) -> str:
    if facts["waits_for"]:
        return f"no: {facts['waits_for']}"
    return "yes" if facts["missing_data"] is None else f"no {facts['missing_data']}"


def show_cells(screen: Console, table: Table, scale: str) -> None:
    """What was printed, table by table, and how our settings stand to it."""
    from rich.table import Table as Grid
    from rich.text import Text

    say(screen, table.title, f"Source: {table.source}", *(f"- {caveat}" for caveat in table.caveats))
    for figures in table.figures:
        say(screen, "", f"{figures.title}, {figures.where}: {figures.about}")
        grid = Grid(box=None, pad_edge=False, header_style="bold")
        for at, title in enumerate(("", *figures.columns)):
            grid.add_column(title, justify="right" if at else "left", overflow="fold")
        for name, cells in figures.rows.items():
            grid.add_row(*map(Text, (name, *map(str, cells))))
        screen.print(grid)
    if table.can_run:
        say(screen, "", f"Settings at --scale {scale}:")
        screen.print(_settings(table, scale))


def _settings(table: Table, scale: str) -> Any:
    from rich.table import Table as Grid
    from rich.text import Text

    from attemper.lab.study.reference import Setting

    grid = Grid(box=None, pad_edge=False, header_style="bold")
    for title in ("setting", "here", "printed", "standing"):
        grid.add_column(title, overflow="fold")
    for each in table.settings(scale):
        setting = Setting(**each)
        grid.add_row(*map(Text, (setting.name, setting.here, setting.printed or "not said", setting.standing)))
    return grid
