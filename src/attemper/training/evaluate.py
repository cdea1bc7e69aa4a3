"""Metrics of a model on a set of samples, in eval mode and without augmentation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from attemper.outputs import logits_of
from attemper.tasks.base import Task
from attemper.tasks.source import Source
from attemper.training.learner import Learner

__all__ = ["Metrics", "evaluate", "finite"]

Metrics = dict[str, float | None]

BATCH = 512


def evaluate(learner: Learner, task: Task, source: Source) -> Metrics:
    """Accuracy and mean cross-entropy; a value that is no finite number is None."""
    correct = torch.zeros((), dtype=torch.int64, device=learner.device)
    loss = torch.zeros((), dtype=torch.float64, device=learner.device)
    with learner.evaluating() as model:
        for stored, targets in source.batches(torch.arange(len(source)), BATCH):
            logits = logits_of(model(task.to_input(stored))).float()
            correct += (logits.argmax(-1) == targets).sum()
            loss += F.cross_entropy(logits, targets, reduction="sum").double()
    return {"accuracy": int(correct) / len(source), "loss": finite(float(loss) / len(source))}


def finite(value: float | None) -> float | None:
    """The value, or None where JSON has no word for it."""
    return value if value is not None and math.isfinite(value) else None
