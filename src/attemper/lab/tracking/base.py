"""What a tracker is: three methods, and the description of a run that it gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """A run, as those see it who draw its curves."""

    project: str
    """What it belongs to: the study's name, or that of the run's folder."""
    name: str
    """In words, such as 'dropkey(0.1), seed 0'."""
    key: str
    """The hash of everything that its result depends on: the same when it goes on after an interruption."""
    config: Mapping[str, Any]
    """Task, model, recipe, seed and every value of the budget, flat."""
    folder: Path
    """Where files of a tracker's own may lie."""


class Tracker(Protocol):
    """Takes the curves of one run. An error in it is reported once, and never harms the run."""

    def start(self, run: TrackedRun, step: int) -> None:
        """A run begins, or goes on. step: the first one that will be logged; later ones that are known are void."""
        ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Some values after so many steps, such as {"train/loss": 0.4}."""
        ...

    def finish(self, values: Mapping[str, float]) -> None:
        """The end: what the whole run came to; empty where it was stopped."""
        ...
