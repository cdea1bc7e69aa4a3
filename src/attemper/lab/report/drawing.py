"""What the charts are drawn with: places, marks, grids, the figure round a chart.

A chart has no width of its own. Places along x are percentages, so that text keeps its size from a phone to a wide
screen. Colours come from the page's style sheet: series 0 is the baseline in a neutral colour, and a series keeps its
colour, its mark and its dash in every chart of a page.
"""

from dataclasses import dataclass

from attemper.lab.report.markup import escape
from attemper.lab.report.scale import Scale, make_scale

COLOURS = 8
"""In the style sheet; the first is the baseline's."""

MARKS = {
    "disc": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",
    "square": "M-4.5-4.5h9v9h-9z",
    "diamond": "M0-6.2L6.2 0L0 6.2L-6.2 0z",
    "triangle": "M0-5.8L5.8 4.6H-5.8z",
    "cross": "M-2-5.5h4v3.5h3.5v4h-3.5v3.5h-4v-3.5h-3.5v-4h3.5z",
}
"""Five, which has no divisor in common with the seven other colours: 35 series can be told apart."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What an axis shows. Its ends follow from the data."""

    label: str
    log: bool = False
    include: tuple[float, ...] = ()
    """Numbers that must be on it whatever the data are, such as 0."""
    rule: float | None = None
    """Where a line is drawn across the chart, such as no difference at all."""
    zone: float | None = None
    """So far on both sides of the rule, the chart is shaded: what is there does not matter."""

    def scale(self, values: list[float | None], *, count: int = 5, margin: float = 0.04) -> Scale:
        rule = () if self.rule is None else (self.rule,)
        return make_scale([*values, *self.include, *rule], log=self.log, count=count, margin=margin)


def symbols() -> str:
    """The shapes of the marks: every page with charts has them once."""
    shapes = "".join(f'<path id="{name}" d="{path}"/>' for name, path in MARKS.items())
    return f'<svg width="0" height="0" aria-hidden="true" class="symbols"><defs>{shapes}</defs></svg>'


def figure(title: str, note: str, spoken: str, kind: str, height: int, body: str) -> str:
    """A chart with its title; `spoken` says in words what it shows. An empty body becomes "no data yet"."""
    below = f'<span class="note">{escape(note)}</span>' if note else ""
    if not body:
        spoken, height = "No data yet", 64
        body = '<text class="axis" x="50%" y="36">no data yet</text>'
    return (
        f'<figure class="chart"><figcaption>{escape(title)}{below}</figcaption>'
        f'<svg class="plot {kind}" role="img" aria-label="{escape(f"{title}. {spoken}.")}" height="{height}">'
        f"{body}</svg></figure>"
    )


def percent(share: float) -> str:
    """A place along x.

    >>> percent(0.125)
    '12.5%'
    """
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def series_group(series: int, body: str, *, switched: bool = False) -> str:
    """Shapes in the colour and dash of a series; switched: a legend's button can hide them."""
    extra = f' data-series="{series}"' if switched else ""
    return f'<g class="{series_classes(series)}"{extra}>{body}</g>'


def series_classes(series: int) -> str:
    """The classes that give a series its colour and its dash."""
    if series == 0:
        return "s0"
    turn, colour = divmod(series - 1, COLOURS - 1)
    return f"s{colour + 1} d{turn % 3}" if turn else f"s{colour + 1}"


def mark(series: int, x: str, y: float, *, hollow: bool = False) -> str:
    """The mark of a series; its colour comes from the group round it."""
    name = list(MARKS)[series % len(MARKS)]
    return f'<use class="{"hollow" if hollow else "mark"}" href="#{name}" x="{x}" y="{y:.1f}"/>'


def upright(scale: Scale, axis: Axis, top: int, bottom: int) -> str:
    """Grid lines, tick labels and the name of an axis that runs from left to right."""
    parts = []
    if axis.rule is not None and axis.zone is not None:
        ends = [min(max(scale.at(axis.rule + side * axis.zone), 0.0), 1.0) for side in (-1, 1)]
        parts.append(
            f'<rect class="zone" x="{percent(ends[0])}" width="{percent(ends[1] - ends[0])}" y="{top}" '
            f'height="{bottom - top}"/>'
        )
    for tick in scale.ticks:
        x = percent(scale.at(tick))
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{bottom + 16}">{scale.label(tick)}</text>')
    if axis.rule is not None:
        x = percent(scale.at(axis.rule))
        parts.append(f'<line class="rule" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
    return "".join(parts) + f'<text class="axis" x="50%" y="{bottom + 35}">{escape(axis.label)}</text>'


def level(scale: Scale, axis: Axis, top: int, bottom: int) -> str:
    """Grid lines, tick labels and the name of an axis that runs upwards."""
    parts = [f'<text class="axis start" x="-42" y="10">{escape(axis.label)}</text>']
    for tick in scale.ticks:
        y = height_of(scale, tick, top, bottom)
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="-8" y="{y + 4:.1f}">{scale.label(tick)}</text>')
    if axis.rule is not None:
        y = height_of(scale, axis.rule, top, bottom)
        parts.append(f'<line class="rule" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
    return "".join(parts)


def height_of(scale: Scale, value: float, top: int, bottom: int) -> float:
    """Where a number lies on an axis that runs upwards, in pixels from the top of the chart."""
    return bottom - scale.at(value) * (bottom - top)


def grid(across: Scale, up: Scale, x: Axis, y: Axis, top: int, bottom: int) -> str:
    """Both axes of a chart."""
    return level(up, y, top, bottom) + upright(across, x, top, bottom)
