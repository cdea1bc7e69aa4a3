"""How much gradients vary between mini-batches: at one arm's weights, under its own recipe and under others'."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import TypedDict

import torch
from torch import Tensor

from attemper.lab.tasks.base import Task
from attemper.lab.training.data import RunData
from attemper.lab.training.learner import Learner
from attemper.lab.training.randomness import preserved_random_state, seed_everything
from attemper.lab.training.rates import at_full_rate
from attemper.lab.training.spec import RunSpec
from attemper.probes import gradient_variance

BATCHES = 60
"""Mini-batches that the gradient is computed of, the same ones for every arm and at every point."""
POINTS = ("start", "middle", "end")

Weights = Mapping[str, Tensor]


class Noise(TypedDict):
    """Of the gradient of the training loss, over all parameters together."""

    variance: float
    """Trace of its covariance between mini-batches."""
    squared_mean: float
    """Squared length of the mean gradient."""


def gradient_noise(spec: RunSpec, task: Task, weights: Weights | None, device: torch.device) -> Noise:
    """Mean and variance of the gradient that a run would train with, in training mode.

    weights: what the gradient is taken at; None: the run's initial weights.
    """
    plain = dataclasses.replace(spec, budget=dataclasses.replace(spec.budget, compile=False))
    with preserved_random_state():
        learner = Learner(at_full_rate(plain), task, device)
        if weights is not None:
            learner.model.load_state_dict(weights)
        learner.model.train()
        batches = mini_batches(plain, task, device)
        seed_everything(spec.seed)
        rows = gradient_variance(learner.model, lambda batch: learner.loss(*batch), batches)
    return Noise(variance=sum(row.variance for row in rows), squared_mean=sum(row.mean_norm**2 for row in rows))


def mini_batches(spec: RunSpec, task: Task, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of the epochs that would come after the last one, augmented as in training."""
    data = RunData(spec, task, device)
    epochs = itertools.count(spec.budget.epochs + 1)
    return itertools.islice(itertools.chain.from_iterable(map(data.epoch, epochs)), BATCHES)
