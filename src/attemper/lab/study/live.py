"""Watching a study: a live table on a terminal, plain lines anywhere else."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from attemper.lab.study.export import cells, shown
from attemper.lab.study.status import Running, Status, duration

SILENCE = 60.0
"""Seconds after which a log says how far a study is, though no run has finished."""


class View(Protocol):
    """Shows how a study goes on."""

    def note(self, text: str) -> None:
        """Something that people should read."""
        ...

    def show(self, status: Status) -> None:
        """How far the study is; called a few times a second."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class SilentView:
    """Says nothing."""

    def note(self, text: str) -> None: ...

    def show(self, status: Status) -> None: ...

    def close(self) -> None: ...


class PlainView:
    """A line whenever a run is finished, and now and then while none is: for logs and pipes, without control codes.

    clock: tells seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._done: dict[str, int] = {}
        self._spoken = clock()

    def note(self, text: str) -> None:
        self._print(text)

    def show(self, status: Status) -> None:
        for recipe in status.recipes:
            before = self._done.setdefault(recipe.name, recipe.done)
            if recipe.done > before:
                words = [f"{status.done}/{status.total}", f"{recipe.name} {recipe.done}/{recipe.total}"]
                words += [f"validation {_percent(recipe.validation)}"]
                if status.seconds_left:
                    words.append(f"about {duration(status.seconds_left)} left")
                self._print(" · ".join(words))
            self._done[recipe.name] = recipe.done
        if status.running and self._clock() - self._spoken > SILENCE:
            self._print(_headline(status))

    def close(self) -> None: ...

    def _print(self, text: str) -> None:
        self._spoken = self._clock()
        self._console.print(Text(text), soft_wrap=True)


class LiveView:
    """One table that stays in its place: bars, who is at work, how long it will take."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))

    def show(self, status: Status) -> None:
        self._live.start()  # does nothing the second time
        self._live.update(status_table(status), refresh=True)

    def close(self) -> None:
        self._live.stop()


def make_view(console: Console | None = None) -> View:
    """The view that suits where the output goes."""
    console = console or Console()
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else PlainView(console)


def status_table(status: Status) -> RenderableType:
    """A study's standing: the whole, one line per recipe, then the runs in hand.

    What is longer than the terminal is cut at its end, so how long it will take stands first.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("recipe", "", "done", "running", "failed", "missing", "validation"):
        table.add_column(title, justify="left" if title in ("recipe", "") else "right")
    for recipe in status.recipes:
        table.add_row(
            Text(recipe.name, overflow="ellipsis", no_wrap=True),
            ProgressBar(total=1, completed=recipe.share, width=20),
            f"{recipe.done}/{recipe.total}",
            _count(len(recipe.running)),
            Text(_count(recipe.failed), style="red"),
            _count(recipe.missing),
            _percent(recipe.validation),
        )
    notes = [Text(f"note: {note}") for note in status.notes]
    return Group(Text(_headline(status), style="bold"), Text(""), table, Text(""), *_running(status), *notes)


def _running(status: Status) -> list[Text]:
    return [
        Text(f"{run.name}: {100 * run.share:.0f} %, {_times(run)}, process {run.pid} on {run.host}", "dim")
        for run in status.running
    ]


def _times(run: Running) -> str:
    left = "" if run.seconds_left is None else f", about {duration(run.seconds_left)} left"
    return duration(run.seconds) + left


def _headline(status: Status) -> str:
    words = [f"{status.done} of {status.total} runs done"]
    words += [
        f"{count} {name}" for count, name in ((len(status.running), "running"), (status.failed, "failed")) if count
    ]
    if status.seconds_left:
        words.append(f"about {duration(status.seconds_left)} left")
    return ", ".join(words)


def summary_table(summary: dict[str, Any]) -> Table:
    """The final table, for a terminal."""
    titles = ["recipe", f"test {summary['metric']} %", "difference to baseline", "verdict", "P(better)", "could see"]
    header = shown([*titles, "p", "rank", "step time", "FLOPs", "published"], summary)
    # p, rank and FLOPs are in the other tables; here they would take the room of the verdict.
    kept = [at for at, title in enumerate(header) if title not in ("p", "rank", "FLOPs")]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at in kept:
        table.add_column(header[at], justify="right" if at else "left", overflow="fold")
    for row in summary["recipes"]:
        line = shown(cells(row), summary)
        table.add_row(*(Text(line[at]) for at in kept))
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _count(number: int) -> str:
    return str(number) if number else "·"
