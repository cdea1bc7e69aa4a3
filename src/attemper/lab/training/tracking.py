"""From the progress events of a run to what trackers log."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attemper.lab.tasks.notifications import LogCallback
from attemper.lab.tracking.base import TrackedRun, Tracker
from attemper.lab.tracking.registry import make_tracker
from attemper.lab.training.schedule import learning_rate
from attemper.lab.training.spec import RunSpec


@contextlib.contextmanager
def follow(
    trackers: Sequence[str], spec: RunSpec, *, key: str, project: str, name: str, folder: Path, log: LogCallback
) -> Iterator[Follower]:
    """Have trackers follow a run as long as the block lasts.

    trackers: their names; none at all is fine.
    folder: where they may put files. log: called when a tracker stops working.
    """
    run = TrackedRun(project=project, name=name, key=key, config=flat(spec), folder=folder)
    follower = Follower(trackers, run, spec, log)
    try:
        yield follower
    finally:
        follower.close()


class Follower:
    """Passes a run's progress on to trackers. One that fails is left out from then on, and the run goes on."""

    def __init__(self, names: Sequence[str], run: TrackedRun, spec: RunSpec, log: LogCallback) -> None:
        self._names, self._run, self._spec, self._log = list(names), run, spec, log
        self._trackers: dict[str, Tracker] = {}
        self._started = False
        self._end: dict[str, float] = {}

    def progress(self, event: Mapping[str, Any]) -> None:
        """An event of the run, as `attemper.lab.training.loop.run` reports it."""
        if not self._names or "warning" in event:
            return
        step = (event["epoch"] - 1) * event["steps"] + event["step"]
        if not self._started:
            self._start(step)
        values = values_of(event, self._spec)
        if values:
            self._each(lambda tracker: tracker.log(values, step))

    def result(self, result: Mapping[str, Any]) -> None:
        """What the run came to; logged at its end."""
        self._end = {
            f"final/{part}/{name}": float(value)
            for part in ("train", "validation", "test")
            for name, value in result.get(part, {}).items()
            if number(value)
        }

    def close(self) -> None:
        """The run is over, or was stopped."""
        self._each(lambda tracker: tracker.finish(self._end))
        self._trackers = {}

    def _start(self, step: int) -> None:
        self._started = True
        for name in self._names:
            with self._guarded(name):
                tracker = make_tracker(name)
                tracker.start(self._run, step)
                self._trackers[name] = tracker

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._guarded(name):
                do(tracker)

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """A dashboard that does not answer is no reason to lose a run."""
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            self._log(f"{self._run.name} is no longer tracked by {name}: {type(error).__name__}: {error}")


def values_of(event: Mapping[str, Any], spec: RunSpec) -> dict[str, float]:
    """What an event says in numbers."""
    found: dict[str, Any] = {"train/loss": event.get("loss")}
    found |= {f"validation/{name}": value for name, value in (event.get("validation") or {}).items()}
    values = {name: float(value) for name, value in found.items() if number(value)}
    if values:
        done = max(0, (event["epoch"] - 1) * event["steps"] + event["step"] - 1)
        values["train/lr"] = learning_rate(spec.budget, done, event["steps"])
    return values


def number(value: Any) -> bool:
    """Whether trackers can log a value."""
    return isinstance(value, int | float) and math.isfinite(value)


def flat(spec: RunSpec) -> dict[str, Any]:
    """A run's description without nesting: {'task': …, 'budget.lr': …}."""
    whole = spec.to_dict()
    budget, versions = whole.pop("budget"), whole.pop("versions", {})
    whole |= {f"budget.{name}": value for name, value in budget.items()}
    return whole | {f"versions.{name}": value for name, value in versions.items()}
