"""Metrics of a model on a set of samples, in eval mode and without augmentation."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from attemper.lab.tasks.base import Detailed, Illustrated, Tallied, Task
from attemper.lab.tasks.classification import Details, Metrics
from attemper.lab.tasks.pictures import MOST_PICTURES
from attemper.lab.tasks.source import Source
from attemper.lab.training.learner import Learner
from attemper.lab.training.ranks import Ranks


def evaluate(learner: Learner, task: Task, source: Source) -> Metrics:
    """The task's metrics; a value that is no finite number is None. On every rank they are the same."""
    with learner.evaluating() as model:
        found = measure(model, task, source, learner.ranks)
    return {name: finite(value) for name, value in found.items()}


def measure(model: nn.Module, task: Task, source: Source, ranks: Ranks) -> Metrics:
    """The task's metrics, by all ranks together where that can be.

    Means over samples are put together from the parts of the ranks, and tallies are scored by the main rank. All else
    is measured by the main rank; and of a sharded model, which runs on all ranks or on none, by every rank.
    """
    if ranks.alone:
        return task.measure(model, source)
    if ranks.sharded:
        found = task.measure(model, source)
        return ranks.from_main(lambda: found)
    if getattr(task.measure, "averages", False):
        return averaged(ranks.gather(measure_part(model, task, source, ranks)))
    if isinstance(task, Tallied):
        own = torch.arange(len(source))[ranks.part(len(source))]
        parts = ranks.gather([task.tally(model, source.take(own))] if len(own) else [])
        return ranks.from_main(lambda: task.score([tally for part in parts for tally in part]))
    return ranks.from_main(lambda: task.measure(model, source))


def measure_part(model: nn.Module, task: Task, source: Source, ranks: Ranks) -> tuple[int, Metrics]:
    """How many samples are this rank's, and the metrics on them."""
    own = torch.arange(len(source))[ranks.part(len(source))]
    if not len(own):
        return 0, {}
    return len(own), task.measure(model, source.take(own))


def averaged(parts: Sequence[tuple[int, Metrics]]) -> Metrics:
    """The mean over all samples, from parts with their numbers of samples.

    >>> averaged([(3, {"accuracy": 1.0}), (1, {"accuracy": 0.0}), (0, {})])
    {'accuracy': 0.75}
    """
    total = sum(samples for samples, _ in parts)
    return {
        name: sum(samples * _number(metrics[name]) for samples, metrics in parts if samples) / total
        for name in parts[0][1]
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def detail(learner: Learner, task: Task, source: Source) -> Details | None:
    """What the task has to say and to show beyond its metrics, if anything."""
    with learner.evaluating() as model:
        return details_of(model, task, source)


def details_of(model: nn.Module, task: Task, source: Source) -> Details | None:
    """The same of a model in eval mode."""
    found = task.details(model, source) if isinstance(task, Detailed) else None
    if isinstance(task, Illustrated):
        shown = task.pictures(model, source, MOST_PICTURES)
        found = {**(found or {}), "pictures": [each.to_dict() for each in shown]}
    return found


def finite(value: float | None) -> float | None:
    """The value, or None where JSON has no word for it."""
    return value if value is not None and math.isfinite(value) else None
