"""Progress and notes of tasks while they open data, for the command line or another listener."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol

LogCallback = Callable[[str], None]
"""Called with a line of text for people to read."""


class DataWarning(UserWarning):
    """Something about the data that a user should know, where there is no listener."""


class Listener(Protocol):
    """Shows progress and notes while data is opened."""

    def progress(self, what: str, done: int, total: int) -> None:
        """So many of the files of a step are done; called from 0 up to and including `total`."""
        ...

    def note(self, text: str) -> None:
        """A sentence, such as which files could not be read."""
        ...


class Silent:
    """Shows nothing: for processes whose parent has shown it already."""

    def progress(self, what: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Context manager: inside it, this listener gets progress and notes; without one, notes are Python warnings."""
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
    """Context manager: notes inside it are put into a list, to be shown in a better place."""
    collector = _Collecting(_listener.get())
    with listening(collector):
        yield collector.notes


def progress(what: str, done: int, total: int) -> None:
    """Report how far a step is."""
    if (listener := _listener.get()) is not None:
        listener.progress(what, done, total)


def note(text: str) -> None:
    """Report something that a user should read."""
    if (listener := _listener.get()) is not None:
        listener.note(text)
    else:
        warnings.warn(text, DataWarning, stacklevel=2)
