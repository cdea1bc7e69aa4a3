"""What a number of seeds can show: power, the smallest difference that can be seen, how many seeds would decide.

A paired comparison is decided when its interval lies on one side of zero, or wholly within the margin. Both depend on
the mean of the differences, which is normal, and on their deviation, which is independent of it: so the chance of a
decision is one integral over the deviation that a study may happen to find.
"""

import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv, ndtr, stdtrit  # type: ignore[import-untyped]

POWER = 0.8
"""What "could see" means: so large a difference would be found in so many of all studies."""
MOST = 10_000
"""Seeds; nobody runs more."""
NODES = 200


@functools.cache
def _deviations(df: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Deviations that a sample may show, in units of the true one, and their weights."""
    at, weights = np.polynomial.legendre.leggauss(NODES)
    return np.sqrt(2 * gammaincinv(df / 2, (at + 1) / 2) / df), weights / 2


def chance_of_decision(seeds: int, effect: float, spread: float, level: float, margin: float = 0.0) -> float:
    """How probable it is that a study of so many seeds decides.

    effect: the true difference. spread: the true deviation of the differences over seeds.
    level: of the two-sided test, and of the interval, that decides.
    margin: within ±margin the interval says "equivalent"; 0: nothing does, and this is the power of the paired t test.

    >>> round(chance_of_decision(10, 1.0, 1.0, 0.05), 3)
    0.803
    """
    if seeds < 2:
        return 0.0
    found, weights = _deviations(seeds - 1)
    error = spread / math.sqrt(seeds)
    reach = float(stdtrit(seeds - 1, 1 - level / 2)) * found * error

    def below(limit: NDArray[np.float64]) -> NDArray[np.float64]:
        """P(−limit ≤ mean ≤ limit)."""
        inside: NDArray[np.float64] = ndtr((limit - effect) / error) - ndtr((-limit - effect) / error)
        return inside

    # Undecided is a mean that is less than one reach from zero, and more than margin − reach.
    undecided = below(reach) - below(np.clip(margin - reach, 0.0, reach))
    return float(np.clip(weights @ (1 - undecided), 0.0, 1.0))


def seeds_to_decide(
    effect: float, spread: float, level: float, margin: float = 0.0, power: float = POWER, most: int = MOST
) -> int | None:
    """The fewest seeds that decide with this probability; None: more than `most`.

    >>> seeds_to_decide(effect=1.0, spread=1.0, level=0.05)
    10
    """

    def enough(seeds: int) -> bool:
        return chance_of_decision(seeds, effect, spread, level, margin) >= power

    high = 2
    while not enough(high):
        high *= 2
        if high > 2 * most:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high if high <= most else None


def smallest_difference(seeds: int, spread: float, level: float, power: float = POWER) -> float | None:
    """The difference that so many seeds find with this probability; None with fewer than two.

    >>> round(smallest_difference(10, 1.0, 0.05), 2)
    1.0
    """
    if seeds < 2:
        return None
    low, high = 0.0, spread
    while chance_of_decision(seeds, high, spread, level) < power:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if chance_of_decision(seeds, middle, spread, level) >= power else (middle, high)
    return high
