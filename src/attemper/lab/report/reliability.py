"""The reliability diagram: how often predictions are right, by how sure they were."""

from collections.abc import Mapping, Sequence
from typing import Any

from attemper.lab.report.drawing import Axis, figure, grid, height_of, mark, percent, series_group
from attemper.lab.report.markup import escape
from attemper.lab.report.scale import Scale, finite, number

SHARES = Scale(0.0, 1.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0))

FEW = 0.01
"""Bins with a smaller share of the predictions have a hollow mark: chance alone can put them anywhere."""


def reliability(
    bins: Sequence[Mapping[str, Any]], *, title: str, series: int = 0, note: str = "", height: int = 270
) -> str:
    """A mark per bin at its confidence and accuracy, joined to the diagonal, where a calibrated model would have it.

    bins: with "low", "high", "count", "confidence" and "accuracy". Faint columns show how many predictions fall into
    each bin, the tallest being the fullest; the mark of a bin that is almost empty is hollow.
    """
    top, bottom = 22, height - 42
    known = [part for part in bins if _complete(part)]
    body = ""
    if known:
        most = max(int(part["count"]) for part in known)
        total = sum(int(part["count"]) for part in known)
        diagonal = f'<line class="rule" x1="0" x2="100%" y1="{bottom}" y2="{top}"/>'
        shapes = [_column(part, most, top, bottom) for part in known]
        shapes += [_mark(part, total, series, top, bottom) for part in known]
        axes = grid(SHARES, SHARES, Axis(label="confidence"), Axis(label="accuracy"), top, bottom)
        body = axes + diagonal + series_group(series, "".join(shapes))
    spoken = "; ".join(f"sure {number(part['confidence'], 2)}, right {number(part['accuracy'], 2)}" for part in known)
    return figure(title, note, f"Accuracy by confidence. {spoken}", "wide", height, body)


def _complete(part: Mapping[str, Any]) -> bool:
    return bool(part.get("count")) and all(finite(part.get(name)) is not None for name in ("confidence", "accuracy"))


def _column(part: Mapping[str, Any], most: int, top: int, bottom: int) -> str:
    tall = (bottom - top) * part["count"] / most
    place = f'x="{percent(part["low"])}" width="{percent(part["high"] - part["low"])}"'
    return f'<rect class="band" {place} y="{bottom - tall:.1f}" height="{tall:.1f}"/>'


def _mark(part: Mapping[str, Any], total: int, series: int, top: int, bottom: int) -> str:
    confidence, accuracy = float(part["confidence"]), float(part["accuracy"])
    x = percent(confidence)
    ideal, real = (height_of(SHARES, value, top, bottom) for value in (confidence, accuracy))
    hint = (
        f"confidence {number(100 * confidence, 1)} %, accuracy {number(100 * accuracy, 1)} %, "
        f"{part['count']} of {total} predictions"
    )
    line = f'<line class="whisker" x1="{x}" x2="{x}" y1="{ideal:.1f}" y2="{real:.1f}"/>'
    few = part["count"] < FEW * total
    return f"<g><title>{escape(hint)}</title>{line}{mark(series, x, real, hollow=few)}</g>"
