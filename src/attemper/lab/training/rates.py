"""Rates that move while a run trains: with time, by learning, and to zero at the end."""

import dataclasses
from typing import Any

from attemper.lab.training.spec import Budget, RunSpec
from attemper.methods.base import Method
from attemper.methods.kinds import Learnable
from attemper.methods.rates import Timed
from attemper.recipe import as_methods, render
from attemper.tempering import Tempered


def methods_of(recipe: str, budget: Budget) -> list[Method]:
    """The methods of a run's recipe; where its last epochs go without dropping, none that has a rate acts in them.

    >>> [str(method) for method in methods_of("dropkey(0.1) + cb", Budget(epochs=10, last_epochs_without=2))]
    ['dropkey(0.1, until=-2)', 'cb(cb)']
    """
    return [_resting(method, budget) if isinstance(method, Timed) else method for method in as_methods(recipe)]


def _resting(method: Timed, budget: Budget) -> Timed:
    rest = budget.last_epochs_without
    if rest == 0:
        return method
    until = method.until
    if isinstance(until, float):
        earlier = until * budget.epochs <= budget.epochs - rest
    else:
        earlier = until is not None and (until if until > 0 else budget.epochs + until) <= budget.epochs - rest
    return method if earlier else method.at_times(until=-rest)


def at_full_rate(spec: RunSpec) -> RunSpec:
    """The same run with rates that do not depend on time: what a step costs while everything acts.

    >>> spec = RunSpec(task="digits", model="vit-digits", recipe="dropkey(0.1, until=0.5)", seed=0, budget=Budget())
    >>> at_full_rate(spec).recipe
    'dropkey(0.1)'
    """
    timeless = [
        method.at_times(until=None, start=None, ramp=None) if isinstance(method, Timed) else method
        for method in as_methods(spec.recipe)
    ]
    budget = dataclasses.replace(spec.budget, last_epochs_without=0)
    return dataclasses.replace(spec, recipe=render(timeless), budget=budget)


def moves(tempered: Tempered) -> bool:
    """Whether a rate changes while a run trains."""
    return any(
        (isinstance(method, Timed) and method.is_timed) or (isinstance(method, Learnable) and method.learns)
        for method in tempered.methods
    )


def rates_now(tempered: Tempered) -> list[dict[str, Any]]:
    """Which method acts in which block at which rate, as a result holds it."""
    return [{"method": row.method, "block": row.block, "rate": row.rate} for row in tempered.summary()]


def final_rates(tempered: Tempered, curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rates of a finished run; those that depend on time as they were at their highest in the curve."""
    timed = {method.name for method in tempered.methods if isinstance(method, Timed) and method.is_timed}
    rows = [row for entry in curve for row in entry.get("rates", ()) if row["method"] in timed]
    reached: dict[tuple[str, int], float] = {}
    for row in rows:
        key = row["method"], row["block"]
        reached[key] = max(reached.get(key, 0.0), row["rate"] or 0.0)
    return [{**row, "rate": reached.get((row["method"], row["block"]), row["rate"])} for row in rates_now(tempered)]
