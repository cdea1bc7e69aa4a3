"""Reports as tables of text, which the screen, the documentation and the page show alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attemper.lab.bench.results import LoopReport, LoopRow, OpsRow, Report, Shape, StepReport, StepRow
from attemper.lab.bench.targets import LOOP, OPS, STEP
from attemper.lab.counting import counted

CLOCKS = {"wall": "wall time", "cpu": "processor time", "cuda events": "CUDA events"}
WORDS = ("", "regularised by", "recipe", "cell")
"""Columns that hold words, not numbers."""
LEGEND = "* what impl=auto takes"
FAMILIES = {"stock": "torch", "flex": "FlexAttention", "listing": "paper's listing", "attemper": "attemper"}


@dataclass(frozen=True)
class Table:
    """Cells of text under headings."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def trimmed(self) -> Table:
        """The table without the columns that have no entry."""
        used = [at for at, _ in enumerate(self.columns) if any(row[at] for row in self.rows)]
        rows = tuple(tuple(row[at] for at in used) for row in self.rows)
        return Table(self.title, tuple(self.columns[at] for at in used), rows)


def about(report: Report) -> list[str]:
    """What the figures were taken on and how, in a few lines."""
    head = report.head
    machine = head.machine
    lines = [
        f"{machine.device}, {head.dtype}, {head.date}",
        ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
    ]
    if isinstance(report, StepReport):
        lines.append(f"{report.model}; batch {report.batch}; forward, loss, backward and optimiser")
    elif isinstance(report, LoopReport):
        lines += [f"{name}: {what}" for name, what in report.models.items()]
    elif report.ceiling_tflops is not None:
        lines.append(f"a large matrix product reaches {number(report.ceiling_tflops)} TFLOP/s")
    threads = f", {counted(machine.threads, 'CPU thread')}" if machine.threads else ""
    lines.append(f"medians over {head.rounds} rounds, {CLOCKS.get(head.clock, head.clock)}{threads}")
    return [*lines, head.note] if head.note else lines


def full_tables(report: Report) -> list[Table]:
    """Everything that was measured: one table per shape, or per mode."""
    if isinstance(report, LoopReport):
        cells = dict.fromkeys(row.cell for row in report.rows)
        return [loop_table(cell, [row for row in report.rows if row.cell == cell]) for cell in cells]
    if isinstance(report, StepReport):
        modes = dict.fromkeys(row.mode for row in report.rows)
        return [step_table(mode, [row for row in report.rows if row.mode == mode]) for mode in modes]
    shapes = dict.fromkeys(row.shape for row in report.rows)
    return [ops_table(shape, [row for row in report.rows if row.shape == shape]) for shape in shapes]


def ops_table(shape: Shape, rows: list[OpsRow]) -> Table:
    """The candidates at one shape, the fastest first."""
    measured = [row for row in rows if row.milliseconds is not None]
    columns = ("", "regularised by", "ms", "ratio", "95 %", "target", "peak MiB", "TFLOP/s", "of ceiling", "error")
    cells = [
        (
            f"{FAMILIES[row.family]} {row.name}" + (" *" if row.chosen else ""),
            row.recipe,
            number(row.milliseconds),
            ratio(row.ratio),
            span(row.low, row.high),
            against(row.ratio, row.target),
            number(row.peak_mib),
            number(row.tflops),
            "" if row.ceiling_share is None else f"{100 * row.ceiling_share:.0f} %",
            "" if row.error is None else f"{row.error:.1e}",
        )
        for row in sorted(measured, key=lambda row: row.milliseconds or 0.0)
    ]
    return Table(f"batch, heads, tokens, head width = {shape}", columns, tuple(cells))


def step_table(mode: str, rows: list[StepRow]) -> Table:
    """The recipes in one mode, in the order in which they were given."""
    columns = ("recipe", "ms", "ratio", "95 %", "target", "images/s", "peak MiB", "memory ratio")
    cells = [
        (
            row.recipe,
            number(row.milliseconds),
            ratio(row.ratio),
            span(row.low, row.high),
            against(row.ratio, row.target),
            number(row.samples_per_s),
            number(row.peak_mib),
            ratio(row.memory_ratio),
        )
        for row in rows
        if row.milliseconds is not None
    ]
    return Table(f"{mode} training step", columns, tuple(cells))


