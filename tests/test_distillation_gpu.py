"""On a GPU: the teacher is captured with the step, and crops are those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attemper.lab.tasks.augment import parse_augmentation
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.data import RunData
from attemper.lab.training.graph import GraphedStep, can_capture
from attemper.lab.training.learner import Learner
from attemper.lab.training.loop import run
from attemper.lab.training.spec import RunSpec
from taught import TASK, TINY, TOKEN, saved, spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def unexpected(warning: str) -> None:
    raise AssertionError(warning)


def taught(folder: Path, model: str, **budget: Any) -> RunSpec:
    return spec(model=model, teacher_weights=saved(folder / "teacher.safetensors"), batch_size=30, **budget)


@pytest.mark.parametrize("model", [TINY, TOKEN])
@pytest.mark.parametrize("budget", [{"distillation": "soft"}, {"decay": "matrices", "optimizer": "adamw"}])
def test_a_captured_step_learns_from_the_teacher_as_the_plain_one_does(
    model: str, budget: dict[str, Any], tmp_path: Path
) -> None:
    device, task = torch.device("cuda"), open_task(TASK)
    chosen = taught(tmp_path, model, repeats=3, augment="resized-crop+mixup", **budget)
    data = RunData(chosen, task, device)
    plain, graphed = (Learner(chosen, task, device) for _ in range(2))
    assert can_capture(graphed, data)
    step = GraphedStep(graphed, unexpected)
    for inputs, targets in data.epoch(1):
        plain.learn(inputs, targets)
        step(inputs, targets)
    for ours, theirs in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert plain.meter.read().loss == pytest.approx(graphed.meter.read().loss, rel=1e-3)


def test_a_distilled_run_is_captured_and_finishes(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    result = run(taught(tmp_path, TOKEN, precision="bfloat16"), open_task(TASK), progress=events.append)
    assert result["status"] == "finished"
    assert not [event for event in events if "warning" in event]


@pytest.mark.parametrize("text", ["resized-crop", "randaugment(27, p=0.5, spread=1.5)", "erasing(1, fill=noise)"])
def test_a_batch_is_augmented_on_a_gpu_as_on_the_cpu(text: str) -> None:
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    targets = torch.zeros(64, dtype=torch.int64)
    augment = parse_augmentation(text)
    here, there = (
        augment(images.to(device), targets.to(device), classes=10, to_input=lambda x: x.float(), seed=3)[0].cpu()
        for device in ("cpu", "cuda")
    )
    far = (here - there).abs()
    assert float((far > 2).float().mean()) < 0.01, "rounding, and the nearest of two pixels that are equally near"
