"""Looking at a study while it goes on, and stopping once it is decided, without more false alarms than one look has.

Every look spends a part of the error that may be made in all (Lan and DeMets 1983). What may be spent by n of N seeds
is α·(n/N)³ (Kim and DeMets 1987): little at first, so that hardly any power is lost against a study of N seeds at once.
The level of each look follows from the chance that a path without any effect has not been stopped before, by the
recursion of Armitage, McPherson and Rowe (1969) for normal increments; t tests are then made at these levels.
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import ndtr  # type: ignore[import-untyped]

LOOKS = 10
"""After the first one; more would cost power, and a worker or two should have something to do between two of them."""
LEAST = 2
"""Seeds between two looks: starting workers takes time, too."""
GRID = 401
"""Points on which a density is held; odd, for Simpson's rule."""

Spending = Callable[[float], float]
"""From the share of all seeds that is there to the share of α that is spent by then."""


def cubic(share: float) -> float:
    """What is spent by default: so much of α by this share of all seeds."""
    return share**3


def schedule(initial: int, most: int) -> tuple[int, ...]:
    """The numbers of seeds at which a study is looked at.

    >>> schedule(5, 40)
    (5, 9, 13, 17, 21, 25, 29, 33, 37, 40)
    """
    step = max(LEAST, math.ceil((most - initial) / LOOKS))
    return (*range(initial, most, step), most)


@functools.lru_cache(maxsize=512)
def levels(looks: tuple[int, ...], alpha: float, spending: Spending = cubic) -> tuple[float, ...]:
    """The two-sided level of each look; the last look has all seeds.

    >>> [round(level, 4) for level in levels((10, 20, 30, 40), 0.05)]
    [0.0008, 0.0058, 0.0183, 0.0424]
    """
    shares = [n / looks[-1] for n in looks]
    found: list[float] = []
    spent, points, density = 0.0, np.zeros(1), np.ones(1)
    for before, share in zip([0.0, *shares[:-1]], shares, strict=True):
        now = alpha * spending(share)
        bound = _bound(points, density, math.sqrt(share - before), now - spent, 12 * math.sqrt(share))
        found.append(float(2 * ndtr(-bound / math.sqrt(share))))
        points, density = _advanced(points, density, math.sqrt(share - before), bound)
        spent = now
    return tuple(found)


def level_at(seeds: int, alpha: float, looks: Sequence[int]) -> float:
    """The level at so many seeds: that of the last look that they suffice for; 0 before the first."""
    done = [at for at, n in enumerate(looks) if n <= seeds]
    return levels(tuple(looks), alpha)[done[-1]] if done else 0.0


def _bound(points: np.ndarray, density: np.ndarray, step: float, spend: float, high: float) -> float:
    """Where a path that has come so far is stopped with this probability."""
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        beyond = ndtr((points - middle) / step) + ndtr((-middle - points) / step)
        low, high = (middle, high) if float(density @ beyond) > spend else (low, middle)
    return high


def _advanced(points: np.ndarray, density: np.ndarray, step: float, bound: float) -> tuple[np.ndarray, np.ndarray]:
    """The paths that go on: places between the bounds, and their probabilities, Simpson's weights included."""
    new = np.linspace(-bound, bound, GRID)
    simpson = np.ones(GRID)
    simpson[1:-1:2], simpson[2:-1:2] = 4, 2
    simpson *= (new[1] - new[0]) / 3
    distance = (new[:, None] - points[None]) / step
    rising = np.exp(-(distance**2) / 2) @ density / (step * math.sqrt(2 * math.pi))
    return new, rising * simpson