def loop_table(cell: tuple[str, int, str], rows: list[LoopRow]) -> Table:
    """The recipes in one cell, in the order in which they were given."""
    columns = (
        "recipe", "ms", "ratio", "95 %", "target", "host ms", "host ratio", "peak MiB", "memory ratio", "first step s",
        "first ratio", "graphs given up",
    )  # fmt: skip
    cells = [
        (
            row.recipe,
            number(row.milliseconds),
            ratio(row.ratio),
            span(row.low, row.high),
            against(row.aimed, row.target),
            number(row.host_milliseconds),
            ratio(row.host_ratio),
            number(row.peak_mib),
            ratio(row.memory_ratio),
            number(row.first_seconds),
            ratio(row.first_ratio),
            "" if row.graph_skips is None else str(row.graph_skips),
        )
        for row in rows
        if row.milliseconds is not None
    ]
    return Table(cell_name(cell), columns, tuple(cells))


def cell_name(cell: tuple[str, int, str]) -> str:
    """Such as 'vit-s, batch 8, eager'."""
    model, batch, mode = cell
    return f"{model}, batch {batch}, {mode}"


def failures(report: Report) -> list[str]:
    """What could not be measured and why; recipes that fail alike share a line."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for row in report.rows:
        if row.failure is not None:
            who = _who(row)
            places.setdefault((who, row.recipe, row.failure), []).append(_place(row))
    everywhere = list(dict.fromkeys(map(_place, report.rows)))
    recipes: dict[tuple[str, str, str], list[str]] = {}
    for (who, recipe, why), where in places.items():
        there = "" if where == everywhere else f" at {' and '.join(filter(None, where))}"
        recipes.setdefault((who, there if any(where) else "", why), []).append(recipe)
    return [f"{who}, {' / '.join(names)}{there}: {why}" for (who, there, why), names in recipes.items()]


def _who(row: OpsRow | StepRow | LoopRow) -> str:
    if isinstance(row, OpsRow):
        return f"{FAMILIES[row.family]} {row.name}"
    return cell_name(row.cell) if isinstance(row, LoopRow) else row.mode


def _place(row: OpsRow | StepRow | LoopRow) -> str:
    return f"{row.shape.tokens}x{row.shape.width}" if isinstance(row, OpsRow) else ""


def summary(report: Report) -> Table:
    """What a user of Attemper gets: for `ops`, per shape, torch's fastest and what `impl="auto"` takes per recipe."""
    if isinstance(report, LoopReport):
        return loop_summary(report)
    if isinstance(report, StepReport):
        return step_summary(report)
    columns = (
        "batch, heads, tokens, head width",
        "torch's fastest",
        "with dropout",
        "the paper's listing",
        "recipe",
        "Attemper",
        "ratio",
        "95 %",
        "peak MiB",
    )
    cells = []
    for shape in dict.fromkeys(row.shape for row in report.rows):
        rows = [row for row in report.rows if row.shape == shape and row.milliseconds is not None]
        bar = fastest(row for row in rows if row.family == "stock" and row.recipe == "none")
        dropout = fastest(row for row in rows if row.family == "stock" and row.recipe != "none")
        listing = fastest(row for row in rows if row.family == "listing")
        others = (str(shape), named(bar), named(dropout), named(listing))
        for row in (row for row in rows if row.chosen):
            figures = (named(row), ratio(row.ratio), span(row.low, row.high), number(row.peak_mib))
            cells.append((*others, f"`{row.recipe}`", *figures))
            others = ("", "", "", "")  # said once per shape
    return Table("the operator", columns, tuple(cells))


def step_summary(report: StepReport) -> Table:
    """The modes side by side."""
    modes = list(dict.fromkeys(row.mode for row in report.rows))
    columns = ("recipe", *(f"{mode}: {what}" for mode in modes for what in ("step", "ratio", "95 %", "memory ratio")))
    cells = []
    for recipe in dict.fromkeys(row.recipe for row in report.rows):
        found = {row.mode: row for row in report.rows if row.recipe == recipe}
        line: list[str] = [recipe if recipe.startswith("none") else f"`{recipe}`"]
        for mode in modes:
            row = found.get(mode)
            if row is None or row.milliseconds is None:
                line += ["–", "–", "–", "–"]
            else:
                line += [f"{number(row.milliseconds)} ms", ratio(row.ratio), span(row.low, row.high)]
                line.append(ratio(row.memory_ratio))
        cells.append(tuple(line))
    return Table("training steps", columns, tuple(cells))


