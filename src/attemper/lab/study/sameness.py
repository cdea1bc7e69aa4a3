"""Recipes that are the same thing: by what they say, or by having trained exactly alike."""

from collections.abc import Mapping, Sequence
from typing import Any

from attemper.errors import AttemperError
from attemper.recipe import as_methods, render

Row = Mapping[str, Any]
SEEDS = 3
"""Without curves, so many seeds must have equal accuracies on train, validation and test to be no coincidence."""


def plainest(recipe: str) -> str:
    """The recipe with every method in its plainest form: what two recipes that compute the same have in common.

    >>> plainest("dropattention(0.2, rescale=normalize)"), plainest("dropkey(0.0) + cb")
    ('dropkey(0.2)', 'cb(cb)')
    """
    try:
        methods = as_methods(recipe)
    except AttemperError:
        return recipe
    return render([method.plainest for method in methods if not method.idle])


def originals(rows: Sequence[Row]) -> dict[str, str]:
    """Of the rows that are the same thing as an earlier one: their names, and that one's name."""
    found: dict[str, str] = {}
    for at, row in enumerate(rows):
        first = next((other for other in rows[:at] if other["name"] not in found and _same(row, other)), None)
        if first is not None:
            found[row["name"]] = first["name"]
    return found


def _same(a: Row, b: Row) -> bool:
    alike = a.get("lr") is not None and a.get("lr") == b.get("lr") and plainest(a["recipe"]) == plainest(b["recipe"])
    return alike or trained_alike(a, b)


def trained_alike(a: Row, b: Row) -> bool:
    """Whether all seeds that both have went exactly the same way, epoch by epoch."""
    pairs = [at for at, (x, y) in enumerate(zip(a["test"], b["test"], strict=False)) if x is not None and y is not None]
    if not pairs or any(a[part][at] != b[part][at] for part in ("test", "validation", "train") for at in pairs):
        return False
    curves = [(a.get("curves", [])[at : at + 1], b.get("curves", [])[at : at + 1]) for at in pairs]
    known = [(x[0], y[0]) for x, y in curves if x and y and x[0] and y[0]]
    losses = [(_losses(x), _losses(y)) for x, y in known]
    if len(losses) == len(pairs):
        return all(x == y and any(loss is not None for loss in x) for x, y in losses)
    if a.get("diverged") or b.get("diverged"):  # before the first epoch was over: what they have is the untrained model
        return False
    return len(pairs) >= SEEDS


def _losses(curve: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Real numbers that two different methods do not share by chance."""
    return [at.get("train_loss") for at in curve]
