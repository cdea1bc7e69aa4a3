"""Rates that move while a run trains: with time, by learning, and to zero at the end."""

import dataclasses
from typing import Any

from attemper.lab.training.spec import Budget, RunSpec
from attemper.methods.kinds import Learnable
from attemper.methods.rates import Timed
from attemper.recipe import as_methods, render
from attemper.tempering import Tempered


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


def moves(tempered: Tempered, budget: Budget) -> bool:
    """Whether a rate changes while a run trains."""
    return budget.last_epochs_without > 0 or any(
        (isinstance(method, Timed) and method.is_timed) or (isinstance(method, Learnable) and method.learns)
        for method in tempered.methods
    )


def rates_now(tempered: Tempered) -> list[dict[str, Any]]:
    """Which method acts in which block at which rate, as a result holds it."""
    return [{"method": row.method, "block": row.block, "rate": row.rate} for row in tempered.summary()]


def final_rates(tempered: Tempered, budget: Budget, curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rates of a finished run; those that depend on time as they were at their highest in the curve."""
    timed = {
        method.name
        for method in tempered.methods
        if isinstance(method, Timed) and (method.is_timed or budget.last_epochs_without > 0)
    }
    rows = [row for entry in curve for row in entry.get("rates", ()) if row["method"] in timed]
    reached: dict[tuple[str, int], float] = {}
    for row in rows:
        key = row["method"], row["block"]
        reached[key] = max(reached.get(key, 0.0), row["rate"] or 0.0)
    return [{**row, "rate": reached.get((row["method"], row["block"]), row["rate"])} for row in rates_now(tempered)]
