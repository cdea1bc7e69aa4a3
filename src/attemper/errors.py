"""The errors that Attemper raises, one type per kind of mistake."""

import difflib
from collections.abc import Iterable


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


class NoSiteError(AttemperError, ValueError):
    """A method found nothing in the model that it could act on."""


class AlreadyAppliedError(AttemperError, ValueError):
    """The model is tempered already."""


class WrappedModelError(AttemperError, TypeError):
    """The model is wrapped (DDP, FSDP, compiled, scripted): temper what is inside, before wrapping."""


class UnsupportedError(AttemperError, ValueError):
    """An implementation that was asked for by name cannot serve the call."""


class UnmetError(AttemperError, RuntimeError):
    """A tempered module ran in training mode and computed no attention that Attemper could reach."""


class PenaltyError(AttemperError, RuntimeError):
    """A training step left out what the recipe adds to the loss, or would add it with a wrong factor."""


class UnreadableError(AttemperError):
    """A file is missing, damaged, or not what it should be."""


class UnsavableError(AttemperError, ValueError):
    """A tempered model holds something that its files cannot hold."""


class RecipeWarning(UserWarning):
    """A model was trained with another recipe than the one that it has now."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' with the nearest known name, or the empty string."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{nearest[0]}'?" if nearest else ""
