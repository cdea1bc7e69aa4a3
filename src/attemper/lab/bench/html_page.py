"""A report as one HTML page: charts of the ratios, the tables, and the figures themselves for programs to read."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from attemper.files import atomic_write
from attemper.lab.bench.results import OpsReport, OpsRow, Report, StepReport, StepRow
from attemper.lab.bench.tables import FAMILIES, LEGEND, WORDS, Table, about, failures, full_tables, number, ratio
from attemper.lab.report.charts import Row, dots
from attemper.lab.report.drawing import Axis
from attemper.lab.report.markup import Cell, Column, data_block, escape, table
from attemper.lab.report.page import Section, page

SERIES = {"stock": 0, "attemper": 1, "flex": 2, "listing": 3}
BAR = "torch's fastest kernel without dropout"


def write_page(report: Report, path: Path) -> None:
    """Write the page of a report, atomically."""
    atomic_write(path, make_page(report))


def make_page(report: Report) -> str:
    """The whole page as HTML, with nothing to fetch from anywhere."""
    what = "The attention operator" if isinstance(report, OpsReport) else "A training step"
    sections = ops_sections(report) if isinstance(report, OpsReport) else step_sections(report)
    if failed := failures(report):
        items = "".join(f"<li>{escape(line)}</li>" for line in failed)
        sections.append(Section(heading="Not measured", body=f"<ul>{items}</ul>"))
    head = "".join(f"<p>{escape(line)}</p>" for line in about(report))
    command = f"<p><code>{escape(report.head.command)}</code></p>" if report.head.command else ""
    head += command + data_block("figures", dataclasses.asdict(report))
    return page(f"{what} on {report.head.machine.device}", sections, head=head)


def ops_sections(report: OpsReport) -> list[Section]:
    """What Attemper takes by itself over all shapes, then every candidate shape by shape."""
    auto = [row for row in report.rows if row.chosen and row.ratio is not None]
    overview = dots(
        [ratio_row(row, f"{row.recipe}, {row.shape.tokens} tokens × {row.shape.width}", 1) for row in auto],
        title="What impl=auto costs",
        axis=Axis(label=f"time ÷ {BAR}", rule=1.0),
        note=key_to(auto),
    )
    sections = [Section(heading="At a glance", lead="Below 1 is faster than torch without dropout.", body=overview)]
    for shown, shape in zip(full_tables(report), dict.fromkeys(row.shape for row in report.rows), strict=True):
        rows = [row for row in report.rows if row.shape == shape and row.ratio is not None]
        chart = dots(
            [
                ratio_row(row, f"{FAMILIES[row.family]} {row.name}, {row.recipe}", SERIES[row.family])
                for row in sorted(rows, key=lambda row: row.ratio or 0.0)
            ],
            title=f"Forward and backward at {shape}",
            axis=Axis(label=f"time ÷ {BAR}, logarithmic", rule=1.0, log=True),
            note=key_to(rows),
        )
        body = f"{chart}{html_table(shown)}<p>{LEGEND}</p>"
        sections.append(Section(heading=f"{shape.tokens} tokens × {shape.width}", body=body))
    return sections


def step_sections(report: StepReport) -> list[Section]:
    """One section per mode."""
    sections = []
    for shown, mode in zip(full_tables(report), dict.fromkeys(row.mode for row in report.rows), strict=True):
        rows = [row for row in report.rows if row.mode == mode and row.ratio is not None]
        chart = dots(
            [ratio_row(row, row.recipe, 0 if row.recipe.startswith("none") else 1) for row in rows],
            title=f"Training step, {mode}",
            axis=Axis(label="time ÷ the same step without any method", rule=1.0),
            note=key_to(rows),
        )
        sections.append(Section(heading=mode.capitalize(), body=chart + html_table(shown)))
    return sections


def ratio_row(row: OpsRow | StepRow, label: str, series: int) -> Row:
    """One line of a chart of ratios."""
    note = f"{ratio(row.ratio)}, {number(row.milliseconds)} ms"
    return Row(label=label, series=series, value=row.ratio, low=row.low, high=row.high, other=row.target, note=note)


def key_to(rows: Sequence[OpsRow | StepRow]) -> str:
    """What the parts of a chart of ratios mean, as far as they are there."""
    parts = ["line: 95 % interval"] if any(row.low is not None for row in rows) else []
    return "; ".join([*parts, "hollow: the target"] if any(row.target is not None for row in rows) else parts)


def html_table(shown: Table) -> str:
    """A table that can be sorted by its columns."""
    shown = shown.trimmed()
    columns = [Column(title or "candidate", numeric=title not in WORDS, rising=True) for title in shown.columns]
    rows = [[Cell(escape(cell), sort_key(cell)) for cell in row] for row in shown.rows]
    return table(columns, rows, caption=shown.title, sortable=True)


def sort_key(cell: str) -> float | str | None:
    """The number at the start of a cell, or its text."""
    try:
        return float(cell.removeprefix("≤ ").split(" ")[0])
    except ValueError:
        return cell or None
