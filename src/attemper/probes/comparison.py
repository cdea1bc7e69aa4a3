"""Two diagnoses of one model beside each other: before and after, or with one recipe and with another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from attemper.probes.findings import grown
from attemper.probes.table import HEAD_COLUMNS, Table, aligned, figure


@dataclass(frozen=True)
class BlockRow:
    """The heads of one block under one set of weights."""

    block: int
    label: str
    """Whose weights."""
    values: tuple[float | None, ...]
    """By the columns of the comparison: means over heads, of logits the largest."""


@dataclass(frozen=True)
class Comparison:
    """The same model under several sets of weights, block by block."""

    columns: dict[str, str]
    """Field of a row → its title."""
    rows: tuple[BlockRow, ...]
    tables: dict[str, Table]

    def lines(self) -> list[str]:
        """What differs, in words: flags that one has and another has not, logits that grew."""
        (first, before), *others = self.tables.items()
        found = []
        for label, after in others:
            found += [
                f"{label} beside {first}: {line}" for line in grown(largest_logits(before), largest_logits(after))
            ]
            counts = [{each.kind: len(each.heads) for each in table.findings} for table in (before, after)]
            for kind in dict.fromkeys([*counts[0], *counts[1]]):
                now, then = counts[1].get(kind, 0), counts[0].get(kind, 0)
                if now != then:
                    found.append(f"{kind}: {then} heads with {first}, {now} with {label}.")
        return found

    def __str__(self) -> str:
        cells = [["block", "with", *self.columns.values()]]
        cells += [[str(row.block), row.label, *map(figure, row.values)] for row in self.rows]
        return "\n".join([*aligned(cells), *(f"! {line}" for line in self.lines())])

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "columns": self.columns,
            "rows": [asdict(row) for row in self.rows],
            "differences": self.lines(),
            "tables": {label: table.to_dict() for label, table in self.tables.items()},
        }


def compare_tables(tables: Mapping[str, Table]) -> Comparison:
    """Diagnoses by label, which must be of one model."""
    shown = {
        name: title
        for name, title in HEAD_COLUMNS.items()
        if any(getattr(row, name) is not None for table in tables.values() for row in table.heads)
    }
    blocks = sorted({row.block for table in tables.values() for row in table.heads})
    rows = [
        BlockRow(block, label, tuple(_merged(table, block, name) for name in shown))
        for block in blocks
        for label, table in tables.items()
    ]
    return Comparison(shown, tuple(rows), dict(tables))


def _merged(table: Table, block: int, name: str) -> float | None:
    found = [getattr(row, name) for row in table.heads if row.block == block]
    values = [float(value) for value in found if value is not None]
    if not values:
        return None
    return max(values) if name == "logit_max" else sum(values) / len(values)


def largest_logits(table: Table) -> dict[int, float]:
    """The largest |logit| of every block."""
    found = {block: _merged(table, block, "logit_max") for block in sorted({row.block for row in table.heads})}
    return {block: value for block, value in found.items() if value is not None}
