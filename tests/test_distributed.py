"""Several processes train one run: the same step as one process on the whole batch, the same metrics, other masks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from teams import DIED, team
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.consistency import Consistency
from attemper.tasks import Source, Task, open_task
from attemper.training import Budget, RunSpec, joined
from attemper.training.data import RunData
from attemper.training.evaluate import evaluate
from attemper.training.learner import Learner
from attemper.training.loop import Run, choose_device
from attemper.training.ranks import ALONE, Ranks, current

CPU = torch.device("cpu")
TASK = "digits(train=200, test=50)"
TINY = "vit-digits(depth=2, width=16, heads=2, mlp=16)"

PENALTIES = [
    "none",
    "explicit(q=0.3, k=0.2, v=0.1, av=0.4, ff=0.1)",
    "explicit(q=0.3, k=0.2, v=0.1, av=0.4, ff1=0.1, reduction=sum, expectation=exact)",
    "explicit(q=0.3, k=0.2, v=0.1, av=0.4, ff2=0.1, reduction=authors, expectation=inverted)",
    "arora(q=0.1, k=0.2, v=0.3, ff=0.4)",
    "cb(cb_s) + explicit(v=0.5, reduction=sum)",
    "dropkey(0.1) + consistency(0.7)",
    "dropkey(0.1) + consistency(0.7, direction=symmetric) + explicit(v=0.5, reduction=sum)",
    "dropattention(0.1) + rdrop(0.7)",
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spec(recipe: str = "none", *, seed: int = 0, **budget: Any) -> RunSpec:
    chosen = Budget(**{"epochs": 2, "batch_size": 10, "lr": 3e-3, "warmup_epochs": 1, **budget})
    return RunSpec(task=TASK, model=TINY, recipe=recipe, seed=seed, budget=chosen)


# --------------------------------------------------------------------------------------------------- one step, one batch
def step(chosen: RunSpec, ranks: Ranks, accumulate: int) -> Learner:
    """A learner after one optimiser step, stochastic methods off, in double precision throughout.

    In single precision Adam makes whole steps out of gradients that are nothing but rounding.
    """
    task = open_task(TASK)
    data = RunData(chosen, task, CPU, ranks)
    learner = Learner(chosen, task, CPU, accumulate, ranks, data.share)
    learner.model.train()
    if "drop" in chosen.recipe:
        learner.tempered.set_rate(0.0)
    for _, (inputs, targets) in zip(range(accumulate), data.epoch(1), strict=False):
        learner.learn(inputs.double(), targets)
    return learner


def compare_far(self: Any, first: Tensor, second: Tensor) -> Tensor:
    """In place of a divergence, which would be zero for two equal passes, something with a gradient for both."""
    return (first.sin() * second.exp()).square().mean(-1).mean()


def steps(parallel: Any, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """How far a step of the team is from one process's own, and what the meters say."""
    torch.set_default_dtype(torch.float64)
    Consistency.compare = compare_far  # type: ignore[method-assign]
    found = []
    with joined(parallel) as ranks:
        for recipe, budget in cases:
            chosen = spec(recipe, **budget)
            accumulate = chosen.budget.accumulate
            together, alone = step(chosen, ranks, accumulate), step(chosen, ALONE, accumulate)
            weights, expected = whole(together), alone.model.state_dict()
            readings = [each.meter.read() for each in (together, alone)]
            found.append(
                {
                    "far": max(float((weights[name] - expected[name]).abs().max()) for name in expected),
                    "moved": max(float((expected[name] - start).abs().max()) for name, start in begun(chosen).items()),
                    "weights": weights,
                    "readings": [(r.loss, r.accuracy, r.penalty) for r in readings],
                }
            )
    return found


def whole(learner: Learner) -> dict[str, Tensor]:
    from attemper.training.parallel import whole as whole_tensor

    return {name: whole_tensor(value.detach()) for name, value in learner.model.state_dict().items()}


def begun(chosen: RunSpec) -> dict[str, Tensor]:
    return dict(Learner(chosen, open_task(TASK), CPU).model.state_dict())


def assert_equal_steps(everybody: list[list[Any]], cases: list[Any]) -> None:
    for number, case in enumerate(cases):
        for rank, found in enumerate(everybody):
            assert found[number]["far"] < 1e-6 < found[number]["moved"], (case, rank, found[number]["far"])
            together, alone = found[number]["readings"]
            assert together == pytest.approx(alone, abs=1e-6), (case, rank)
            for name, value in found[number]["weights"].items():
                assert torch.equal(value, everybody[0][number]["weights"][name]), (case, rank, name)


CASES: list[tuple[str, dict[str, Any]]] = [
    *((recipe, {}) for recipe in PENALTIES),
    ("explicit(v=0.5, reduction=sum)", {"accumulate": 3, "clip": 0.1, "ema": 0.5, "batch_size": 9}),
    ("none", {"augment": "crop-flip(1)+mixup", "smoothing": 0.1, "optimizer": "adamw", "weight_decay": 0.1}),
]


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_of_several_processes_is_that_of_one_on_the_whole_batch(size: int) -> None:
    everybody = team(size, steps, None, CASES)  # 10 samples on four ranks: 3, 3, 2 and 2
    assert_equal_steps(everybody, CASES)


def test_a_step_of_a_sharded_model_is_that_of_one_process_too() -> None:
    cases = [CASES[0], CASES[2], CASES[6], CASES[7], CASES[9]]
    assert_equal_steps(team(2, steps, "fsdp", cases), cases)
