"""What a recipe costs: the time of a training step against that without any method, and memory."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from attemper.lab.tasks.base import Task
from attemper.lab.tasks.notifications import progress
from attemper.lab.training.data import RunData
from attemper.lab.training.devices import synchronise
from attemper.lab.training.graph import fastest
from attemper.lab.training.learner import Learner
from attemper.lab.training.loop import choose_device
from attemper.lab.training.randomness import preserved_random_state, seed_everything
from attemper.lab.training.rates import at_full_rate
from attemper.lab.training.spec import Budget, RunSpec

Floats = np.ndarray[Any, np.dtype[np.float64]]

WARM_UP = 3
BOOTSTRAPS = 2000
LEAST_ROUNDS = 5
PATIENCE = 60.0
"""Seconds that may be spent on rounds; where steps are slow, fewer are made, since such steps vary less."""


ACTIVITY = "measuring what a step costs"


class Cost(TypedDict):
    """Time and memory of one recipe's training step."""

    ratio: float
    """Median over the rounds of its step time, divided by that of 'none' in the same round."""
    low: float
    high: float
    """A 95 % interval of the ratio, by bootstrap over the rounds."""
    milliseconds: float
    """Median time of a step."""
    peak_memory: int | None
    """Most bytes that model, optimiser and a step took together on the GPU; None on a CPU."""


def step_costs(
    recipes: Sequence[str],
    task: Task,
    model: str,
    budget: Budget,
    *,
    rounds: int = 20,
    device: torch.device | str | None = None,
) -> dict[str, Cost]:
    """The cost of every recipe, and of 'none'.

    All are built in one process. In every round each of them makes one step, one after the other, so that whatever else
    the machine does falls on all alike.

    rounds: at most so many; fewer where a step takes long.
    """
    chosen = choose_device(device)
    names = list(dict.fromkeys(["none", *recipes]))
    with preserved_random_state():
        spec = RunSpec(task=task.name, model=model, recipe="none", seed=0, budget=budget)
        data = RunData(spec, task, chosen)
        total = len(names) * (1 + rounds)
        steppers = {}
        for done, name in enumerate(names):
            progress(ACTIVITY, done, total)
            steppers[name] = Stepper(dataclasses.replace(spec, recipe=name), data, chosen)
        times: dict[str, Any] = {name: [] for name in names}
        begun = time.perf_counter()
        for round_ in range(rounds):
            progress(ACTIVITY, len(names) * (1 + round_), total)
            for name in names:
                times[name].append(steppers[name].time())
            if round_ + 1 >= LEAST_ROUNDS and time.perf_counter() - begun > PATIENCE:
                break
        progress(ACTIVITY, total, total)
    times = {name: np.array(each) for name, each in times.items()}
    return {name: summarise(times[name], times["none"], steppers[name].peak_memory) for name in names}


class Stepper:
    """One recipe's model, warmed up on one batch."""

    def __init__(self, spec: RunSpec, data: RunData, device: torch.device) -> None:
        self.device = device
        self.batch: tuple[Tensor, Tensor] = next(data.epoch(1))
        held = self._allocated()
        seed_everything(spec.seed)
        learner = Learner(at_full_rate(spec), data.task, device)
        learner.to_training()
        self.learn = fastest(learner, data)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(WARM_UP):
            self.learn(*self.batch)
        self.peak_memory = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else None

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def time(self) -> float:
        """Seconds of one step."""
        synchronise(self.device)
        begun = time.perf_counter()
        self.learn(*self.batch)
        synchronise(self.device)
        return time.perf_counter() - begun


def summarise(times: Floats, reference: Floats, peak_memory: int | None) -> Cost:
    """Median ratio with its interval.

    times, reference: seconds of a step in every round.
    """
    ratios = times / reference
    draws = np.random.default_rng(0).integers(len(ratios), size=(BOOTSTRAPS, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975])
    return Cost(
        ratio=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        milliseconds=float(np.median(times) * 1e3),
        peak_memory=peak_memory,
    )
