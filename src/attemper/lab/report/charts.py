"""Small charts as inline SVG: dots with intervals, lines with bands, a scatter, bars.

Each function takes plain data and gives a `<figure>` for `attemper.lab.report.page`, whose style sheet colours it.

>>> rows = [Row(label="none", value=1.0), Row(label="dropkey(0.1)", series=1, value=1.02, low=1.01, high=1.04)]
>>> dots(rows, title="Step time", axis=Axis(label="ratio to the baseline", rule=1.0))[:22]
'<figure class="chart">'
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attemper.lab.report.drawing import Axis, figure, grid, height_of, level, mark, percent, series_group, upright
from attemper.lab.report.markup import escape
from attemper.lab.report.scale import Scale, finite, make_scale, number, shorten

LINES_OF_TEXT = 30
"""Places along x at which a line chart shows its values: enough to find one, few enough for a small page."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a dot plot: a number, its interval, the single values behind it, perhaps another to compare with."""

    label: str
    series: int = 0
    value: float | None = None
    low: float | None = None
    high: float | None = None
    points: Sequence[tuple[float | None, str]] = ()
    """Single values, each with the text that is shown when it is pointed at."""
    other: float | None = None
    """A second number, drawn hollow."""
    other_low: float | None = None
    other_high: float | None = None
    note: str = ""
    """The figures as text, at the right end."""

    @property
    def numbers(self) -> list[float | None]:
        """The numbers that the row shows, without their intervals."""
        return [self.value, self.other, *(value for value, _ in self.points)]

    @property
    def ends(self) -> list[float | None]:
        """The ends of its intervals."""
        return [self.low, self.high, self.other_low, self.other_high]


def dots(rows: Sequence[Row], *, title: str, axis: Axis, note: str = "") -> str:
    """A dot plot with intervals. Labels stand above their rows, so that long ones find room on a phone.

    note: what the chart's parts mean, below its title.

    An interval far wider than the numbers lie apart, as two seeds give, goes to the edge of the chart: drawn whole, it
    would press everything else together.
    """
    tall = 46
    numbers = [value for row in rows for value in row.numbers]
    scale = axis.scale(numbers + _within_reach([value for row in rows for value in row.ends], numbers, axis))
    bottom = tall * len(rows)
    spoken = "; ".join(f"{row.label}: {row.note or number(row.value)}" for row in rows)
    body = ""
    if any(finite(value) is not None for value in numbers):
        drawn = (_dot_row(row, scale, tall * at) for at, row in enumerate(rows))
        body = upright(scale, axis, 0, bottom) + "".join(drawn)
    return figure(title, note, f"{axis.label}. {spoken}", "dots", bottom + 42, body)


def _within_reach(ends: list[float | None], numbers: list[float | None], axis: Axis) -> list[float | None]:
    """The ends of intervals, those that are too far out brought back to as far as the axis should go."""
    known = [value for value in map(finite, [*numbers, axis.rule, *axis.include]) if value is not None]
    reach = 1.5 * (max(known, default=0.0) - min(known, default=0.0))
    if not reach:
        return ends
    low, high = min(known) - reach, max(known) + reach
    return [None if finite(end) is None else min(max(float(end or 0.0), low), high) for end in ends]


def _dot_row(row: Row, scale: Scale, top: int) -> str:
    middle = top + 29
    hint = f"<title>{escape(row.label)}{': ' if row.note else ''}{escape(row.note)}</title>"
    words = (
        f"<g>{hint}{_label(row.label, 46 - len(row.note), top + 15)}"
        f'<text class="value" x="100%" y="{top + 15}">{escape(row.note)}</text></g>'
    )
    shapes = [_interval(scale, row.low, row.high, middle, "interval")]
    shapes.append(_interval(scale, row.other_low, row.other_high, middle + (9 if row.other is None else 0), "whisker"))
    for value, text in row.points:
        if (known := finite(value)) is not None:
            place = percent(scale.at(known))
            shapes.append(
                f'<circle class="single" cx="{place}" cy="{middle + 9}" r="2.7"><title>{escape(text)}</title></circle>'
            )
    for value, hollow in ((row.other, True), (row.value, False)):
        if (known := finite(value)) is not None:
            shapes.append(f"<g>{hint}{mark(row.series, percent(scale.at(known)), middle, hollow=hollow)}</g>")
    return words + series_group(row.series, "".join(shapes))


def _label(text: str, room: int, y: int) -> str:
    """The text as it fits on a phone, with room for so many letters, and as it fits elsewhere."""
    brief, full = shorten(text, max(room, 12)), shorten(text, max(room, 12) + 18)
    if brief == full:
        return f'<text class="label" x="0" y="{y}">{escape(full)}</text>'
    return (
        f'<text class="label brief" x="0" y="{y}">{escape(brief)}</text>'
        f'<text class="label full" x="0" y="{y}">{escape(full)}</text>'
    )


