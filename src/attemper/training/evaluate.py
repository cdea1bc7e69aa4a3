"""Metrics of a model on a set of samples, in eval mode and without augmentation."""

from __future__ import annotations

import math

from attemper.tasks.base import Detailed, Task
from attemper.tasks.classification import Details, Metrics
from attemper.tasks.source import Source
from attemper.training.learner import Learner

__all__ = ["Metrics", "detail", "evaluate", "finite"]


def evaluate(learner: Learner, task: Task, source: Source) -> Metrics:
    """The task's metrics; a value that is no finite number is None."""
    with learner.evaluating() as model:
        return {name: finite(value) for name, value in task.measure(model, source).items()}


def detail(learner: Learner, task: Task, source: Source) -> Details | None:
    """What the task has to say beyond its metrics, if anything."""
    if not isinstance(task, Detailed):
        return None
    with learner.evaluating() as model:
        return task.details(model, source)


def finite(value: float | None) -> float | None:
    """The value, or None where JSON has no word for it."""
    return value if value is not None and math.isfinite(value) else None
