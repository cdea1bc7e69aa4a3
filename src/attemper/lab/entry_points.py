"""Tasks and models that other packages add, under the entry points `attemper.tasks` and `attemper.models`."""

import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from typing import Any, TypeVar

from attemper.errors import AttemperError

Made = TypeVar("Made")


@functools.cache
def _entries(group: str) -> tuple[EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=group))


def added(group: str) -> dict[str, str]:
    """Every name that other packages add, with a line about it. Nothing is imported for it."""
    return {entry.name: f"from {entry.value}, {_package(entry)}" for entry in _entries(group)}


def find_added(
    group: str, name: str, *, own: Iterable[str], takes: tuple[str, ...], gives: type[Made]
) -> Callable[..., Made] | None:
    """The function behind a name that another package adds; None where no package does.

    own: names that are Attemper's, with or without ':…' behind them, which nobody else may use.
    takes: what the function is called with, before options by name. gives: what it must return.
    """
    found = [entry for entry in _entries(group) if entry.name == name]
    if not found:
        return None
    entry = found[0]
    where = f"Entry point '{name}' of {group} ({', '.join(_package(entry) for entry in found)})"
    if name in (known.partition(":")[0] for known in own):
        raise AttemperError(f"{where} has a name that is Attemper's own; it must have another one.")
    if len(found) > 1:
        raise AttemperError(f"{where} is there {len(found)} times; remove all of these packages but one.")
    try:
        make = entry.load()
    except Exception as error:
        raise AttemperError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    right = f"it must be a function of {', '.join(takes)} and of options with defaults that gives a {gives.__name__}"
    try:
        inspect.signature(make).bind(*takes)
    except (TypeError, ValueError) as error:
        raise AttemperError(f"{where} is {make!r}: {error}; {right}.") from None

    @functools.wraps(make, updated=())
    def checked(*given: Any, **options: Any) -> Made:
        made = make(*given, **options)
        if not isinstance(made, gives):
            raise AttemperError(f"{where} gave {made!r}; {right}.")
        return made

    return checked


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name} {entry.dist.version}" if entry.dist else f"module {entry.module}"
