"""Videos as steps: where their features are, and what happens in each step.

Time is counted in steps everywhere: step t covers the time from t to t + 1. Overlaps of segments do not depend on the
unit, and a step is the finest thing that a model says something about.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from attemper.errors import suggestion
from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import Broken, Problems, listed, settle
from attemper.lab.tasks.fingerprint import of_parts

Array = np.ndarray[Any, np.dtype[Any]]

BACKGROUND, AMBIGUOUS = "Background", "Ambiguous"
"""What is no action: the first is a class of its own, steps of the second count nowhere."""


class Features(Protocol):
    """The features of one video. Goes to other processes, so it can be pickled."""

    def read(self) -> Array:
        """(steps, width), a view of the file where that is possible."""
        ...


@dataclasses.dataclass(frozen=True)
class Video:
    """One video with its annotations."""

    name: str
    part: Literal["train", "test"]
    features: Features
    labels: Array
    """Boolean (steps, classes), background first; several are true where actions overlap."""
    ambiguous: Array
    """Boolean (steps)."""
    segments: Array
    """(segments, 3): start and end in steps, and the action, counted from 0 without background."""

    @property
    def steps(self) -> int:
        return len(self.labels)

    @property
    def main_class(self) -> int:
        """The action that most steps have, so that splits can be stratified; 0 where there is none."""
        counts = self.labels[:, 1:].sum(0)
        return int(counts.argmax()) + 1 if counts.any() else 0


@dataclasses.dataclass(frozen=True)
class Videos:
    """All videos of a data set."""

    all: tuple[Video, ...]
    classes: tuple[str, ...]
    """Background first."""
    width: int
    dtype: np.dtype[Any]
    """Of the stored features."""
    scale: Array | None = None
    """(width), by which stored features are multiplied; None: they are the features."""
    notes: tuple[str, ...] = ()
    """What a reader of a result should know of the data."""

    def part(self, name: str) -> tuple[Video, ...]:
        return tuple(video for video in self.all if video.part == name)

    @property
    def bytes(self) -> int:
        """How much memory all features take."""
        return sum(video.steps for video in self.all) * self.width * self.dtype.itemsize

    @cached_property
    def annotations_fingerprint(self) -> str:
        """A hash of everything but the features."""
        parts: list[str | bytes] = [*self.classes]
        for video in self.all:
            parts += [f"{video.name} {video.part} {video.steps}", np.packbits(video.labels).tobytes()]
            parts += [np.packbits(video.ambiguous).tobytes(), video.segments.astype("<f8").tobytes()]
        return of_parts(*parts)


TOLERANCE = 1.0
"""Steps by which a segment may reach beyond its video: times are rounded, and the last step is seldom a whole one."""


class Annotator:
    """From annotated segments to labels of steps, with a count of what had to be cut off.

    actions: names, in the order of the classes.
    file: where the annotations stand, for messages.
    """

    def __init__(self, actions: Sequence[str], file: object) -> None:
        self.actions, self.file = tuple(actions), file
        self.counts: Counter[str] = Counter()
        self.problems = Problems()
        """Segments that cannot be used, and those that reach beyond their video by more than the tolerance."""

    def __call__(
        self,
        video: str,
        steps: int,
        segments: Iterable[tuple[float, float, str]],
        bounds: tuple[float, float] | None = None,
    ) -> tuple[Array, Array, Array]:
        """Labels, ambiguous steps and segments of a video, as `Video` has them.

        segments: start, end and class, in steps.
        bounds: where the video begins and ends, if it is longer than its steps.

        A step has an action if its middle lies in a segment of it. A segment that is too short to hold any middle
        gives its action to the step that its own middle lies in.
        """
        labels = np.zeros((steps, 1 + len(self.actions)), dtype=bool)
        ambiguous = np.zeros(steps, dtype=bool)
        kept = []
        for start, end, name in segments:
            segment = f"{video}, step {start:g} to {end:g}"
            with self.problems.collect(segment):
                inside = self._clip(segment, start, end, *(bounds or (0.0, float(steps))))
                if inside is None:
                    continue
                covered = _covered(*inside, steps)
                if name == AMBIGUOUS:
                    ambiguous[covered] = True
                    continue
                action = self._action(name)
                labels[covered, 1 + action] = True
                kept.append((*inside, action))
        labels[:, 0] = ~labels.any(1)
        return labels, ambiguous, np.array(kept, dtype=np.float64).reshape(-1, 3)

    def _clip(self, segment: str, start: float, end: float, low: float, high: float) -> tuple[float, float] | None:
        """The part of a segment that lies in the video; None: there is none."""
        if not (np.isfinite(start) and np.isfinite(end)) or end < start:
            raise DataError("it must not end before it starts")
        self.counts["all"] += 1
        beyond = max(low - start, end - high)
        if beyond > TOLERANCE:
            self.problems.found[segment] = f"it reaches {beyond:.4g} steps beyond its video"
        inside = max(start, low), min(end, high)
        if inside[0] >= inside[1]:
            self.counts["left out"] += 1
            return None
        self.counts["clipped"] += inside != (start, end)
        return inside

    def _action(self, name: str) -> int:
        if name not in self.actions:
            raise DataError(
                f"its class '{name}' is not among the {len(self.actions)} known ones.{suggestion(name, self.actions)} "
                f"Known: {listed(self.actions)}"
            )
        return self.actions.index(name)

    def settle(self, broken: Broken) -> tuple[str, ...]:
        """What had to be cut off, in words; raise if segments cannot be used, unless they may be left out."""
        remedy = "Check times and steps, correct or remove them"
        what = f"annotated segments of '{self.file}'"
        return *self.notes, *settle(
            self.problems.found, self.problems.total, what, broken, verb="do not fit", remedy=remedy
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What had to be cut off, in words; nothing where nothing had to."""
        clipped, out = self.counts["clipped"], self.counts["left out"]
        if not clipped and not out:
            return ()
        return (
            f"'{self.file}': of {self.counts['all']:,} annotated segments, {clipped:,} reach beyond their video and "
            f"are clipped, and {out:,} lie outside of it or have no length and are left out.",
        )


def _covered(start: float, end: float, steps: int) -> slice:
    """The steps that a segment gives its class to."""
    first, last = int(np.ceil(start - 0.5)), int(np.ceil(end - 0.5))
    if first == last:
        first = int(np.floor((start + end) / 2))
        last = first + 1
    return slice(min(max(first, 0), steps), min(max(last, 0), steps))


def of_runs(labels: Array) -> Array:
    """The segments that labels of steps stand for: every run of steps with the same action is one.

    labels: boolean (steps, classes), background first.
    """
    found = []
    for action, column in enumerate(labels.T[1:]):
        edges = np.flatnonzero(np.diff(column.astype(np.int8), prepend=0, append=0))
        found += [(start, end, action) for start, end in edges.reshape(-1, 2)]
    return np.array(sorted(found), dtype=np.float64).reshape(-1, 3)
