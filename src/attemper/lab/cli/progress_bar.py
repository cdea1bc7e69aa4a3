"""A bar on the terminal while data is prepared, and lines about what was left out of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attemper.lab.cli.printing import console, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class PreparationBar:
    """Listens to tasks. The bar is there while a step is under way and at no other time."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._bar: Progress | None = None
        self._shown: set[str] = set()

    def progress(self, what: str, done: int, total: int) -> None:
        if not self._screen.is_terminal:
            return
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._screen, transient=True)
            self._bar.start()
            self._bar.add_task(what, total=total)
        self._bar.update(self._bar.task_ids[0], completed=done)
        if done == total:
            self.end()

    def note(self, text: str) -> None:
        if text not in self._shown:
            say(self._screen, f"note: {text}")
        self._shown.add(text)

    def end(self) -> None:
        """Take the bar away, wherever it stands."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def progress_on_terminal() -> Iterator[None]:
    """Context manager: inside it, tasks show their progress on standard error; standard output stays clean."""
    from attemper.lab.tasks.notifications import listening

    bar = PreparationBar(console(json=True))
    try:
        with listening(bar):
            yield
    finally:
        bar.end()
