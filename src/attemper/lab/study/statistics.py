"""The statistics of a comparison: means, paired differences, corrected p-values, ranks.

Every recipe meets the same seeds: the same split, initial weights and batch order. So recipes are compared seed by
seed, which takes out of the comparison what a lucky split gives to all of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit  # type: ignore[import-untyped]

CONFIDENCE = 0.95
RESAMPLES = 4000
NO_SPREAD = 1e-12
"""Differences closer together than this differ by rounding only."""


@dataclass(frozen=True)
class Difference:
    """How much a recipe differs from `none`, seed by seed."""

    mean: float
    low: float | None
    """The interval's ends; none where the spread is unknown: one seed, or the same difference on every seed."""
    high: float | None
    p: float | None
    """Of the paired t test; none where the interval is."""
    seeds: int
    """How many seeds both have."""
    spread: float | None = None
    """The deviation of the differences over seeds; none with one seed."""


@dataclass(frozen=True)
class Rank:
    """A recipe's place, 1 the best, and how far it moves when other seeds are drawn."""

    mean: float
    low: float | None
    high: float | None


def mean(values: Sequence[float]) -> float | None:
    """The mean; none of nothing."""
    return math.fsum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation over seeds, with n − 1; none below two values.

    >>> deviation([1.0, 3.0]) == 2**0.5
    True
    """
    if len(values) < 2:
        return None
    centre = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def share_interval(share: float, items: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval of a share of so many items that were drawn at random.

    >>> [round(end, 3) for end in share_interval(0.9, 100)]
    [0.826, 0.945]
    """
    z = float(ndtri((1 + confidence) / 2))
    centre = (share + z * z / (2 * items)) / (1 + z * z / items)
    reach = z * math.sqrt(share * (1 - share) / items + z * z / (4 * items**2)) / (1 + z * z / items)
    return max(0.0, centre - reach), min(1.0, centre + reach)


def paired_difference(
    ours: Sequence[float | None], baseline: Sequence[float | None], confidence: float = CONFIDENCE
) -> Difference | None:
    """The mean difference over the seeds that both have, with a t interval and the paired t test; none without any.

    >>> found = paired_difference([0.82, 0.85, 0.81], [0.80, 0.80, 0.80])
    >>> f"{found.mean:.4f} [{found.low:.4f}, {found.high:.4f}] p = {found.p:.4f}"
    '0.0267 [-0.0250, 0.0784] p = 0.1567'
    """
    pairs = zip(ours, baseline, strict=True)
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    n = len(differences)
    if n == 0:
        return None
    centre, spread = math.fsum(differences) / n, deviation(differences)
    if spread is None or spread <= NO_SPREAD:
        return Difference(centre, None, None, None, n, spread)
    error = spread / math.sqrt(n)
    reach = float(stdtrit(n - 1, (1 + confidence) / 2)) * error
    p = 2 * float(stdtr(n - 1, -abs(centre) / error))
    return Difference(centre, centre - reach, centre + reach, p, n, spread)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """p-values corrected by Holm's step-down method for how many there are; a comparison without one has none.

    Calling recipes with a corrected value of at most 0.05 different is wrong about any of them in at most 5 % of
    studies.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    order = sorted((p, index) for index, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    largest = 0.0
    for place, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * p))
        adjusted[index] = largest
    return adjusted


def ranks(
    values: Mapping[str, Sequence[float | None]], confidence: float = CONFIDENCE, seed: int = 0
) -> dict[str, Rank | None]:
    """The rank of each recipe by its mean over seeds, equal means sharing theirs, with a bootstrap interval over seeds.

    Seeds are drawn with replacement, the same for all recipes. Only seeds take part that all recipes with any value
    have; a recipe without values has no rank. With one seed there is nothing to draw from, and no interval.

    >>> ranks({"none": [0.80, 0.81, 0.80], "dropkey": [0.85, 0.84, 0.86]})["dropkey"]
    Rank(mean=1.0, low=1.0, high=1.0)
    """
    names = [name for name, row in values.items() if any(value is not None for value in row)]
    table = np.array([[np.nan if v is None else v for v in values[name]] for name in names], dtype=float)
    found: dict[str, Rank | None] = dict.fromkeys(values)
    if not names:
        return found
    table = table[:, ~np.isnan(table).any(0)]
    n = table.shape[1]
    if n == 0:
        return found
    if n == 1:
        places = _places(table.T)[0]
        return found | {name: Rank(float(place), None, None) for name, place in zip(names, places, strict=True)}
    drawn = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    places = _places(table[:, drawn].mean(-1).T)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(places, [tail, 100 - tail], axis=0)
    rows = zip(names, places.mean(0), low, high, strict=True)
    return found | {name: Rank(float(m), float(a), float(b)) for name, m, a, b in rows}


def _places(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """(draws, recipes) means → ranks, 1 the highest; equal means share the mean of their ranks."""
    means = means.round(12)  # the same values added in another order are equal
    above = (means[:, None, :] > means[:, :, None]).sum(-1)
    equal = (means[:, None, :] == means[:, :, None]).sum(-1)
    places: NDArray[np.float64] = above + (equal + 1) / 2
    return places
