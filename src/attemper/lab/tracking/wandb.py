"""Weights & Biases, and trackio, which has the same functions and needs no account."""

import importlib
from collections.abc import Mapping
from typing import Any

from attemper.lab.tracking.base import TrackedRun


class WandbLike:
    """Sends curves through a module with `init`, `log` and `finish`. A run keeps its name when it is resumed."""

    def __init__(self, module: str, **options: Any) -> None:
        self._module: Any = importlib.import_module(module)
        self._options = options
        self._step = 0

    def start(self, run: TrackedRun, step: int) -> None:
        given = {name: value(run) if callable(value) else value for name, value in self._options.items()}
        self._module.init(project=run.project, config=dict(run.config), resume="allow", **given)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._step = step
        self._module.log(dict(values), step=step)

    def finish(self, values: Mapping[str, float]) -> None:
        if values:
            self.log(values, self._step)
        self._module.finish()


def wandb() -> WandbLike:
    """Weights & Biases: its own variables say where to, such as WANDB_MODE=offline."""
    return WandbLike("wandb", id=lambda run: run.key, name=lambda run: run.name, dir=lambda run: str(run.folder))


def trackio() -> WandbLike:
    """trackio, which knows a run by its name: the key makes it one of its own."""
    return WandbLike("trackio", name=lambda run: f"{run.name} ({run.key[:6]})")
