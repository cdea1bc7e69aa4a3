"""Runs with random methods that go on with another number of processes: other draws, within the noise of seeds."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from attemper.lab.tasks.registry import open_task
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from teams import DIED, team
from test_distributed_runs import train

pytestmark = pytest.mark.usefixtures("one_thread")

TASK = "digits(train=500, test=300)"
MODEL = "vit-digits(depth=2, width=32, heads=2, mlp=32)"
EPOCHS, STEPS = 4, 17
SEEDS = 5


def spec(recipe: str, seed: int) -> RunSpec:
    budget = Budget(epochs=EPOCHS, batch_size=20, lr=1.5e-2, warmup_epochs=1)
    return RunSpec(task=TASK, model=MODEL, recipe=recipe, seed=seed, budget=budget)


def figures(result: dict[str, Any]) -> dict[str, float]:
    """What a run reached, and how it trained after the interruption."""
    reached = {f"{part} {name}": result[part][name] for part in ("validation", "test") for name in ("loss", "accuracy")}
    return reached | {f"train loss {entry['epoch']}": entry["train_loss"] for entry in result["curve"][EPOCHS // 2 :]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["dropkey(0.1) + hardmask(0.1) + layerdrop(0.1)", "dropattention(0.1) + drophead(0.1) + droppath(0.1)"]
)
def test_a_run_that_goes_on_with_other_processes_differs_by_less_than_seeds_do(recipe: str, tmp_path: Path) -> None:
    task = open_task(TASK)
    undisturbed = [figures(run(spec(recipe, seed), task, device="cpu")) for seed in range(SEEDS)]
    answers = team(2, train, tmp_path / "2", spec(recipe, 0), None, (1, EPOCHS // 2 * STEPS + 5))
    assert answers[1] == DIED
    for size in (1, 4):
        folder = shutil.copytree(tmp_path / "2", tmp_path / str(size))
        (result, warnings), *_ = team(size, train, folder, spec(recipe, 0))
        assert "was written by 2 processes" in warnings[0]
        assert len(result["curve"]) == EPOCHS
        found = figures(result)
        assert found["train loss 4"] != undisturbed[0]["train loss 4"], "masks are drawn anew"
        for name, value in found.items():
            spread = statistics.stdev(each[name] for each in undisturbed)
            assert abs(value - undisturbed[0][name]) < 3 * spread, (size, name)
