"""How much a plan runs, read from plain values: the budget of a run, learning rates, seeds."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attemper.errors import AttemperError, shown
from attemper.lab.errors import PlanError
from attemper.lab.study.plan_checks import LARGEST_SEED, MOST_RATES, MOST_SEEDS, check_keys, is_number, is_whole
from attemper.lab.training.spec import Budget

MAX_SEEDS = 40
"""Up to which seeds are added, unless the plan says otherwise."""


def read_budget(budget: Any, lr: Any) -> tuple[Budget, tuple[float, ...]]:
    """The budget of a run, and the learning rates that are tried; the first of them is the budget's."""
    budget = {} if budget is None else budget
    if not isinstance(budget, Mapping):
        raise PlanError(f"budget is {shown(budget)}; it must be keys and values such as {{epochs: 20}}.", ("budget",))
    if lr is not None and "lr" in budget:
        raise PlanError("The learning rate stands twice: as lr, and in the budget. Keep one of them.", ("lr",))
    read = _budget(budget)
    rates = (read.lr,) if lr is None else _rates(lr)
    return dataclasses.replace(read, lr=rates[0]), rates


def _rates(lr: Any) -> tuple[float, ...]:
    rates = list(lr) if isinstance(lr, list | tuple) else [lr]
    if not rates or not all(is_number(rate) and rate > 0 for rate in rates) or len(set(rates)) < len(rates):
        raise PlanError(f"lr is {shown(lr)}; it must be a number above 0, or a list of different ones.", ("lr",))
    if len(rates) > MOST_RATES:
        raise PlanError(f"lr has {len(rates):,} learning rates; a plan has at most {MOST_RATES:,}.", ("lr",))
    return tuple(float(rate) for rate in rates)


def read_seeds(given: Any) -> tuple[int, ...]:
    """Seeds by their number, counted from 0, or one by one."""
    count = given if is_whole(given) else len(given) if isinstance(given, list | tuple) else 0
    if count > MOST_SEEDS:
        what = f"is {shown(given)}" if is_whole(given) else f"has {count:,} of them"
        raise PlanError(f"seeds {what}; a plan has at most {MOST_SEEDS:,} seeds.", ("seeds",))
    if is_whole(given) and given >= 1:
        return tuple(range(given))
    if isinstance(given, list | tuple) and given and all(is_whole(s) and 0 <= s <= LARGEST_SEED for s in given):
        if len(set(given)) == len(given):
            return tuple(given)
        raise PlanError(f"seeds names {next(s for s in given if given.count(s) > 1)} more than once.", ("seeds",))
    raise PlanError(
        f"seeds is {shown(given)}; it must be how many (at least 1, better 5), or a list such as [0, 1, 2].", ("seeds",)
    )


def read_until(until: Any, most: Any, seeds: Sequence[int]) -> tuple[Literal["decided"] | None, int | None]:
    """Whether seeds are added, and up to how many."""
    if until is None:
        if most is not None:
            raise PlanError("max_seeds says nothing without until: decided.", ("max_seeds",))
        return None, None
    if until != "decided":
        raise PlanError(f"until is {shown(until)}; it can be: decided.", ("until",))
    most = MAX_SEEDS if most is None else most
    if not is_whole(most) or not len(seeds) < most <= MOST_SEEDS:
        raise PlanError(
            f"max_seeds is {shown(most)}; it must be more than the {len(seeds)} seeds that the study begins with, "
            f"and at most {MOST_SEEDS:,}.",
            ("max_seeds",),
        )
    if len(seeds) < 2:
        raise PlanError("until: decided needs at least two seeds to begin with, better three.", ("seeds",))
    if max(seeds) + most > LARGEST_SEED:
        raise PlanError("seeds must leave room for those that until: decided adds behind them.", ("seeds",))
    return "decided", most


def _budget(given: Mapping[str, Any]) -> Budget:
    """The budget, with every number in the type that its field has: equal budgets must give equal keys."""
    hints = typing.get_type_hints(Budget)
    check_keys("budget", given, hints, ("budget",))
    typed = {name: _typed(name, value, hints[name]) for name, value in given.items()}
    try:
        return Budget.from_dict(typed)
    except AttemperError as error:
        name = str(error).partition(" ")[0]  # what a budget complains about comes first, and so has its line
        raise PlanError(str(error), ("budget", *([name] if name in typed else []))) from None


def _typed(name: str, value: Any, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    if float in kinds and is_number(value):
        return float(value)
    if int in kinds and is_whole(value):
        return value
    if bool in kinds and isinstance(value, bool):
        return value
    if (str in kinds or typing.get_origin(hint) is typing.Literal) and isinstance(value, str):
        return value
    words = {float: "a number", int: "a whole number", bool: "true or false", type(None): "none"}
    allowed = " or ".join(dict.fromkeys(words.get(kind, "a word") for kind in kinds))
    raise PlanError(f"{name} is {shown(value)}; it must be {allowed}.", ("budget", name))
