"""What whoever reads a comparison must know before its verdict: reasons why it may not tell what it seems to tell."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from attemper.errors import AttemperError
from attemper.recipe import as_methods

Row = Mapping[str, Any]
FEW_ITEMS = 200
NEAR_NOTHING = 0.02
"""Of a metric that is no accuracy, from 0 to 1: a baseline below it has hardly learnt anything."""
NEAR_CHANCE = 0.1
"""Of the way from guessing to being always right: a baseline that has not come so far has hardly learnt anything."""


def cautions(rows: Sequence[Row], baseline: Row, seeds: int, metric: str = "accuracy") -> list[str]:
    """One line each, the gravest first; nothing where there is nothing to be careful about."""
    first = _near_chance(baseline) if metric == "accuracy" else _near_nothing(baseline, metric)
    found = [first, _few_items(baseline, metric), _last_epoch(rows), *_diverged(rows, seeds), *_edges(rows)]
    return [line for line in found if line]


def rates_at_the_edge(explored: Sequence[Mapping[str, Any]]) -> list[str]:
    """That everything that was confirmed was best at the lowest, or the highest, learning rate of its trials."""
    ends = set()
    for row in explored:
        if row["confirmed"]:
            tried = {trial["lr"] for trial in row["trials"]}
            best = row["best"]["lr"]
            ends.add(0 if len(tried) < 2 else (best == max(tried)) - (best == min(tried)))
    if len(ends) != 1 or not (end := ends.pop()):
        return []
    rates = sorted({row["best"]["lr"] for row in explored if row["confirmed"]})
    name, where = ("lowest", "lower") if end < 0 else ("highest", "higher")
    text = ", ".join(f"{rate:g}" for rate in rates)
    return [
        f"All that was confirmed was best at the {name} learning rate of its trials ({text}): a {where} one may be "
        "better still. Give it as --lr, round which others are tried, or more minutes."
    ]


def chance_of(row: Row) -> float | None:
    """What always naming the most frequent class of the test set gets right; None where classes are not known."""
    counts = (row.get("details") or {}).get("confusion") or []
    total = sum(map(sum, counts))
    return max(map(sum, counts)) / total if total else None


def items_of(row: Row) -> int | None:
    """How many samples the test set has; None where that is not known."""
    if row.get("items"):
        return int(row["items"])
    details = row.get("details") or {}
    if details.get("items"):
        return int(details["items"])
    total, runs = sum(map(sum, details.get("confusion") or [])), details.get("runs") or 0
    return total // runs if total and runs and total % runs == 0 else None


def _near_chance(baseline: Row) -> str:
    chance, mean, items = chance_of(baseline), baseline["mean"], items_of(baseline)
    if chance is None or mean is None or not items:
        return ""
    enough = max(NEAR_CHANCE * (1 - chance), 2 * math.sqrt(chance * (1 - chance) / items))
    if mean >= chance + enough:
        return ""
    return (
        f"Near chance: the baseline reaches {100 * mean:.1f} %, and naming the most frequent class every time "
        f"{100 * chance:.1f} %. A model that has learnt nothing cannot show what a recipe does; train longer, or "
        "check data and learning rate."
    )


def _near_nothing(baseline: Row, metric: str) -> str:
    mean = baseline["mean"]
    if mean is None or mean >= NEAR_NOTHING:
        return ""
    return (
        f"Near nothing: the baseline reaches {100 * mean:.1f} % {metric}. A model that has learnt nothing cannot show "
        "what a recipe does; train longer, or check data and learning rate."
    )


def _few_items(baseline: Row, metric: str) -> str:
    items = items_of(baseline)
    if items is None or items >= FEW_ITEMS:
        return ""
    if metric != "accuracy":
        return f"Few test items: {items}, whichever seed is drawn; differences of a few points say little about others."
    worth = "1 point" if items == 100 else f"{100 / items:.2g} points"
    return (
        f"Few test items: {items}. One of them is {worth}, and whichever seed is drawn, it is the "
        "same "
        f"{items}: differences of a few points say little about others."
    )


def _last_epoch(rows: Sequence[Row]) -> str:
    chosen = [epoch for row in rows for epoch in row.get("chosen_epochs") or () if epoch is not None]
    ends = [end for row in rows for end in row.get("epochs") or () if end is not None]
    if not chosen or len(chosen) != len(ends) or any(a != b for a, b in zip(chosen, ends, strict=True)):
        return ""
    return (
        "Every run was best at its last epoch: training was cut short, and with more epochs the order of recipes may "
        "turn round (regularisers mostly help late)."
    )


def _diverged(rows: Sequence[Row], seeds: int) -> list[str]:
    gone = [f"{row['name']} ({row['diverged']} of {seeds})" for row in rows if row["diverged"]]
    if not gone:
        return []
    return [f"Runs diverged with {', '.join(gone)}; they count with what they had reached before."]


def _edges(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row['name']}: the chosen {words} at the edge of what was tried; what lies beyond may be better."
        for row in rows
        if (words := _edge_of(row))
    ]


def _edge_of(row: Row) -> str:
    """The chosen values that are the smallest or largest of their grid, in words."""
    tried = [(_numbers(one["recipe"]), one["lr"]) for one in row.get("configurations") or ()]
    chosen = next(
        ((_numbers(one["recipe"]), one["lr"]) for one in row.get("configurations") or () if one.get("chosen")), None
    )
    if chosen is None:
        return ""
    found = [
        (name, value)
        for name, value in [("lr", chosen[1]), *chosen[0].items()]
        if value in _ends([lr if name == "lr" else numbers.get(name) for numbers, lr in tried])
    ]
    # One strength for several components is one choice, such as v = ff.
    values = dict.fromkeys(value for _, value in found)
    words = [f"{' = '.join(name for name, each in found if each == value)} = {value:g}" for value in values]
    return f"{' and '.join(words)} {'is' if len(words) == 1 else 'are'}" if words else ""


def _ends(values: Sequence[float | None]) -> tuple[float, ...]:
    known = sorted({value for value in values if value is not None})
    return (known[0], known[-1]) if len(known) > 1 else ()


def _numbers(recipe: str) -> dict[str, float]:
    """The numeric parameters of a recipe, by method and name."""
    try:
        methods = as_methods(recipe)
    except AttemperError:
        return {}
    several = len(methods) > 1
    return {
        f"{method.name}'s {name}" if several else name: float(value)
        for method in methods
        for name, value in vars(method).items()
        if isinstance(value, Real) and not isinstance(value, bool)
    }
