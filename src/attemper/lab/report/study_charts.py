"""The parts of a study's page that are charts."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attemper.lab.report.charts import Curve, Point, Row, dots, legend, lines, scatter
from attemper.lab.report.drawing import Axis
from attemper.lab.report.entries import Entry, percent
from attemper.lab.report.page import Section
from attemper.lab.report.scale import finite, number, signed, spread_of

MOST_POINTS = 60
"""Of a learning curve: more cannot be told apart at the size of a panel."""
SHOWN_AT_FIRST = 8
"""Learning curves in a study of many recipes; the others wait for their button."""
FOCUS = 0.2
"""The part of training that the axes of learning curves need not fit: what matters comes later, and is much closer."""


def accuracy(ranked: Sequence[Entry], metric: str, confidence: float, margin: float | None = None) -> Section:
    """The metric with intervals, and beside it the paired differences, recipe by recipe in the same order."""
    sure = f"{100 * confidence:g} %"
    rows = []
    for entry in ranked:
        low, high = _interval(entry.test, confidence)
        singles = [(value, f"{entry.name}, seed {seed}: {number(value, 2)} %") for seed, value in entry.by_seed("test")]
        rows.append(
            Row(
                label=entry.name,
                series=entry.series,
                value=entry.mean,
                low=low,
                high=high,
                points=singles,
                note=spread_of(entry.mean, entry.deviation),
            )
        )
    levels = dots(
        rows,
        title=f"Test {metric}",
        axis=Axis(label=f"test {metric}, %"),
        note=f"Mean, its {sure} interval, and every seed below it.",
    )
    return Section(
        heading=metric.replace("_", " ").capitalize() if metric.islower() else metric,
        lead=(
            "Recipes are compared seed by seed, so that a paired difference can be clear where the intervals of two "
            "means overlap. Bars that reach the edge go on beyond it."
        ),
        body=f'<div class="pair">{levels}{_differences(ranked, margin)}</div>',
    )


def _differences(ranked: Sequence[Entry], margin: float | None) -> str:
    rows = []
    for entry in ranked:
        given = entry.difference or {}
        mean, low, high = given.get("mean"), given.get("low"), given.get("high")
        rows.append(
            Row(
                label=entry.name,
                series=entry.series,
                value=0.0 if entry.baseline and entry.mean is not None else mean,
                low=low,
                high=high,
                other_low=entry.alone[0] if entry.alone else None,
                other_high=entry.alone[1] if entry.alone else None,
                note="baseline" if entry.baseline else "–" if mean is None else signed(mean),
            )
        )
    if all(entry.difference is None for entry in ranked):
        rows = []
    return dots(
        rows,
        title="Paired difference to the baseline",
        axis=Axis(label="points", rule=0.0, zone=margin),
        note=(
            "Mean over seeds, its adjusted interval, and below it the 95 % interval without correction. Right of "
            "the line "
            "is better." + (" Within the shaded zone, a difference does not matter." if margin else "")
        ),
    )


def _interval(values: Sequence[float], confidence: float) -> tuple[float | None, float | None]:
    """Student's interval of the mean; none with fewer than two values."""
    if len(values) < 2:
        return None, None
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    quantile = float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


# ----------------------------------------------------------------------------------------------------- learning curves
def curves(ranked: Sequence[Entry], metric: str, learning: str = "accuracy") -> Section | None:
    """How training went: one panel per quantity, a line and a band per recipe.

    learning: what share of training batches is right, in a word.
    """
    panels: list[tuple[str, str, Callable[[Mapping[str, Any]], float | None], bool]] = [
        (f"Validation {metric}", "%", lambda at: percent((at.get("validation") or {}).get(metric)), False),
        ("Validation loss", "loss", lambda at: finite((at.get("validation") or {}).get("loss")), True),
        (f"Training {learning}", "%", lambda at: percent(at.get("train_accuracy")), False),
        ("Training loss", "loss", lambda at: finite(at.get("train_loss")), True),
        ("Penalty in the loss", "penalty", lambda at: finite(at.get("penalty")) or None, True),
    ]
    drawn = []
    for title, label, read, positive in panels:
        found = [curve for entry in ranked if (curve := _curve(entry, read)) is not None]
        if found:
            y = Axis(label=label, log=positive and _spans_decades(found))
            drawn.append(lines(found, title=title, x=Axis(label="epoch"), y=y, digits=4, focus=FOCUS))
    if not drawn:
        return None
    known = [entry for entry in ranked if entry.raw.get("curves")]
    off = frozenset(entry.series for entry in known) - _first(known)
    switches = legend([(entry.name, entry.series) for entry in known], switches=True, off=off)
    epochs = max(finite(at.get("epoch")) or 0 for entry in known for curve in entry.raw["curves"] for at in curve or ())
    cut = f" The first {100 * FOCUS:g} % of training may lie outside the axes." if FOCUS * epochs > 1 else ""
    both = (
        '<p class="switches"><button type="button" data-all="show">Show all</button>'
        '<button type="button" data-all="hide">Hide all</button></p>'
    )
    return Section(
        heading="Learning curves",
        lead=(
            "Mean over seeds; the band reaches from the lowest seed to the highest. Buttons show and hide recipes."
            + cut
        ),
        body=f'<div data-group>{switches}{both}<div class="panels">{"".join(drawn)}</div></div>',
    )


