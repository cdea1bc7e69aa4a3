"""Writes the figures of `results/` into the pages that show them, between markers; a test fails where they differ.

    python benchmarks/figures.py

A marker names what to show of which files: <!-- figures: summary ops-cpu.json --> … <!-- /figures -->. Of several files
each adds what those before it have not measured.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

from attemper.lab.bench.html_page import measured
from attemper.lab.bench.results import OpsRow, Report, StepRow, load
from attemper.lab.bench.tables import about, failures, full_tables, markdown, summary, tally, targets

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "docs" / "benchmarks.md"]
MARKED = re.compile(r"(<!-- figures: (\w+) (\S+(?: \S+)*) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def full(report: Report) -> str:
    return "\n\n".join(f"**{table.title}**\n\n{markdown(table)}" for table in full_tables(report))


KINDS = {
    "about": lambda report: bullets(about(report)),
    "summary": lambda report: markdown(summary(report)),
    "targets": lambda report: f"{tally(report)}\n\n{markdown(targets(report))}",
    "measured": lambda report: f"{tally(report)}\n\n{markdown(measured(targets(report)))}",
    "full": full,
    "failures": lambda report: bullets(failures(report)),
}


def together(one: Report, other: Report) -> Report:
    """Two reports of one benchmark as one: of each shape, or recipe in a mode, those rows that have figures first."""
    kinds = [(report.benchmark, report.head.machine.device, report.head.dtype) for report in (one, other)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{kinds[0]} and {kinds[1]} do not go into one table")
    measured = {key(row) for row in one.rows if row.milliseconds is not None}
    added = {key(row) for row in other.rows if row.milliseconds is not None} - measured
    known = {key(row) for row in one.rows} - added
    rows = [row for row in one.rows if key(row) in known] + [row for row in other.rows if key(row) not in known]
    return dataclasses.replace(one, rows=tuple(rows))


def key(row: OpsRow | StepRow) -> object:
    """What a row is part of: candidates at one shape are compared with each other, so they stay together."""
    return row.shape if isinstance(row, OpsRow) else (row.recipe, row.mode)


def fill(page: str, results: Path = RESULTS) -> str:
    """The page with the figures of the result files between its markers."""

    def figures(match: re.Match[str]) -> str:
        start, kind, names, end = match.groups()
        report = functools.reduce(together, (load(results / name) for name in names.split()))
        return f"{start}\n{KINDS[kind](report)}\n\n{end}"

    return MARKED.sub(figures, page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