def _interval(scale: Scale, low: float | None, high: float | None, y: float, kind: str) -> str:
    low, high = finite(low), finite(high)
    if low is None or high is None:
        return ""
    left, right = (percent(min(max(scale.at(end), 0.0), 1.0)) for end in (low, high))
    ends = f'x1="{left}" x2="{right}"'
    return f'<line class="{kind}" {ends} y1="{y}" y2="{y}"/>'


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a line chart, perhaps with a band."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    series: int = 0


def lines(
    curves: Sequence[Curve],
    *,
    title: str,
    x: Axis,
    y: Axis,
    note: str = "",
    height: int = 240,
    digits: int = 3,
    focus: float = 0.0,
) -> str:
    """Lines over a common axis, each with its band. A value that is None leaves a gap.

    digits: significant ones, in the values that are shown when the chart is pointed at.
    focus: the share of the x axis, counted from zero, that the y axis need not fit: lines may come in from outside.
    """
    top, bottom = 22, height - 42
    curves = [curve for curve in curves if any(finite(value) is not None for value in curve.y)]
    across = make_scale([value for curve in curves for value in curve.x], count=6, margin=0.0)
    if all(value == round(value) for curve in curves for value in curve.x):  # there is no epoch 1.5
        across = replace(across, ticks=tuple(tick for tick in across.ticks if tick == round(tick)))
    fitted_from = focus * across.high if focus else across.low
    up = y.scale([value for curve in curves for value in _after(curve, fitted_from)])
    spoken = "; ".join(f"{curve.label}: {number(_last(curve.y), significant=digits)}" for curve in curves)
    body = ""
    if curves:
        shapes = "".join(_curve(curve, across, up) for curve in curves)
        body = (
            grid(across, up, x, y, top, bottom)
            # Stretched to whatever width there is; the style sheet keeps the strokes as they are.
            + f'<svg class="stretch" x="0" y="{top}" width="100%" height="{bottom - top}" viewBox="0 0 1000 1000" '
            f'preserveAspectRatio="none">{shapes}</svg>' + _columns(curves, across, x.label, top, bottom, digits)
        )
    return figure(title, note, f"{y.label} over {x.label}. At the end: {spoken}", "wide", height, body)


def _after(curve: Curve, start: float) -> list[float | None]:
    """The numbers of a line and its band from this x on; all of them where it ends before."""
    kept = [at for at, x in enumerate(curve.x) if x >= start] or range(len(curve.x))
    return [part[at] for part in (curve.y, curve.low, curve.high) if part for at in kept]


def _curve(curve: Curve, across: Scale, up: Scale) -> str:
    def place(x: float, y: float) -> str:
        return f"{1000 * across.at(x):.0f},{1000 - 1000 * up.at(y):.0f}"

    bands = ""
    for run in _unbroken(curve.low, curve.high) if curve.low and curve.high else ():
        upper = [place(curve.x[i], curve.high[i] or 0.0) for i in run]
        lower = [place(curve.x[i], curve.low[i] or 0.0) for i in reversed(run)]
        bands += f'<polygon class="band" points="{" ".join(upper + lower)}"/>'
    strokes = ""
    for run in _unbroken(curve.y):
        points = [place(curve.x[i], curve.y[i] or 0.0) for i in run]
        # A single value between gaps still shows: a line from a point to itself is a dot with a round cap.
        strokes += f'<polyline class="line" points="{" ".join(points if len(points) > 1 else points * 2)}"/>'
    return series_group(curve.series, bands + strokes, switched=True)


