"""Reports and progress on a screen: with rich on a terminal, as plain text everywhere else."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from attemper.lab.bench.options import Progress
from attemper.lab.bench.results import OpsReport, Report
from attemper.lab.bench.tables import LEGEND, WORDS, Table, about, failures, full_tables

PATIENCE = 5.0
"""Seconds between lines of progress where there is no terminal."""


def show(report: Report, stream: TextIO | None = None) -> None:
    """Write a report to a stream, standard output if not given."""
    out = stream or sys.stdout
    legend = [LEGEND] if isinstance(report, OpsReport) else []
    if _fancy(out):
        _show_rich(report, legend)
        return
    parts = ["\n".join(about(report)), *(plain(table) for table in full_tables(report)), *legend]
    if failed := failures(report):
        parts.append("\n".join(["not measured:", *(f"  {line}" for line in failed)]))
    out.write("\n\n".join(parts) + "\n")


def plain(table: Table) -> str:
    """The table in aligned columns; those without any entry are left out.

    >>> print(plain(Table("costs", ("recipe", "ratio"), (("none", "1.00"), ("blur", "1.10")))))
    costs
    recipe  ratio
    none    1.00
    blur    1.10
    """
    table = table.trimmed()
    lines = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join([table.title, *aligned])


def _fancy(stream: TextIO) -> bool:
    return stream is sys.stdout and stream.isatty() and importlib.util.find_spec("rich") is not None


def _show_rich(report: Report, legend: list[str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    console = Console(highlight=False)
    console.print("\n".join(about(report)), markup=False)
    for table in (table.trimmed() for table in full_tables(report)):
        rich_table = RichTable(title=table.title, title_justify="left")
        for column in table.columns:
            rich_table.add_column(column, justify="left" if column in WORDS else "right")
        for row in table.rows:
            style = "red" if any(cell.endswith("missed") for cell in row) else "bold" if row[0].endswith("*") else None
            rich_table.add_row(*(escape(cell) for cell in row), style=style)
        console.print(rich_table)
    for line in [*legend, *failures(report)]:
        console.print(line, markup=False, style="dim")


@contextlib.contextmanager
def progress_on(title: str) -> Iterator[Progress]:
    """Progress on standard error: a bar on a terminal, a line now and then elsewhere."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=1.0)
            yield lambda share, what: bar.update(task, completed=share, description=escape(f"{title}: {what}"))
        return
    start = last = time.monotonic()

    def line(share: float, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PATIENCE:
            last = now
            print(f"{title}: {100 * share:3.0f} %, {now - start:4.0f} s, {what}", file=sys.stderr, flush=True)  # noqa: T201

    yield line
