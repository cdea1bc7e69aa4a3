"""Experiments so small that a test can run them."""

from __future__ import annotations

from typing import Any

from attemper.lab.experiments.catalogue import choose_arms, find_experiment
from attemper.lab.experiments.running import run_experiment
from attemper.lab.experiments.runs import ArmRun
from attemper.lab.tasks.base import InputShape
from attemper.lab.training.spec import Budget

TASK = "digits(test=100, train=300)"
MODELS = {
    "VIT": "vit-digits(depth=2, width=16, heads=2, mlp=16)",
    "MIXER": "convmixer(width=8, depth=2, kernel=3)",
    "RESNET": "resnet(width=4, depth=8)",
}
BUDGET = Budget(epochs=2, batch_size=64, warmup_epochs=0)
SHAPE = InputShape(1, 8, 8, 10)


def experiment(name: str, task: Any, **more: Any) -> dict[str, Any]:
    return run_experiment(name, task, **{"budget": BUDGET, "seeds": 1, "models": MODELS, "device": "cpu", **more})


def one(name: str, arm: str, seed: int = 0) -> ArmRun:
    (chosen,) = choose_arms(find_experiment(name), [arm])
    return ArmRun(name, chosen, seed, TASK, BUDGET, MODELS)
