"""Leaving a run before its end: a checkpoint first. And the signals by which schedulers and people ask for it."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from attemper.lab.errors import RankError, StoppedError


class Leave(BaseException):
    """Raised by a `progress` callback: the run shall write a checkpoint and end.

    It comes out of `run` when that is done: at the next step of the optimiser, or at the end of an epoch. Unlike an
    `Exception`, nothing on the way takes it for a failure.
    """

    place: str = ""
    """Where the checkpoint stands, in words; empty: there is none, because the run has no folder."""


def exit_code(number: int) -> int:
    """What shells and schedulers take for the end by a signal."""
    return 128 + number


@contextlib.contextmanager
def noting(
    *numbers: int, into: list[int] | None = None, say: Callable[[int], str] | None = None
) -> Iterator[list[int]]:
    """Context manager: inside it, the first of these signals is noted in the list that it gives; a second one acts.

    It acts as it would without us: SIGTERM ends the process at once, SIGINT raises KeyboardInterrupt. Processes that
    are forked inside it do not listen. into: the list. say: gives a line for standard error, when a signal is noted.
    """
    noted: list[int] = [] if into is None else into

    def note(number: int) -> None:
        noted.append(number)
        if say is not None:
            os.write(2, f"attemper: {say(number)}\n".encode())

    with _handled(note, noted, numbers):
        yield noted


@contextlib.contextmanager
def interrupted_by(*numbers: int, into: list[int] | None = None) -> Iterator[list[int]]:
    """Context manager: inside it, the first of these signals is noted and raises KeyboardInterrupt, as Ctrl-C does."""
    noted: list[int] = [] if into is None else into

    def interrupt(number: int) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    with _handled(interrupt, noted, numbers):
        yield noted


@contextlib.contextmanager
def ending_as(noted: list[int]) -> Iterator[None]:
    """Context manager: what stops inside it because of a noted signal ends the program with the signal's code."""
    try:
        yield
    except (KeyboardInterrupt, StoppedError, RankError) as error:
        if not noted:
            raise
        raise StoppedError(f"{name_of(noted[0])}: {error or 'stopped.'}", exit_code(noted[0])) from None


def name_of(number: int) -> str:
    """Such as SIGTERM."""
    return signal.Signals(number).name


def _act(number: int) -> None:
    """Let a signal have its usual effect on this process."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def _handled(first: Callable[[int], None], noted: list[int], numbers: tuple[int, ...]) -> Iterator[None]:
    """Have the first of these signals handled. Only the main thread of a process can; elsewhere nothing changes."""
    owner = os.getpid()

    def handler(number: int, frame: FrameType | None) -> None:
        if noted or os.getpid() != owner:
            _act(number)
        else:
            first(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
