"""The errors that Attemper raises, one type per kind of mistake."""

import difflib
from collections.abc import Iterable

SHOWN = 120
"""Characters of a text that an error shows, at most."""


class AttemperError(Exception):
    """Every error of Attemper's own."""


class ParameterError(AttemperError, ValueError):
    """A parameter of a method is outside its allowed range."""


class RecipeError(AttemperError, ValueError):
    """A recipe cannot be read; the message points at the column."""


class UnknownMethodError(RecipeError):
    """A recipe names a method that does not exist."""


class ConflictError(AttemperError, ValueError):
    """Methods that cannot work together, or one method twice."""


class HiddenTokensError(ConflictError):
    """A method would mix tokens that attention hides from each other: causal attention, for one."""


class NoSiteError(AttemperError, ValueError):
    """A method found nothing in the model that it could act on."""


class AlreadyAppliedError(AttemperError, ValueError):
    """The model is tempered already."""


class WrappedModelError(AttemperError, TypeError):
    """The model is wrapped (DDP, FSDP, compiled, scripted): temper what is inside, before wrapping."""


class UnsupportedError(AttemperError, ValueError):
    """An implementation that was asked for by name cannot serve the call."""


class MeshError(AttemperError, RuntimeError):
    """How processes share a batch or a model is not understood, or not what the recipe can be computed on."""


class UnmetError(AttemperError, RuntimeError):
    """A tempered module ran in training mode and computed no attention that Attemper could reach."""

    outside: bool = False
    """Whether what was missed inside of a module may be done by what runs it."""


class PenaltyError(AttemperError, RuntimeError):
    """A training step left out what the recipe adds to the loss, or would add it with a wrong factor."""


class ProgressError(AttemperError, RuntimeError):
    """A rate depends on how far training is, and nobody says so."""


class UnreadableError(AttemperError):
    """A file is missing, damaged, or not what it should be."""


class MissingFileError(UnreadableError):
    """There is no such file."""


class UnsavableError(AttemperError, ValueError):
    """A tempered model holds something that its files cannot hold."""


class FittedWarning(UserWarning):
    """A method acts with another parameter somewhere, since attention has fewer keys there than it asks for."""


class RecipeWarning(UserWarning):
    """A model was trained with another recipe than the one that it has now."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line; of an error that says nothing, its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def pointed_at(text: str, column: int) -> str:
    """'(column 9)', and below it the text with a mark at that column; of a long text, what stands round it.

    >>> print("unknown method", pointed_at("cb + dropkye(0.1)", 5))
    unknown method (column 6)
      cb + dropkye(0.1)
           ^
    """
    begin = max(0, column - SHOWN // 2) if len(text) > SHOWN else 0
    shown = text[begin : begin + SHOWN]
    before, after = "…" if begin else "", "…" if begin + SHOWN < len(text) else ""
    line = before + "".join(sign if sign.isprintable() else "�" for sign in shown) + after
    return f"(column {column + 1:,})\n  {line}\n  {' ' * (column - begin + len(before))}^"


def quoted(text: str) -> str:
    """A text in quotes, on one line and not too long.

    >>> quoted("dropkey"), len(quoted("x" * 5000))
    ("'dropkey'", 122)
    """
    line = "".join(sign if sign.isprintable() else "�" for sign in text[: SHOWN - 1])
    return f"'{line}'" if len(text) < SHOWN else f"'{line}…'"


def shown(value: object) -> str:
    """A value as Python writes it, on one line and not too long.

    >>> shown([1, 2]), shown("a" * 500)[-3:]
    ('[1, 2]', 'aa…')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of too many digits, too many lists in each other
        text = f"a {type(value).__name__} that is too large to be shown"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def suggestion(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' with the nearest known name, or the empty string."""
    nearest = difflib.get_close_matches(word[:SHOWN], list(known), n=1, cutoff=0.5)
    return f" Did you mean '{nearest[0]}'?" if nearest else ""
