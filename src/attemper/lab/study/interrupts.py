"""Ctrl-C goes to all processes of a terminal at once; here, one of them decides what it means for the others."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

MASKED = hasattr(signal, "pthread_sigmask")


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Context manager: processes that are started inside it do not hear Ctrl-C, and this one hears it at the end.

    A new process spends its first seconds on imports, and Ctrl-C would end them with a traceback each. One that is
    ready for its work calls `ignore_interrupts`.
    """
    if not MASKED:
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing starts it with the first process, and then unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _deferred():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _deferred() -> Iterator[None]:
    """Context manager: Ctrl-C that another thread of this process takes, where it is not blocked, counts at the end."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals:
            signal.raise_signal(signal.SIGINT)  # blocked in this thread until the shield is gone


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the process that started this one, for good."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if MASKED:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
