"""A heat map as inline SVG, in the colours of the page: the stronger the colour, the larger the number."""

from __future__ import annotations

from collections.abc import Sequence

from attemper.lab.report.drawing import figure, percent, series_group
from attemper.lab.report.markup import escape
from attemper.lab.report.scale import finite, number

__all__ = ["heat_map"]

STRONGEST = 0.6
"""Opacity of the largest number: text on it can still be read, in light and in dark."""
WRITTEN = 8
"""Up to so many columns, numbers stand in their cells."""


def heat_map(
    values: Sequence[Sequence[float | None]],
    *,
    title: str,
    rows: Sequence[str],
    x: str = "head",
    y: str = "block",
    note: str = "",
    series: int = 1,
) -> str:
    """A cell per number; rows are named, columns counted from 0. A value that is None leaves its cell empty."""
    known = [value for row in values for each in row if (value := finite(each)) is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    columns = max((len(row) for row in values), default=0)
    tall, top = 26, 20
    bottom, wide = top + tall * len(values), 1 / max(columns, 1)
    parts = [f'<text class="axis start" x="-42" y="10">{escape(y)}</text>']
    for at, row in enumerate(values):
        middle = top + tall * at + tall / 2 + 4
        parts.append(f'<text class="tick end" x="-8" y="{middle:.1f}">{escape(rows[at])}</text>')
        for head, each in enumerate(row):
            value = finite(each)
            strength = 0.0 if value is None else STRONGEST * (0.06 + 0.94 * (value - low) / (high - low or 1.0))
            hint = f"{y} {rows[at]}, {x} {head}: {number(value)}"
            parts.append(
                f'<rect x="{percent(head * wide)}" width="{percent(wide * 0.985)}" y="{top + tall * at}" '
                f'height="{tall - 2}" fill="var(--c)" fill-opacity="{strength:.3f}" stroke="var(--grid)">'
                f"<title>{escape(hint)}</title></rect>"
            )
            if columns <= WRITTEN and value is not None:
                parts.append(
                    f'<text class="name" x="{percent((head + 0.5) * wide)}" y="{middle:.1f}" text-anchor="middle" '
                    f'pointer-events="none">{number(value)}</text>'
                )
    every = -(-columns // 16) or 1
    parts += [
        f'<text class="tick" x="{percent((head + 0.5) * wide)}" y="{bottom + 14}">{head}</text>'
        for head in range(0, columns, every)
    ]
    parts.append(f'<text class="axis" x="50%" y="{bottom + 32}">{escape(x)}</text>')
    told = f"From {number(low, significant=3)}, faint, to {number(high, significant=3)}, strong. {note}".strip()
    body = series_group(series, "".join(parts)) if known else ""
    return figure(title, told, f"{y} by {x}, {told}", "wide", bottom + 40, body)
