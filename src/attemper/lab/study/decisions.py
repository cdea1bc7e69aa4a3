"""Better, worse, equivalent or undecided: what the paired differences of a study's recipes to its baseline say.

One interval decides. It is as wide as the correction for several comparisons makes the test, so that it excludes zero
exactly where the corrected p-value is at most 0.05. Within the margin on both sides of zero, a recipe is equivalent; on
one side of zero, better or worse; anything else is undecided.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]

from attemper.lab.study.power import seeds_to_decide, smallest_difference
from attemper.lab.study.statistics import Difference, holm

LEVEL = 0.05
HALF_A_POINT = 0.005
OF_THE_ERRORS = 0.1
OF_THE_BASELINE = 0.02

Answer = Literal["better", "worse", "equivalent", "undecided"]
Level = Callable[[int, float], float]
"""From how many seeds there are, and the error that may be made in all, to the level at which to test now."""


@dataclass(frozen=True)
class Decision:
    """What is known of one recipe against the baseline."""

    answer: Answer
    real: bool
    """Whether zero is outside of the interval: an equivalent recipe may differ by something that does not matter."""
    better: float | None
    """The probability that the recipe is better, by however little, given these seeds and nothing else (flat prior)."""
    within: float | None
    """The probability that the difference is within the margin."""
    smallest: float | None
    """The smallest difference that this many seeds find in 80 of 100 studies."""
    more: int | None
    """Undecided: so many seeds more would decide in 80 of 100 studies, if mean and spread are what they seem to be."""


def default_margin(metric: str, baseline: float | None) -> float | None:
    """The difference that does not matter, where nobody says otherwise.

    Of accuracies the smaller of half a point and a tenth of the baseline's errors, else 2 % of the baseline.

    >>> default_margin("accuracy", 0.80), round(default_margin("accuracy", 0.97), 4), default_margin("mAP", 0.6)
    (0.005, 0.003, 0.012)
    """
    if baseline is None:
        return None
    if metric == "accuracy":
        return min(HALF_A_POINT, OF_THE_ERRORS * (1 - baseline))
    return OF_THE_BASELINE * abs(baseline)


def holm_levels(ps: Sequence[float | None], alpha: float = LEVEL) -> list[float]:
    """The level at which Holm's method tests each p-value: p is at most its level exactly where it is rejected.

    The smallest is tested at α over the number of all, the next at α over one less, and so on; from the first that is
    not rejected on, all have that one's level.

    >>> [round(level, 4) for level in holm_levels([0.01, 0.3, None, 0.04])]
    [0.0167, 0.025, 0.0167, 0.025]
    """
    return step_down(ps, [0] * len(ps), lambda seeds, share: share, alpha)


def step_down(ps: Sequence[float | None], seeds: Sequence[int], level: Level, alpha: float = LEVEL) -> list[float]:
    """The level of each p-value, where what one recipe does not need of α any more is shared among the others.

    seeds: how many each p-value rests on; `level` says what may be spent by then.
    """
    left = {index for index, p in enumerate(ps) if p is not None}
    levels: dict[int, float] = {}
    while left:
        share = alpha / len(left)
        now = {index: level(seeds[index], share) for index in left}
        first = min(left, key=lambda index: (ps[index] / now[index] if now[index] else math.inf, index))  # type: ignore[operator]
        if ps[first] > now[first]:  # type: ignore[operator]
            levels |= now
            break
        levels[first] = now[first]
        left.remove(first)
    rest = min(levels.values(), default=alpha)  # of what has no p-value, and is tested by nothing
    return [levels.get(index, rest) for index in range(len(ps))]


def adjusted(
    differences: Sequence[Difference | None], level: Level | None = None, alpha: float = LEVEL
) -> list[dict[str, Any] | None]:
    """Differences as plain data, with corrected p-values and with intervals that are as wide as the correction asks.

    level: what may be spent at so many seeds; none: all of it, as in a study of a fixed size.

    "low" and "high" are the ends of the adjusted interval, "alone" those of the interval without any correction.
    """
    ps = [None if each is None else each.p for each in differences]
    seeds = [0 if each is None else each.seeds for each in differences]
    levels = holm_levels(ps, alpha) if level is None else step_down(ps, seeds, level, alpha)
    corrected = holm(ps) if level is None else [_scaled(p, at, alpha) for p, at in zip(ps, levels, strict=True)]
    return [
        None if each is None else _adjusted(each, p, at)
        for each, p, at in zip(differences, corrected, levels, strict=True)
    ]


def _scaled(p: float | None, level: float, alpha: float) -> float | None:
    if p is None:
        return None
    return min(1.0, p * alpha / level) if level else 1.0


def _adjusted(each: Difference, p: float | None, level: float) -> dict[str, Any]:
    found = {**asdict(each), "adjusted": p, "level": level, "alone": None}
    if each.low is None or each.high is None:
        return found
    reach = reach_of(each, level)
    bounded = reach is not None and math.isfinite(reach)
    low, high = (each.mean - reach, each.mean + reach) if bounded and reach is not None else (None, None)
    return {**found, "low": low, "high": high, "alone": [each.low, each.high]}


def reach_of(each: Difference, level: float) -> float | None:
    """Half the width of the interval that excludes zero where the t test rejects at this level."""
    if each.spread is None or each.low is None:
        return None
    quantile = float(stdtrit(each.seeds - 1, 1 - level / 2)) if level > 0 else math.inf
    return quantile * each.spread / math.sqrt(each.seeds)


def decide(found: dict[str, Any], margin: float | None, step: float = 0.0) -> Decision:
    """The decision about one of `adjusted`.

    step: what a single test item is worth in the metric. Runs that have the same number of them right need not be
        equally good: what is smaller than an item is not seen.

    >>> from attemper.lab.study.statistics import paired_difference
    >>> one = adjusted([paired_difference([0.82, 0.85, 0.81], [0.80, 0.80, 0.80])])[0]
    >>> decide(one, 0.005).answer, decide(one, 0.005).more
    ('undecided', 4)
    """
    margin, mean, spread, n = margin or 0.0, found["mean"], found["spread"], found["seeds"]
    p = found["p"]
    if p is None:
        return _without_spread(found, margin, step)
    error = spread / math.sqrt(n)
    better = float(stdtr(n - 1, mean / error))
    within = float(stdtr(n - 1, (margin - mean) / error) - stdtr(n - 1, (-margin - mean) / error))
    smallest = smallest_difference(n, spread, found["level"]) if found["level"] > 0 else None
    low, high = found["low"], found["high"]
    real = low is not None and (low > 0 or high < 0)
    if low is not None and -margin < low and high < margin:
        answer: Answer = "equivalent"
    elif real:
        answer = "better" if mean > 0 else "worse"
    else:
        answer = "undecided"
    more = None
    if answer == "undecided" and found["level"] > 0:
        needed = seeds_to_decide(mean, spread, found["level"], margin)
        more = None if needed is None else max(1, needed - n)
    return Decision(answer, real, better, within, smallest, more)


def _without_spread(found: dict[str, Any], margin: float, step: float) -> Decision:
    """The decision where all seeds have one difference: equivalent if that is none, and items are small enough."""
    n, level = found["seeds"], found["level"]
    if n < 2 or abs(found["mean"]) >= 1e-12:
        return Decision("undecided", False, None, None, None, None)
    unseen = step / math.sqrt(6)  # the deviation of what rounding to whole items, twice, hides in a difference
    if unseen == 0 or float(stdtrit(n - 1, 1 - level / 2)) * unseen / math.sqrt(n) < margin:
        return Decision("equivalent", False, None, None, None, None)
    needed = seeds_to_decide(0.0, unseen, level, margin)
    more = None if needed is None else max(1, needed - n)
    return Decision("undecided", False, None, None, smallest_difference(n, unseen, level), more)
