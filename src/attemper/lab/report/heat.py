"""Heat maps: the cells, how strong each is and in which colour. Drawn here as SVG, and in `png` as PNG."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attemper.lab.report.drawing import figure, percent, series_group
from attemper.lab.report.markup import escape
from attemper.lab.report.scale import finite, number

STRONGEST = 0.6
"""Opacity of the strongest cell on the page: text on it can still be read, in light and in dark."""
WRITTEN = 8
"""Up to so many columns, numbers stand in their cells."""
MOST_TICKS = 16
TALL = 26
"""Pixels from one row to the next on the page."""

# Dark blue over green to yellow, light growing evenly: larger is lighter, in print and for every eye.
RAMP = np.array(
    [[35, 20, 75], [52, 60, 120], [42, 98, 135], [32, 130, 135], [55, 162, 118], [130, 190, 80], [235, 222, 70]],
    dtype=float,
)


@dataclass(frozen=True)
class HeatCell:
    """One number of a heat map."""

    strength: float | None
    """From 0 to 1; None where there is no number."""
    text: str = ""
    """Stands in the cell."""
    hint: str = ""
    """The tooltip."""


@dataclass(frozen=True)
class HeatMap:
    """Rows of cells. low, high: the numbers at strength 0 and 1."""

    names: Sequence[str]
    """Of the rows."""
    rows: Sequence[Sequence[HeatCell]]
    low: float = 0.0
    high: float = 1.0

    @property
    def columns(self) -> int:
        return max((len(row) for row in self.rows), default=0)

    @property
    def ticks(self) -> range:
        """The columns whose numbers there is room for."""
        return range(0, self.columns, -(-self.columns // MOST_TICKS) or 1)

    @property
    def empty(self) -> bool:
        return all(cell.strength is None for row in self.rows for cell in row)


Bounds = tuple[float, float]


def heat_of(
    values: Sequence[Sequence[float | None]], names: Sequence[str], *, x: str, y: str, bounds: Bounds | None = None
) -> HeatMap:
    """A heat map; None and whatever is not finite leave their cells empty.

    bounds: the numbers at its two ends, wherever the values lie; None: the smallest of them and the largest.
    """
    found = [[finite(value) for value in row] for row in values]
    known = [value for row in found for value in row if value is not None]
    low, high = bounds or ((min(known), max(known)) if known else (0.0, 1.0))
    written = max(map(len, found), default=0) <= WRITTEN

    def cell(value: float | None, name: str, column: int) -> HeatCell:
        hint = f"{y} {name}, {x} {column}: {number(value)}"
        if value is None:
            return HeatCell(None, hint=hint)
        strength = min(max((value - low) / (high - low or 1.0), 0.0), 1.0)
        return HeatCell(strength, number(value) if written else "", hint)

    rows = [
        [cell(value, name, column) for column, value in enumerate(row)] for name, row in zip(names, found, strict=True)
    ]
    return HeatMap(names, rows, low, high)


def colours(strengths: np.ndarray) -> np.ndarray:
    """uint8 (…, 3) for numbers from 0 to 1."""
    place = np.clip(strengths, 0.0, 1.0) * (len(RAMP) - 1)
    low = np.minimum(place.astype(int), len(RAMP) - 2)
    part = (place - low)[..., None]
    mixed: np.ndarray = (RAMP[low] * (1 - part) + RAMP[low + 1] * part).round().astype(np.uint8)
    return mixed


# ------------------------------------------------------------------------------------------------------------ as SVG
def svg_rows(heat: HeatMap, *, top: int = 0, drop: int = 4, faintest: float = 0.0) -> str:
    """The cells in the colour of a series, the stronger the more opaque, with the names of the rows at their left.

    drop: pixels from the middle of a row to the base line of its text. faintest: share of the opacity
        at strength 0.
    """
    parts, wide = [], 1 / max(heat.columns, 1)
    for at, row in enumerate(heat.rows):
        above = top + TALL * at
        middle = above + TALL / 2 + drop
        parts.append(f'<text class="tick end" x="-8" y="{middle:.1f}">{escape(heat.names[at])}</text>')
        for column, cell in enumerate(row):
            opacity = 0.0 if cell.strength is None else STRONGEST * (faintest + (1 - faintest) * cell.strength)
            parts.append(
                f'<rect x="{percent(column * wide)}" width="{percent(wide * 0.985)}" y="{above}" '
                f'height="{TALL - 2}" fill="var(--c)" fill-opacity="{opacity:.3f}" stroke="var(--grid)">'
                f"<title>{escape(cell.hint)}</title></rect>"
            )
            if cell.text:
                parts.append(
                    f'<text class="name" x="{percent((column + 0.5) * wide)}" y="{middle:.1f}" text-anchor="middle" '
                    f'pointer-events="none">{cell.text}</text>'
                )
    return "".join(parts)


def heat_map(
    values: Sequence[Sequence[float | None]],
    *,
    title: str,
    rows: Sequence[str],
    x: str = "head",
    y: str = "block",
    note: str = "",
    series: int = 1,
    bounds: Bounds | None = None,
) -> str:
    """A cell per number; rows are named, columns counted from 0. bounds: see `heat_of`."""
    heat, top = heat_of(values, rows, x=x, y=y, bounds=bounds), 20
    bottom, wide = top + TALL * len(values), 1 / max(heat.columns, 1)
    ticks = "".join(
        f'<text class="tick" x="{percent((column + 0.5) * wide)}" y="{bottom + 14}">{column}</text>'
        for column in heat.ticks
    )
    body = (
        f'<text class="axis start" x="-42" y="10">{escape(y)}</text>{svg_rows(heat, top=top, faintest=0.06)}{ticks}'
        f'<text class="axis" x="50%" y="{bottom + 32}">{escape(x)}</text>'
    )
    ends = f"From {number(heat.low, significant=3)}, faint, to {number(heat.high, significant=3)}, strong."
    caption = f"{ends} {note}".strip()
    return figure(
        title, caption, f"{y} by {x}, {caption}", "wide", bottom + 40, "" if heat.empty else series_group(series, body)
    )
