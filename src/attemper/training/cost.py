"""What a recipe costs: the time of a training step against that without any method, and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from attemper.tasks.base import Task
from attemper.training.data import RunData
from attemper.training.graph import captured
from attemper.training.learner import Learner
from attemper.training.randomness import borrowed, seed_everything
from attemper.training.run import choose_device
from attemper.training.spec import Budget, RunSpec

__all__ = ["Cost", "step_costs"]

WARM_UP = 3
BOOTSTRAPS = 2000


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
    """
    where = choose_device(device)
    names = list(dict.fromkeys(["none", *recipes]))
    with borrowed():
        steppers = {
            name: Stepper(RunSpec(task=task.name, model=model, recipe=name, seed=0, budget=budget), task, where)
            for name in names
        }
        times = {name: np.empty(rounds) for name in names}
        for round_ in range(rounds):
            for name in names:
                times[name][round_] = steppers[name].time()
    return {name: summarise(times[name], times["none"], steppers[name].peak_memory) for name in names}


class Stepper:
    """One recipe's model, warmed up on one batch."""

    def __init__(self, spec: RunSpec, task: Task, device: torch.device) -> None:
        self.device = device
        self.data = RunData(spec, task, device)
        held = self._allocated()
        seed_everything(spec.seed)
        self.learner = Learner(spec, task.shape, device)
        self.learner.model.train()
        self.batch: tuple[Tensor, Tensor] = next(self.data.epoch(1))
        self.learn: Callable[[Tensor, Tensor], None] = captured(self.learner, self.data)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(WARM_UP):
            self.learn(*self.batch)
        self.peak_memory = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else None

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def time(self) -> float:
        """Seconds of one step."""
        self._wait()
        begun = time.perf_counter()
        self.learn(*self.batch)
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def summarise(times: np.ndarray, reference: np.ndarray, peak_memory: int | None) -> Cost:
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