def _first(known: Sequence[Entry]) -> set[int]:
    """The series shown at first: the baseline, the best ones, and with them the best that has a penalty to show."""
    if len(known) <= SHOWN_AT_FIRST:
        return {entry.series for entry in known}
    wanted = [entry for entry in known if entry.baseline]
    wanted += [entry for entry in known if _curve(entry, lambda at: finite(at.get("penalty")) or None)][:1]
    wanted += [entry for entry in known if entry not in wanted]
    return {entry.series for entry in wanted[: SHOWN_AT_FIRST - 2]}


def _curve(entry: Entry, read: Callable[[Mapping[str, Any]], float | None]) -> Curve | None:
    """Mean, lowest and highest over seeds, epoch by epoch, thinned out where there are many."""
    by_epoch: dict[float, list[float]] = {}
    for curve in entry.raw.get("curves") or ():
        for at in curve or ():
            epoch, value = finite(at.get("epoch")), read(at)
            if epoch is not None:
                by_epoch.setdefault(epoch, []).extend([] if value is None else [value])
    if not any(by_epoch.values()):
        return None
    epochs = sorted(by_epoch)
    step = max(1.0, (len(epochs) - 1) / (MOST_POINTS - 1))
    epochs = [epochs[round(step * k)] for k in range(min(len(epochs), MOST_POINTS))]
    several = len(entry.raw["curves"]) > 1
    return Curve(
        label=entry.name,
        series=entry.series,
        x=epochs,
        y=[statistics.fmean(by_epoch[epoch]) if by_epoch[epoch] else None for epoch in epochs],
        low=[min(by_epoch[epoch], default=None) for epoch in epochs] if several else (),
        high=[max(by_epoch[epoch], default=None) for epoch in epochs] if several else (),
    )


def _spans_decades(found: Sequence[Curve]) -> bool:
    values = [value for curve in found for part in (curve.y, curve.low, curve.high) for value in part if value]
    return bool(values) and min(values) > 0 and max(values) > 30 * min(values)


# ------------------------------------------------------------------------------------------------------- gap and cost
def gap(ranked: Sequence[Entry], metric: str) -> Section | None:
    """How much better the training set is known than the test set."""
    rows = []
    for entry in ranked:
        test, train = entry.mean_of("test"), entry.mean_of("train")
        if test is None or train is None:
            continue
        rows.append(
            Row(
                label=entry.name,
                series=entry.series,
                value=test,
                low=min(test, train),
                high=max(test, train),
                other=train,
                note=f"gap {number(entry.gap, 2)}",
            )
        )
    if not rows:
        return None
    chart = dots(
        rows,
        title=f"From test to training {metric}",
        axis=Axis(label=f"{metric}, %"),
        note="Filled: test. Hollow: training set, in eval mode and without augmentation.",
    )
    return Section(
        heading="Generalisation gap",
        lead="Both at the epoch that was best on validation. Regularisation should make the distance shorter.",
        body=chart,
    )


def cost(ranked: Sequence[Entry], metric: str) -> Section | None:
    """The metric against the time of a step."""
    points = []
    for entry in ranked:
        ratio, mean = finite(entry.cost.get("ratio")), entry.mean
        if ratio is None or mean is None:
            continue
        low, high = finite(entry.cost.get("low")), finite(entry.cost.get("high"))
        milliseconds = finite(entry.cost.get("milliseconds"))
        step = f", {number(milliseconds)} ms a step" if milliseconds is not None else ""
        spread = entry.deviation
        points.append(
            Point(
                label=entry.name,
                series=entry.series,
                x=ratio,
                y=mean,
                x_range=None if low is None or high is None else (low, high),
                y_range=None if spread is None else (mean - spread, mean + spread),
                hint=f"{entry.name}: {spread_of(mean, spread)} %, {number(ratio, 2)} × the baseline{step}",
            )
        )
    if not points:
        return None
    chart = scatter(
        points,
        title=f"Test {metric} against step time",
        x=Axis(label="step time, ratio to the baseline", rule=1.0),
        y=Axis(label=f"test {metric}, %"),
        note="Upright: ± one standard deviation over seeds. Level: interval of the ratio.",
    )
    return Section(
        heading="Cost",
        lead="Steps of all recipes were timed in turn, in one process. Up and to the left is better.",
        body=chart + legend([(point.label, point.series) for point in points]),
    )
