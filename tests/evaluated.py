"""A digits model that was trained for a moment, and an evaluation that was made up, for tests of evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attemper.lab.evaluation.metrics import Bin
from attemper.lab.evaluation.runs import FinishedRun, load_run
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec

SMALL = "robustness(epsilon=0.05, steps=2, occlusion=0.25, corruptions=['fog', 'contrast'])"
ALL = ("calibration", SMALL, "stochastic(passes=2)")
"""Every suite, small."""

SPEC = RunSpec(
    task="digits",
    model="vit-digits(depth=2)",
    recipe="dropkey(0.1)",
    seed=0,
    budget=Budget(epochs=10, batch_size=32, lr=3e-3, warmup_epochs=1.0),
)


def trained_digits(folder: Path) -> FinishedRun:
    run(SPEC, open_task("digits"), folder=folder, device="cpu")
    return load_run(folder)


def made_up(accuracy: float, shift: float = 0.0) -> dict[str, Any]:
    """An evaluation as runs have it."""
    bins = [
        Bin(low=0.0, high=0.5, count=10, confidence=0.4, accuracy=0.4 + shift),
        Bin(low=0.5, high=1.0, count=0, confidence=None, accuracy=None),
    ]
    attacks = [{"kind": kind, "epsilon": 8 / 255, "accuracy": 0.2 + shift, "nll": 2.0} for kind in ("fgsm", "pgd")]
    occlusion = [{"kind": "centre", "share": 0.5, "accuracy": 0.5 + shift, "nll": 1.0}]
    corruptions = [{"kind": "fog", "severity": s, "accuracy": 0.9 - 0.1 * s, "nll": 1.0} for s in range(1, 6)]
    return {
        "suites": ["calibration", "robustness"],
        "images": 10,
        "accuracy": accuracy,
        "top5": None,
        "nll": 0.5,
        "calibration": {"brier": 0.25, "ece": 0.1 + shift, "bins": bins},
        "robustness": {"occlusion": occlusion, "attacks": attacks, "corruptions": corruptions},
        "corruption_constants": {"set": "CIFAR-10-C", "side": 32, "exact": True},
        "gap": {"accuracy": 0.05, "nll": None},
    }
