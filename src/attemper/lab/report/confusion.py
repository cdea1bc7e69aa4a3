"""Class by class: what the baseline and the best recipe get right, and what they take for something else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attemper.lab.report.charts import Row, dots
from attemper.lab.report.drawing import Axis, figure, percent, series_group
from attemper.lab.report.entries import Entry
from attemper.lab.report.heat import TALL, HeatCell, HeatMap, svg_rows
from attemper.lab.report.markup import Cell, Column, escape, table
from attemper.lab.report.page import Section
from attemper.lab.report.scale import finite, number, shorten, signed

WRITTEN = 12
"""Up to so many classes, numbers stand in their cells."""
LONGEST = 13
"""Letters of a class's name beside the matrix."""
UPRIGHT = 2
"""Names of at most so many letters need no turning below their columns."""


@dataclass(frozen=True)
class Confusion:
    """The confusion matrix of a recipe over all of its seeds."""

    entry: Entry
    names: list[str]
    counts: list[list[int]]
    """How often the class of the row was taken for the class of the column."""

    def items(self, row: int) -> int:
        """How many samples of a class the test set has; every seed was tested on the same."""
        total, runs = sum(self.counts[row]), int((self.entry.raw.get("details") or {}).get("runs") or 1)
        return total // runs if total % runs == 0 else total

    def share(self, row: int, column: int) -> float | None:
        """Per cent of a class; None where the test set has nothing of it."""
        total = sum(self.counts[row])
        return 100 * self.counts[row][column] / total if total else None

    def mistake(self, row: int) -> str:
        """What a class is most often taken for, with how often."""
        others = [(count, at) for at, count in enumerate(self.counts[row]) if at != row]
        most, at = max(others, key=lambda other: other[0], default=(0, 0))
        return f"{self.names[at]}, {number(self.share(row, at), 0)} %" if most else "–"


def classes(ranked: Sequence[Entry]) -> Section | None:
    """Accuracy of every class and confusion matrices, of the baseline and of the best other recipe."""
    known = [found for entry in ranked if (found := _read(entry)) is not None]
    shown = [next((each for each in known if each.entry.baseline), None)]
    shown += [next((each for each in known if not each.entry.baseline), None)]
    pair = [each for each in shown if each is not None]
    if not pair or any(each.names != pair[0].names for each in pair):
        return None
    matrices = "".join(confusion_matrix(each) for each in pair)
    return Section(
        heading="Classes",
        lead=(
            "The test set class by class, over all seeds of a recipe: the baseline, and the best of the others. One "
            "class has few samples, so that differences between classes are less sure than those of the whole."
        ),
        body=f'<div class="pair">{matrices}</div>{_by_class(pair)}',
    )


def _read(entry: Entry) -> Confusion | None:
    """What a summary holds, if it is a matrix with a name for every class."""
    given = entry.raw.get("details") or {}
    names, counts = [str(name) for name in given.get("classes") or ()], given.get("confusion") or []
    square = len(counts) == len(names) and all(len(row) == len(names) for row in counts)
    if not names or not square or any(finite(count) is None for row in counts for count in row):
        return None
    return Confusion(entry, names, [[int(count) for count in row] for row in counts])


def _by_class(pair: Sequence[Confusion]) -> str:
    """A dot plot and a table."""
    first, last = pair[0], pair[-1]
    rows, cells = [], []
    for at, name in enumerate(first.names):
        before, after = first.share(at, at), last.share(at, at)
        change = None if before is None or after is None else after - before
        two = len(pair) > 1
        rows.append(
            Row(
                label=name,
                series=last.entry.series,
                value=after,
                other=before if two else None,
                low=min(before, after) if two and before is not None and after is not None else None,
                high=max(before, after) if two and before is not None and after is not None else None,
                note=f"{number(after, 1)} %" + (f" ({signed(change, 1)})" if two and change is not None else ""),
            )
        )
        figures = [Cell(number(each.share(at, at), 1), each.share(at, at)) for each in pair]
        mistakes = [Cell(escape(each.mistake(at))) for each in pair]
        cells.append([Cell(escape(name), name), Cell(f"{first.items(at):,}", first.items(at)), *figures, *mistakes])
    columns = [Column("class"), Column("test items", numeric=True, hint="the same for every seed")]
    columns += [Column(f"{each.entry.name}, right, %", numeric=True) for each in pair]
    columns += [Column(f"{each.entry.name}, most often taken for") for each in pair]
    hollow = f"Filled: {last.entry.name}. Hollow: {first.entry.name}." if len(pair) > 1 else ""
    chart = dots(rows, title="Accuracy by class", axis=Axis(label="right, % of the class"), note=hollow)
    return chart + table(columns, cells, caption="Accuracy by class", sortable=True, sorted_by=0)


def heat_of_shares(confusion: Confusion) -> HeatMap:
    """A cell per pair of classes: in per cent of the row's class."""
    names = confusion.names

    def cell(row: int, column: int) -> HeatCell:
        share, times = confusion.share(row, column), confusion.counts[row][column]
        hint = f"{names[row]} taken for {names[column]}: {times} of {sum(confusion.counts[row])}, {number(share, 1)} %"
        # The root lifts mistakes, which are rare each, above what the eye can see.
        strength = math.sqrt((share or 0.0) / 100)
        return HeatCell(strength, number(share, 0) if times and len(names) <= WRITTEN else "", hint)

    every = range(len(names))
    return HeatMap(
        [shorten(name, LONGEST) for name in names], [[cell(row, column) for column in every] for row in every]
    )


def _below_columns(names: Sequence[str]) -> tuple[str, int, int]:
    """How names stand below their columns: class and turn of the text, and the pixels that they need."""
    if len(names) > WRITTEN:
        return "tick end", -65, 100
    if all(len(name) <= UPRIGHT for name in names):
        return "tick", 0, 28
    return "tick end", -40, 76


def confusion_matrix(confusion: Confusion) -> str:
    """The shares as a heat map, with the names of the classes at both sides."""
    heat, count = heat_of_shares(confusion), len(confusion.names)
    bottom = TALL * count
    parts = [svg_rows(heat, drop=3)]
    kind, turn, below = _below_columns(heat.names)
    for column, name in enumerate(heat.names):
        # An svg of its own, since a turned text cannot stand at a place given in per cent.
        parts.append(
            f'<svg x="{percent((column + 0.5) / count)}" y="{bottom + 12}" overflow="visible">'
            f'<text class="{kind}" transform="rotate({turn})">{escape(name)}</text></svg>'
        )
    right = sum(confusion.counts[at][at] for at in range(count))
    total = sum(map(sum, confusion.counts))
    title = f"Confusion, {confusion.entry.name}"
    note = "Rows: the class of a sample. Columns: what it was taken for. In per cent of the row."
    spoken = f"{right} of {total} samples on the diagonal"
    return figure(title, note, spoken, "named", bottom + below, series_group(confusion.entry.series, "".join(parts)))
