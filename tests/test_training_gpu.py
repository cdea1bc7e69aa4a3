"""The training step in a CUDA graph: the same steps as without it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attemper.lab.tasks.registry import open_task
from attemper.lab.training.cost import step_costs
from attemper.lab.training.data import RunData
from attemper.lab.training.graph import GraphedStep, can_capture
from attemper.lab.training.learner import Learner
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TASK = "digits(train=200, test=50)"


def spec(recipe: str = "none", **budget: Any) -> RunSpec:
    given = {"epochs": 2, "batch_size": 32, "lr": 3e-3, "warmup_epochs": 1, **budget}
    return RunSpec(task=TASK, model="vit-digits(depth=2)", recipe=recipe, seed=0, budget=Budget(**given))


def unexpected(warning: str) -> None:
    raise AssertionError(warning)


@pytest.mark.parametrize("recipe", ["none", "cb(cb_s) + explicit(v=5e-4, ff=5e-4)"])
@pytest.mark.parametrize(
    "budget",
    [
        {},
        {"ema": 0.9, "clip": 1.0, "optimizer": "adamw"},
        {"augment": "crop-flip+mixup"},
        {"layer_decay": 0.5, "freeze": "stem"},
    ],
)
def test_captured_steps_are_the_steps_of_the_plain_loop(recipe: str, budget: dict[str, Any]) -> None:
    device = torch.device("cuda")
    task = open_task(TASK)
    data = RunData(spec(recipe, **budget), task, device)
    plain, graphed = (Learner(spec(recipe, **budget), task, device) for _ in range(2))
    assert can_capture(graphed, data)
    step = GraphedStep(graphed, unexpected)
    for index, (inputs, targets) in enumerate(data.epoch(1)):
        for learner in (plain, graphed):
            learner.set_lr(1e-3 * (index + 1))
        plain.learn(inputs, targets)
        step(inputs, targets)
    for ours, theirs in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert plain.meter.read().loss == pytest.approx(graphed.meter.read().loss, rel=1e-3)


def test_every_replay_draws_fresh_masks() -> None:
    device = torch.device("cuda")
    task = open_task(TASK)
    chosen = spec("dropkey(0.5)", lr=1e-12, weight_decay=0.0)
    learner = Learner(chosen, task, device)
    torch.nn.init.normal_(learner.model.head.weight)  # it starts at zero, and would hide everything
    step = GraphedStep(learner, unexpected)
    inputs, targets = next(RunData(chosen, task, device).epoch(1))
    learner.set_lr(0.0)
    losses = []
    for _ in range(4):
        learner.meter.reset()
        step(inputs, targets)
        losses.append(learner.meter.read().loss)
    assert len(set(losses)) == 4


def test_a_captured_step_follows_a_rate_that_ends() -> None:
    device = torch.device("cuda")
    task = open_task(TASK)
    chosen = spec("dropkey(0.5, until=0.5)", lr=1e-12, weight_decay=0.0)
    learner = Learner(chosen, task, device)
    torch.nn.init.normal_(learner.model.head.weight)
    step = GraphedStep(learner, unexpected)
    inputs, targets = next(RunData(chosen, task, device).epoch(1))
    learner.set_lr(0.0)
    losses = []
    for fraction in (0.0, 0.1, 0.6, 0.7):
        learner.tempered.progress(fraction)
        learner.meter.reset()
        step(inputs, targets)
        losses.append(learner.meter.read().loss)
    assert losses[0] != losses[1]
    assert losses[2] == pytest.approx(losses[3], rel=1e-5)


def test_accumulation_and_cpus_go_without_a_graph() -> None:
    task = open_task(TASK)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    both = spec(accumulate=2)
    assert not can_capture(Learner(both, task, cuda, 2), RunData(both, task, cuda))
    assert not can_capture(Learner(spec(), task, cpu), RunData(spec(), task, cpu))


@pytest.mark.parametrize(
    "recipe", ["none", "dropkey(0.1)", "cb", "explicit(v=5e-4, ff=5e-4)", "dropkey(0.1) + rdrop", "dropkey(learn)"]
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_on_a_gpu_is_captured_and_finishes(recipe: str, precision: str, tmp_path: Any) -> None:
    events: list[dict[str, Any]] = []
    result = run(spec(recipe, precision=precision), open_task(TASK), folder=tmp_path, progress=events.append)
    assert result["status"] == "finished"
    assert not [event for event in events if "warning" in event]
    assert result["timing"]["peak_memory"] > 0


def test_a_run_on_a_gpu_resumes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attemper.lab.training.loop.CHECKPOINT_EVERY", 0.0)

    def stop(event: dict[str, Any]) -> None:
        if event["validation"]:
            raise KeyboardInterrupt

    chosen = spec("dropkey(0.1)", ema=0.9)
    with pytest.raises(KeyboardInterrupt):
        run(chosen, open_task(TASK), folder=tmp_path, progress=stop)
    resumed = run(chosen, open_task(TASK), folder=tmp_path)
    whole = run(dataclasses.replace(chosen), open_task(TASK))
    assert resumed["curve"][1]["train_loss"] == pytest.approx(whole["curve"][1]["train_loss"], rel=0.02)


def test_costs_on_a_gpu_have_memory() -> None:
    costs = step_costs(["dropkey(0.1)"], open_task(TASK), "vit-digits", Budget(batch_size=32), rounds=3)
    assert all(cost["peak_memory"] for cost in costs.values())
