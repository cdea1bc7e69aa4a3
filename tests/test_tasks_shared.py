"""Tasks whose samples are more than an image and a class: several processes find the metrics of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attemper.lab.models.registry import build_model
from attemper.lab.tasks.registry import STAND_INS, open_task
from attemper.lab.tasks.seed_streams import drawing_from
from attemper.lab.training.data import RunData
from attemper.lab.training.ranks import joined
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.validation import measure
from teams import team

pytestmark = pytest.mark.usefixtures("one_thread")

TASKS = {
    "vqa:shapes(train=100, test=41)": "two-stream(width=16, heads=2, depth=1, image_depth=1)",
    "mae:digits(train=100, test=41)": "vit-mae(width=16, heads=2, depth=1, mlp=32, decoder_depth=1)",
}


def found() -> dict[str, Any]:
    """By task: the metrics of an untrained model, and this process's part of the first batch."""
    torch.set_num_threads(1)
    answers: dict[str, Any] = {}
    with joined(None) as ranks:
        for name, text in TASKS.items():
            task = open_task(name)
            with drawing_from(0):
                model = build_model(text, task.shape).eval()
            with torch.no_grad():
                metrics = measure(model, task, task.test(), ranks)
            augment = "shift(1)" if name.startswith("vqa") else "crop-flip(1)"
            budget = Budget(epochs=2, batch_size=21, warmup_epochs=0.5, augment=augment)
            spec = RunSpec(task=name, model=text, recipe="none", seed=1, budget=budget)
            batch = next(RunData(spec, task, torch.device("cpu"), ranks).epoch(1))
            answers[name] = metrics, [part.tolist() for part in batch]
    return answers


def test_two_processes_find_the_metrics_and_see_the_batches_of_one() -> None:
    alone = found()
    first, second = team(2, found)
    for name, (metrics, batch) in alone.items():
        for metrics_of_rank in (first[name][0], second[name][0]):
            assert metrics_of_rank == pytest.approx(metrics, rel=1e-6)
        for whole, one, other in zip(batch, first[name][1], second[name][1], strict=True):
            assert one + other == whole


@pytest.mark.parametrize("kind", STAND_INS)
def test_a_plan_of_every_kind_has_a_task_without_files_to_be_measured_on(kind: str) -> None:
    task = open_task(f"{STAND_INS[kind]}(size=32, train=12, test=4)")
    assert len(task.test()) == 4
    inputs, targets = task.shape.example(2)
    assert len(inputs) == len(targets) == 2
