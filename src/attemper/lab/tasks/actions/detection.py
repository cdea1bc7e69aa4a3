"""How well actions are found in videos: average precision per step, and of whole segments.

Per step, it is scikit-learn's average precision. Of segments, it is that of ActivityNet's and THUMOS14's evaluation: a
prediction counts if it overlaps enough with a segment that no better prediction has taken, and precision is made
monotone before it is summed up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

OVERLAPS = (0.3, 0.4, 0.5, 0.6, 0.7)
"""The temporal overlaps (tIoU) at which THUMOS14 is reported."""

LEVELS = tuple(round(0.1 * level, 1) for level in range(1, 10))
"""Probabilities at which per-step scores are cut into candidates."""

SUPPRESSED = 0.5
"""Of two candidates of one class that overlap more, the one with the lower score goes."""

FLANK = 0.25
"""How much of a candidate's length, on either side of it, its score is contrasted with."""


@dataclasses.dataclass(frozen=True)
class MeanPrecision:
    """Average precision of every class, and the mean over those that occur in the truth."""

    classes: tuple[float | None, ...]
    """None: the class does not occur."""

    @property
    def mean(self) -> float | None:
        known = [value for value in self.classes if value is not None]
        return sum(known) / len(known) if known else None


# ------------------------------------------------------------------------------------------------------------ per step
def average_precision(scores: Array, positive: Array) -> float | None:
    """Precision, averaged over recall: Σ (Rₙ − Rₙ₋₁) Pₙ over the distinct scores, from the highest to the lowest.

    scores: (N), higher means more likely. positive: boolean (N). Without any positive it is None.

    >>> average_precision(np.array([0.9, 0.8, 0.8, 0.1]), np.array([True, False, True, False]))
    0.8333333333333333
    """
    total = int(positive.sum())
    if not total:
        return None
    order = np.argsort(-scores, kind="stable")
    found = np.cumsum(positive[order])
    last_of_equals = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    found = found[last_of_equals]
    gained = np.diff(found, prepend=0) / total
    return float((gained * found / (last_of_equals + 1)).sum())


def per_frame_map(scores: Array, labels: Array, ignored: Array | None = None) -> MeanPrecision:
    """Average precision of every class over all steps.

    scores: (N, classes). labels: boolean (N, classes), several of them true where actions overlap.
    ignored: boolean (N), steps that count neither as right nor as wrong.
    """
    if scores.shape != labels.shape:
        raise ValueError(f"scores are {scores.shape} and labels {labels.shape}; they must have the same shape")
    if ignored is not None:
        scores, labels = scores[~ignored], labels[~ignored]
    return MeanPrecision(tuple(average_precision(scores[:, c], labels[:, c]) for c in range(labels.shape[1])))


# ------------------------------------------------------------------------------------------------------------ segments
@dataclasses.dataclass(frozen=True)
class Segments:
    """Stretches of videos, one per row: five arrays of the same length.

    video, label: whole numbers. start, end: in any unit, the same in predictions and truth. score: of a prediction.
    """

    video: Array
    start: Array
    end: Array
    label: Array
    score: Array

    def __len__(self) -> int:
        return len(self.video)

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> Segments:
        """From rows of (video, start, end, label) or (video, start, end, label, score)."""
        table = np.asarray(rows, dtype=np.float64) if len(rows) else np.empty((0, 4))
        score = table[:, 4] if table.shape[1] > 4 else np.zeros(len(table))
        return cls(table[:, 0].astype(np.int64), table[:, 1], table[:, 2], table[:, 3].astype(np.int64), score)

    def where(self, chosen: Array) -> Segments:
        """Only some of the rows."""
        return Segments(*(getattr(self, field.name)[chosen] for field in dataclasses.fields(self)))


def temporal_overlap(start: Array, end: Array, other_start: Array, other_end: Array) -> Array:
    """Intersection over union of (A) and (B) intervals: (A, B). What has no length overlaps with nothing."""
    shared = np.minimum(end[:, None], other_end) - np.maximum(start[:, None], other_start)
    shared = np.maximum(shared, 0.0)
    union = (end - start)[:, None] + (other_end - other_start) - shared
    out: Array = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return out


