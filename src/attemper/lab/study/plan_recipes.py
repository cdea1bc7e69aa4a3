"""Rows of a plan, read from plain values, as a file or a program gives them."""

from collections.abc import Mapping, Sequence
from typing import Any

from attemper.errors import shown, suggestion
from attemper.lab.errors import PlanError, PlanPath
from attemper.lab.study.plan_checks import MOST_RECIPES, check_keys, checked_length, is_number, is_whole, plan_errors
from attemper.lab.study.plan_rows import BASELINE, PUBLISHED_LATER, Entry, More, Published, row_of
from attemper.lab.study.reference import check_metric
from attemper.recipe import as_methods, render


def read_entries(given: Any) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """The rows of a plan, with the baseline among them, and what was added."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise PlanError(
            f"recipes is {shown(given)}; it must be a list of recipes such as [none, dropkey(0.1)].", ("recipes",)
        )
    if len(given) > MOST_RECIPES:
        raise PlanError(f"recipes has {len(given):,} of them; a plan has at most {MOST_RECIPES:,}.", ("recipes",))
    entries = [_entry(item, ("recipes", index)) for index, item in enumerate(given)]
    _refuse_doubles(entries)
    if any(entry.is_baseline for entry in entries):
        return tuple(entries), ()
    return (Entry(BASELINE), *entries), (f"added the baseline `{BASELINE}`: every recipe is compared with it",)


def _refuse_doubles(entries: Sequence[Entry]) -> None:
    """Raise where two rows have one name, or are one recipe."""
    names: set[str] = set()
    earlier: dict[frozenset[str], str] = {}
    for index, entry in enumerate(entries):
        path, same = ("recipes", index), frozenset(entry.configurations)
        if entry.name == BASELINE and not entry.is_baseline:
            raise PlanError(f"'{BASELINE}' names the recipe without any method; call '{entry.recipe}' otherwise.", path)
        if entry.name in names:
            raise PlanError(f"Two recipes are called '{entry.name}'; give one of them another name.", path)
        if same in earlier:
            raise PlanError(f"'{entry.name}' is the same recipe as '{earlier[same]}'; leave one of them out.", path)
        names.add(entry.name)
        earlier[same] = entry.name


def _entry(given: Any, path: PlanPath) -> Entry:
    if isinstance(given, str):
        given = {"recipe": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("recipe", ""), str):
        raise PlanError(f"{shown(given)} is no recipe; write one such as dropkey(0.1), or a name and a recipe.", path)
    check_keys("recipe of a plan", given, ["name", "recipe", "tried"], path)
    if "tried" in given:
        return _tried(given, path)
    if "recipe" not in given:
        raise PlanError(f"{shown(dict(given))} has no 'recipe'.", path)
    name = given.get("name", "")
    if not isinstance(name, str):
        raise PlanError(f"The name of a recipe is {shown(name)}; it must be a text.", path)
    name = checked_length(name.strip(), "The name of a recipe", path)
    with plan_errors(path):
        return Entry(given["recipe"], name)


def _tried(given: Mapping[str, Any], path: PlanPath) -> Entry:
    """A row of single configurations, each with its own learning rate."""
    rows, name = given["tried"], given.get("name")
    fits = isinstance(rows, list | tuple) and rows and isinstance(name, str) and name and "recipe" not in given
    if not fits or not all(isinstance(row, Mapping) and set(row) == {"recipe", "lr"} for row in rows):
        raise PlanError(f"{shown(dict(given))}: tried is a list of recipe and lr, and its row has a name.", path)
    if not all(isinstance(row["recipe"], str) and is_number(row["lr"]) and row["lr"] > 0 for row in rows):
        raise PlanError(f"{shown(dict(given))}: a recipe is a text and lr a number above 0.", path)
    name = checked_length(str(name).strip(), "The name of a recipe", path)
    with plan_errors(path):
        pairs = dict.fromkeys((render(as_methods(row["recipe"])), float(row["lr"])) for row in rows)
        return row_of(name, list(pairs))


def read_published(given: Any, entries: Sequence[Entry]) -> tuple[Published, ...]:
    """What others reported for rows of the plan."""
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise PlanError(f"published is {shown(given)}; it must be a list of rows with name and value.", ("published",))
    return tuple(_published_row(row, entries, ("published", index)) for index, row in enumerate(given))


def _published_row(given: Any, entries: Sequence[Entry], path: PlanPath) -> Published:
    if not isinstance(given, Mapping) or not {"name", "value"} <= set(given):
        raise PlanError(f"{shown(given)} is no published row; it needs a name and a value in per cent.", path)
    check_keys("published row", given, Published.__dataclass_fields__, path)
    names = [entry.name for entry in entries]
    name, value, deviation, source = given["name"], given["value"], given.get("deviation"), given.get("source")
    if name not in names:
        raise PlanError(f"No recipe is called '{name}'.{suggestion(str(name), names)}", (*path, "name"))
    if not is_number(value) or not (deviation is None or is_number(deviation)):
        raise PlanError(f"The published value and deviation of '{name}' must be numbers, in per cent.", path)
    words = {key: given.get(key, "") for key in PUBLISHED_LATER}
    if not all(isinstance(word, str) for word in words.values()):
        raise PlanError(f"The column, metric and condition of '{name}' must be texts.", path)
    with plan_errors((*path, "metric")):
        check_metric(words["metric"])
    return Published(
        name=str(name),
        value=float(value),
        deviation=None if deviation is None else float(deviation),
        source=checked_length(str(source or ""), "The source of a published value", path),
        **words,
    )


def read_more(given: Any, entries: Sequence[Entry], most: int | None) -> tuple[More, ...]:
    """The seeds that were added to rows of the plan; most: up to how many there may be."""
    if given is None:
        return ()
    if most is None or not isinstance(given, list | tuple):
        raise PlanError("more is what a study with until: decided has added so far; leave it out.", ("more",))
    return tuple(_more_row(row, entries, most, ("more", index)) for index, row in enumerate(given))


def _more_row(given: Any, entries: Sequence[Entry], most: int, path: PlanPath) -> More:
    if isinstance(given, Mapping) and set(given) == {"name", "recipe", "lr", "seeds"}:
        recipe, lr, seeds = given["recipe"], given["lr"], given["seeds"]
        known = any(entry.name == given["name"] and recipe in entry.configurations for entry in entries)
        if known and is_number(lr) and lr > 0 and is_whole(seeds) and 0 < seeds <= most:
            return More(given["name"], recipe, float(lr), seeds)
    raise PlanError(f"{shown(given)} adds to no recipe of this plan: name, recipe, lr and seeds.", path)