def _unbroken(*parts: Sequence[float | None]) -> list[list[int]]:
    """The stretches of indices over which every part has a number."""
    runs: list[list[int]] = [[]]
    for at, values in enumerate(zip(*parts, strict=True)):
        if all(finite(value) is not None for value in values):
            runs[-1].append(at)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _columns(curves: Sequence[Curve], across: Scale, name: str, top: int, bottom: int, digits: int) -> str:
    """Invisible columns that show the values of all lines at their place."""
    places = sorted({value for curve in curves for value in curve.x})
    places = places[:: math.ceil(len(places) / LINES_OF_TEXT) or 1]
    edges = [across.low, *((a + b) / 2 for a, b in itertools.pairwise(places)), across.high]
    values = [dict(zip(curve.x, curve.y, strict=True)) for curve in curves]
    parts = []
    for at, x in enumerate(places):
        lines = [
            f"{shorten(curve.label, 28)}  {number(known[x], significant=digits)}"
            for curve, known in zip(curves, values, strict=True)
            if finite(known.get(x)) is not None
        ]
        left, right = across.at(edges[at]), across.at(edges[at + 1])
        text = "\n".join([f"{name} {number(x)}", *lines])
        parts.append(
            f'<rect class="column" x="{percent(left)}" width="{percent(right - left)}" y="{top}" '
            f'height="{bottom - top}"><title>{escape(text)}</title></rect>'
        )
    return "".join(parts)


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if finite(value) is not None), None)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a scatter, with its uncertainty both ways."""

    label: str
    x: float
    y: float
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    series: int = 0
    hint: str = ""


def scatter(points: Sequence[Point], *, title: str, x: Axis, y: Axis, note: str = "", height: int = 340) -> str:
    """Points with bars for their uncertainty. Labels stand where they find room; a legend should name the others."""
    top, bottom = 22, height - 42
    across = x.scale([value for point in points for value in (point.x, *(point.x_range or ()))])
    up = y.scale([value for point in points for value in (point.y, *(point.y_range or ()))])
    body = grid(across, up, x, y, top, bottom) if points else ""
    for point in points:
        left, down = percent(across.at(point.x)), height_of(up, point.y, top, bottom)
        bars_ = _interval(across, *point.x_range, down, "whisker") if point.x_range else ""
        if point.y_range:
            low, high = (height_of(up, value, top, bottom) for value in point.y_range)
            bars_ += f'<line class="whisker" x1="{left}" x2="{left}" y1="{low:.1f}" y2="{high:.1f}"/>'
        hint = point.hint or f"{point.label}: {number(point.x)}, {number(point.y)}"
        body += series_group(point.series, f"<title>{escape(hint)}</title>{bars_}{mark(point.series, left, down)}")
    body += _labels([(point.label, across.at(point.x), height_of(up, point.y, top, bottom)) for point in points])
    spoken = "; ".join(f"{point.label}: {number(point.x)}, {number(point.y)}" for point in points)
    return figure(title, note, f"{y.label} against {x.label}. {spoken}", "wide", height, body)


def _labels(points: Sequence[tuple[str, float, float]]) -> str:
    """Labels beside their points where neither another label nor a mark is in the way, on a chart of usual width."""
    width, letter, line = 600, 6.6, 15
    taken = [(x * width - 7, y - 7, x * width + 7, y + 7) for _, x, y in points]
    parts = []
    for label, x, y in points:
        text = shorten(label, 30)
        long = letter * len(text)
        for anchor, across, up in (("start", 8, -10), ("end", -8, -10), ("start", 8, 11), ("end", -8, 11)):
            left = x * width + across - (long if anchor == "end" else 0)
            box = (left, y + up - line / 2, left + long, y + up + line / 2)
            inside = box[0] >= 0 and box[2] <= width
            if inside and not any(_overlap(box, other) for other in taken if other[:2] != (x * width - 7, y - 7)):
                taken.append(box)
                place = f'x="{percent(x)}" dx="{across}" y="{y + up + 4:.1f}"'
                parts.append(f'<text class="name {anchor}" {place}>{escape(text)}</text>')
                break
    return "".join(parts)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One upright bar; its value is at least 0."""

    label: str
    value: float | None
    hint: str = ""


def bars(
    items: Sequence[Bar], *, title: str, x: str, y: Axis, series: int = 0, note: str = "", height: int = 150
) -> str:
    """Upright bars from zero, one per category. A value that is None leaves its place empty."""
    top, bottom = 20, height - 42
    up = make_scale([0.0, *(item.value for item in items), *y.include], count=3, margin=0.0)
    wide, every = 1 / max(len(items), 1), math.ceil(len(items) / 12) or 1
    parts = [level(up, y, top, bottom)]
    for at, item in enumerate(items):
        value = finite(item.value)
        if value is not None:
            over = height_of(up, value, top, bottom)
            hint = item.hint or f"{item.label}: {number(value)}"
            parts.append(
                f'<rect class="bar" x="{percent((at + 0.14) * wide)}" width="{percent(0.72 * wide)}" y="{over:.1f}" '
                f'height="{bottom - over:.1f}"><title>{escape(hint)}</title></rect>'
            )
        if at % every == 0:
            parts.append(
                f'<text class="tick" x="{percent((at + 0.5) * wide)}" y="{bottom + 15}">{escape(item.label)}</text>'
            )
    parts.append(f'<text class="axis" x="50%" y="{bottom + 33}">{escape(x)}</text>')
    spoken = "; ".join(f"{item.label}: {number(item.value)}" for item in items)
    body = series_group(series, "".join(parts)) if items else ""
    return figure(title, note, f"{y.label} by {x}. {spoken}", "wide", height, body)


def legend(entries: Sequence[tuple[str, int]], *, switches: bool = False, off: frozenset[int] = frozenset()) -> str:
    """Which mark and colour is which series, as (label, series).

    switches: each entry is a button that shows or hides its series in the charts of the group that it stands in.
    off: the series that a page with switches does not show at first.
    """
    items = []
    for label, series in entries:
        text = f"{key(series, line=switches)}<span>{escape(label)}</span>"
        if switches:
            pressed = "false" if series in off else "true"
            text = f'<button type="button" data-switch="{series}" aria-pressed="{pressed}">{text}</button>'
        items.append(f"<li>{text}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def key(series: int, *, line: bool = False) -> str:
    """The mark of a series, to stand before its name; line: on a piece of its line."""
    width = 30 if line else 14
    stroke = f'<line class="line" x1="1" x2="{width - 1}" y1="7" y2="7"/>' if line else ""
    shape = series_group(series, stroke + mark(series, str(width // 2), 7))
    return f'<svg class="key" width="{width}" height="14" aria-hidden="true">{shape}</svg>'