def segment_map(
    predictions: Segments, truth: Segments, classes: int, overlaps: Sequence[float] = OVERLAPS
) -> dict[float, MeanPrecision]:
    """Average precision of every class at every temporal overlap.

    Predictions are taken from the highest score to the lowest, equal ones in the order in which they are given. Each
    takes the segment of its video and class that it overlaps with most among those not taken yet; if they overlap less
    than asked for, it is wrong. A class without any segment has no average precision.
    """
    found: dict[float, list[float | None]] = {overlap: [] for overlap in overlaps}
    for label in range(classes):
        mine, real = predictions.where(predictions.label == label), truth.where(truth.label == label)
        mine = mine.where(np.argsort(-mine.score, kind="stable"))
        hits = _hits(mine, real, overlaps)
        for overlap, hit in zip(overlaps, hits, strict=True):
            found[overlap].append(_interpolated(hit, len(real)) if len(real) else None)
    return {overlap: MeanPrecision(tuple(values)) for overlap, values in found.items()}


def _hits(predictions: Segments, truth: Segments, overlaps: Sequence[float]) -> Array:
    """Whether each prediction, in this order, is right at each overlap: boolean (overlaps, predictions)."""
    hits = np.zeros((len(overlaps), len(predictions)), dtype=bool)
    for video in np.unique(truth.video):
        at = np.flatnonzero(predictions.video == video)
        mine, real = predictions.where(at), truth.where(truth.video == video)
        table = temporal_overlap(mine.start, mine.end, real.start, real.end)
        for index, overlap in enumerate(overlaps):
            hits[index, at] = _match(table, overlap)
    return hits


def _match(table: Array, overlap: float) -> Array:
    """Which rows find a column of their own that overlaps enough; earlier rows choose first."""
    free = table.copy()
    hit = np.zeros(len(table), dtype=bool)
    for row in range(len(table)):
        best = int(free[row].argmax())
        if free[row, best] >= overlap:
            hit[row] = True
            free[:, best] = -1.0
    return hit


def _interpolated(hit: Array, total: int) -> float:
    """The area below precision over recall, where precision at a recall is the best at that recall or beyond."""
    found = np.cumsum(hit)
    precision = np.append(found / np.arange(1, len(hit) + 1), 0.0)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    return float(best[:-1][hit].sum() / total)


# --------------------------------------------------------------------------------------------- from steps to segments
def find_segments(scores: Array, levels: Sequence[float] = LEVELS) -> list[tuple[int, int, int, float]]:
    """Segments in the per-step scores of one video, as (first step, step after the last, class, score).

    scores: probabilities (steps, classes), without that of background.

    At every level, each run of steps whose probability reaches it is a candidate. Its score is its mean probability
    less that of its surroundings, a quarter of its length on either side: a run that stops too early, or goes on too
    long, has a lower one. Among candidates of a class that overlap by more than a half, the highest stays.

    >>> find_segments(np.array([[0.0], [0.9], [0.9], [0.0]]))
    [(1, 3, 0, 0.9)]
    """
    found = []
    for label in range(scores.shape[1]):
        column = scores[:, label].astype(np.float64)
        reached = [level for level in levels if level <= column.max(initial=0.0)]
        runs = sorted({run for level in reached for run in _runs(column >= level)})
        if runs:
            start, end = np.array(runs).T
            score = _contrast(column, start, end)
            found += [(*runs[i], label, float(score[i])) for i in _unsuppressed(start, end, score)]
    return found


def _runs(above: Array) -> Iterator[tuple[int, int]]:
    """The stretches of true, as (first, one after the last)."""
    edges = np.flatnonzero(np.diff(above.astype(np.int8), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _contrast(column: Array, start: Array, end: Array) -> Array:
    """Mean inside of each run less the mean in its flanks, as far as these lie in the video."""
    total = np.append(0.0, np.cumsum(column))
    flank = np.maximum(1, np.round((end - start) * FLANK).astype(np.int64))
    left, right = np.maximum(start - flank, 0), np.minimum(end + flank, len(column))
    inside = total[end] - total[start]
    around = total[right] - total[left] - inside
    contrast: Array = inside / (end - start) - around / np.maximum((right - left) - (end - start), 1)
    return contrast


def _unsuppressed(start: Array, end: Array, score: Array) -> list[int]:
    """Candidates from the highest score to the lowest, without those that overlap too much with a higher one."""
    table = temporal_overlap(start, end, start, end)
    kept: list[int] = []
    for index in np.argsort(-score, kind="stable").tolist():
        if not kept or table[index, kept].max() <= SUPPRESSED:
            kept.append(index)
    return kept
