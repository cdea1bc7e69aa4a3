"""What a plan may hold at most, and the checks that all its readers share."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attemper.errors import AttemperError, quoted, shown, suggestion
from attemper.lab.errors import PlanError, PlanPath

MOST_SEEDS = 1_000
MOST_RECIPES = 1_000
MOST_RATES = 100
MOST_RUNS = 50_000
"""Of a plan. Results are files, and are looked at one by one."""
MOST_CHARACTERS = 1_000
"""Of a title, of a name, of a source."""
LARGEST_SEED = 2**63 - 1
LARGEST_NUMBER = 1e300


def is_whole(given: Any) -> bool:
    """Whether this is a whole number; true and false are none."""
    return isinstance(given, int) and not isinstance(given, bool)


def is_number(given: Any) -> bool:
    """Whether this is a number of a size that can be computed with; true and false are none."""
    return isinstance(given, int | float) and not isinstance(given, bool) and abs(given) <= LARGEST_NUMBER


def check_keys(what: str, given: Mapping[Any, Any], known: Iterable[str], path: PlanPath = ()) -> None:
    """Raise at the first key that is not known."""
    known = list(known)
    for key in given:
        if key not in known:
            near = suggestion(str(key), known)
            raise PlanError(f"A {what} has no {quoted(str(key))}.{near} It has: {', '.join(known)}.", (*path, key))


def checked_text(given: Any, name: str, example: str) -> str:
    """A text that says something, without the spaces around it."""
    if not isinstance(given, str) or not given.strip():
        raise PlanError(f"{name} is {shown(given)}; it must be a text such as '{example}'.", (name,))
    return checked_length(given.strip(), name, (name,))


def checked_length(text: str, what: str, path: PlanPath) -> str:
    """The text, if it is not too long."""
    if len(text) > MOST_CHARACTERS:
        raise PlanError(f"{what} has {len(text):,} characters; it must have at most {MOST_CHARACTERS:,}.", path)
    return text


@contextmanager
def plan_errors(path: PlanPath) -> Iterator[None]:
    """Context manager: inside it, a mistake in a recipe, a model or a suite is a mistake at this place of the plan."""
    try:
        yield
    except AttemperError as error:
        raise PlanError(str(error), path) from None