def loop_summary(report: LoopReport) -> Table:
    """Cells down, recipes across: the ratio of a step, and that of the host where it is another."""
    recipes = [recipe for recipe in dict.fromkeys(row.recipe for row in report.rows) if recipe != "none"]
    names = (recipe if recipe.startswith("none") else f"`{recipe}`" for recipe in recipes)
    cells = []
    for cell in dict.fromkeys(row.cell for row in report.rows):
        found = {row.recipe: row for row in report.rows if row.cell == cell and row.milliseconds is not None}
        none = found.get("none")
        line = [cell_name(cell), "–" if none is None else f"{number(none.milliseconds)} ms"]
        for row in map(found.get, recipes):
            line.append("–" if row is None else f"{ratio(row.ratio)} (host {ratio(row.host_ratio)})")
        cells.append(tuple(line))
    return Table("training loops", ("cell", "none", *names), tuple(cells))


def loop_targets(report: LoopReport) -> Table:
    """Every target of a loop; of a single call, that of the host."""
    found = {(row.cell, row.recipe): row.aimed for row in report.rows if row.target is not None}
    lines = [
        (cell_name(cell), f"`{recipe}`", verdict(found.get((cell, recipe)), target))
        for cell, aims in LOOP.items()
        for recipe, target in aims.items()
    ]
    return Table("targets of training loops", ("cell", "recipe", "ratio"), tuple(lines))


def targets(report: Report) -> Table:
    """Every target, and what was measured of it: met, missed, or not measured on the machine that it is for."""
    if isinstance(report, LoopReport):
        return loop_targets(report)
    if isinstance(report, StepReport):
        steps = {row.recipe: row.ratio for row in report.rows if row.target is not None}
        lines = [(f"`{recipe}`", verdict(steps.get(recipe), target)) for recipe, target in STEP.items()]
        return Table("targets of a compiled step", ("recipe", "ratio"), tuple(lines))
    ratios = {
        (row.recipe, row.shape.tokens, row.shape.width): row.ratio for row in report.rows if row.target is not None
    }
    cells = [
        (f"{tokens} ({width})", *(verdict(ratios.get((r, tokens, width)), OPS[r][tokens, width]) for r in OPS))
        for tokens, width in next(iter(OPS.values()))
    ]
    columns = ("tokens (head width)", *(f"`{recipe}`" for recipe in OPS))
    return Table("targets of the operator", columns, tuple(cells))


def tally(report: Report) -> str:
    """How many of the targets are met."""
    words = [cell.split(", ")[-1] for cells in targets(report).rows for cell in cells[1:]]
    met, missed, unknown = (words.count(word) for word in ("met", "missed", "not measured"))
    return f"Of {met + missed + unknown} targets: {met} met, {missed} missed, {unknown} not measured."


def verdict(value: float | None, target: float) -> str:
    """Such as '0.89 ≤ 0.90, met'; with one more digit where a target is missed by less than two can show."""
    if value is None:
        return f"? ≤ {target:.2f}, not measured"
    if value <= target:
        return f"{ratio(value)} ≤ {target:.2f}, met"
    shown = f"{value:.3f}" if ratio(value) == ratio(target) else ratio(value)
    return f"{shown} > {target:.2f}, missed"


def against(value: float | None, target: float | None) -> str:
    """Such as '≤ 0.90 met'."""
    if value is None or target is None:
        return ""
    return f"≤ {target:.2f} {'met' if value <= target else 'missed'}"


def fastest(rows: Iterable[OpsRow]) -> OpsRow | None:
    """The row with the shortest time."""
    return min(rows, key=lambda row: row.milliseconds or 0.0, default=None)


def named(row: OpsRow | None) -> str:
    """Such as '0.42 ms (cudnn)'."""
    return "–" if row is None else f"{number(row.milliseconds)} ms ({row.name})"


def number(value: float | None) -> str:
    """Three digits that count, and no exponent.

    >>> number(0.41949), number(15408.2), number(None)
    ('0.419', '15408', '–')
    """
    if value is None:
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def ratio(value: float | None) -> str:
    """A ratio to two digits."""
    return "–" if value is None else f"{value:.2f}"


def span(low: float | None, high: float | None) -> str:
    """An interval."""
    return "" if low is None or high is None else f"{low:.2f} … {high:.2f}"


def markdown(table: Table) -> str:
    """The table as the documentation shows it; columns without any entry are left out."""
    table = table.trimmed()
    lines = [table.columns, ("---",) * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
