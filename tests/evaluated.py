"""A digits model that was trained for a moment, for tests of what can be measured on it."""

from __future__ import annotations

from pathlib import Path

from attemper.evaluation.runs import FinishedRun, load_run
from attemper.tasks import open_task
from attemper.training import Budget, RunSpec, run

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
