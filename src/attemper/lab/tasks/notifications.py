"""How tasks tell what takes time and what they left out, without knowing who listens."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

__all__ = ["DataWarning", "Listener", "Nobody", "collecting", "listening", "note", "progress"]


class DataWarning(UserWarning):
    """Something about the data that a user should know, told where nobody listens."""


class Listener(Protocol):
    """Somebody who wants to know while data is opened."""

    def progress(self, what: str, done: int, total: int) -> None:
        """So many of the files of a step are done; called from 0 up to and including `total`."""
        ...

    def note(self, text: str) -> None:
        """A sentence, such as which files could not be read."""
        ...


class Nobody:
    """Hears everything and says nothing: for processes whose parent has told it already."""

    def progress(self, what: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """A stretch of code in which tasks tell this listener; without one, notes are Python warnings."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class _Collecting:
    """Passes progress on and keeps notes."""

    def __init__(self, outside: Listener | None) -> None:
        self.notes: list[str] = []
        self._outside = outside

    def progress(self, what: str, done: int, total: int) -> None:
        if self._outside is not None:
            self._outside.progress(what, done, total)

    def note(self, text: str) -> None:
        self.notes.append(text)


@contextlib.contextmanager
def collecting() -> Iterator[list[str]]:
    """A stretch of code whose notes are put into a list, for whoever will show them in a better place."""
    collector = _Collecting(_listener.get())
    with listening(collector):
        yield collector.notes


def progress(what: str, done: int, total: int) -> None:
    """Tell how far a step is."""
    if (listener := _listener.get()) is not None:
        listener.progress(what, done, total)


def note(text: str) -> None:
    """Tell a sentence."""
    if (listener := _listener.get()) is not None:
        listener.note(text)
    else:
        warnings.warn(text, DataWarning, stacklevel=2)
