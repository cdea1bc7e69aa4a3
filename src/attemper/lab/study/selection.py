"""Choosing a configuration: by validation, and by nothing else.

What chooses gets validation numbers and no results, so that it could not look at the test set if it wanted to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attemper.lab.study.store import Result

Configuration = tuple[str, float]
"""A recipe and a learning rate."""


@dataclass(frozen=True)
class Choice:
    """One row's configurations, and the one that validation chose."""

    means: dict[Configuration, float | None]
    """Mean validation over seeds; none: a run is missing, or ended without a validation number."""
    runs: dict[Configuration, int]
    """How many seeds are done."""
    chosen: Configuration | None
    """None: there are several configurations, and not all of them are done."""


def validation_of(result: Result) -> float | None:
    """The number that a configuration is chosen by; none: the run diverged before there was one."""
    value: float | None = result["validation"][result["metric"]]
    return value


def choose(validation: Mapping[Configuration, Mapping[int, float | None]], seeds: Sequence[int]) -> Choice:
    """Choose the configuration with the highest mean over seeds; of equal ones, the first.

    validation: for each configuration, the validation number of every seed that is done. A seed that ended without one
        puts its configuration behind all others.
    seeds: the ones that must be done. Nothing is chosen before, unless there is nothing to choose from.

    >>> mild, strong = ("dropkey(0.1)", 1e-3), ("dropkey(0.2)", 1e-3)
    >>> choose({mild: {0: 0.8, 1: 0.9}, strong: {0: 0.9, 1: 0.9}}, seeds=[0, 1]).chosen
    ('dropkey(0.2)', 0.001)
    >>> choose({mild: {0: 0.8, 1: 0.9}, strong: {0: 0.9}}, seeds=[0, 1]).chosen is None
    True
    """
    means = {configuration: _mean(numbers, seeds) for configuration, numbers in validation.items()}
    runs = {configuration: len(numbers) for configuration, numbers in validation.items()}
    complete = all(count == len(seeds) for count in runs.values())
    if not complete and len(means) > 1:
        return Choice(means, runs, None)
    best = max(means, key=lambda configuration: _or_last(means[configuration]))  # max keeps the first of equal ones
    return Choice(means, runs, best)


def _mean(numbers: Mapping[int, float | None], seeds: Sequence[int]) -> float | None:
    values = [value for value in (numbers.get(seed) for seed in seeds) if value is not None]
    # Rounded so that a sum of the same numbers in another order is no reason to choose.
    return round(sum(values) / len(values), 12) if len(values) == len(seeds) else None


def _or_last(mean: float | None) -> float:
    return float("-inf") if mean is None else mean
