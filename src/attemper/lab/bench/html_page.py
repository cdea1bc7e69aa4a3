"""A report as one HTML page: charts of the ratios, the tables, and the figures themselves for programs to read."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from attemper.files import atomic_write
from attemper.lab.bench.results import LoopReport, LoopRow, OpsReport, OpsRow, Report, StepReport, StepRow
from attemper.lab.bench.tables import (
    FAMILIES,
    LEGEND,
    WORDS,
    Table,
    about,
    cell_name,
    failures,
    full_tables,
    number,
    ratio,
    tally,
    targets,
)
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
    what, sections = contents(report)
    if failed := failures(report):
        items = "".join(f"<li>{escape(line)}</li>" for line in failed)
        sections.append(Section(heading="Not measured", body=f"<ul>{items}</ul>"))
    head = "".join(f"<p>{escape(line)}</p>" for line in about(report))
    command = f"<p><code>{escape(report.head.command)}</code></p>" if report.head.command else ""
    head += command + data_block("figures", dataclasses.asdict(report))
    return page(f"{what} on {report.head.machine.device}", sections, head=head)


def contents(report: Report) -> tuple[str, list[Section]]:
    """What a report is about, and its sections."""
    if isinstance(report, OpsReport):
        return "The attention operator", ops_sections(report)
    if isinstance(report, LoopReport):
        return "Training loops", loop_sections(report)
    return "A training step", step_sections(report)


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


def loop_sections(report: LoopReport) -> list[Section]:
    """The targets, then one section per cell, with steps and the host's part of them in one chart."""
    sections = []
    if any(row.target is not None for row in report.rows):
        sections.append(Section(heading="Targets", lead=tally(report), body=html_table(measured(targets(report)))))
    for shown, cell in zip(full_tables(report), dict.fromkeys(row.cell for row in report.rows), strict=True):
        rows = [row for row in report.rows if row.cell == cell and row.ratio is not None]
        chart = dots(
            [line for row in rows for line in (ratio_row(row, row.recipe, 1), host_row(row))],
            title=f"Training loop, {cell_name(cell)}",
            axis=Axis(label="time ÷ the same loop without any method", rule=1.0),
            note=key_to(rows),
        )
        sections.append(Section(heading=cell_name(cell), body=chart + html_table(shown)))
    return sections


def measured(shown: Table) -> Table:
    """A table of targets without those that were not measured."""
    return Table(shown.title, shown.columns, tuple(row for row in shown.rows if not row[-1].endswith("not measured")))


def host_row(row: LoopRow) -> Row:
    """One line of a chart of ratios: the time of the host."""
    note = f"{ratio(row.host_ratio)}, {number(row.host_milliseconds)} ms"
    return Row(label="… on the host", series=0, value=row.host_ratio, low=None, high=None, other=None, note=note)


def ratio_row(row: OpsRow | StepRow | LoopRow, label: str, series: int) -> Row:
    """One line of a chart of ratios."""
    note = f"{ratio(row.ratio)}, {number(row.milliseconds)} ms"
    target = None if isinstance(row, LoopRow) and row.aimed is not row.ratio else row.target
    return Row(label=label, series=series, value=row.ratio, low=row.low, high=row.high, other=target, note=note)


def key_to(rows: Sequence[OpsRow | StepRow | LoopRow]) -> str:
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
