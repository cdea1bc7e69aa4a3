"""Training: one run from its description to its result.

Names are loaded when they are asked for, so that the command line knows a budget's options without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attemper.lab.training.check import check_run
    from attemper.lab.training.checkpoint import CHECKPOINT
    from attemper.lab.training.cost import Cost, step_costs
    from attemper.lab.training.loop import Progress, run
    from attemper.lab.training.ranks import joined
    from attemper.lab.training.spec import Budget, RunSpec
    from attemper.lab.training.teacher import with_teacher_hash

__all__ = [
    "CHECKPOINT",
    "Budget",
    "Cost",
    "Progress",
    "RunSpec",
    "check_run",
    "joined",
    "run",
    "step_costs",
    "with_teacher_hash",
]

HOMES = {
    "check": ("check_run",),
    "checkpoint": ("CHECKPOINT",),
    "cost": ("Cost", "step_costs"),
    "loop": ("Progress", "run"),
    "ranks": ("joined",),
    "spec": ("Budget", "RunSpec"),
    "teacher": ("with_teacher_hash",),
}


def __getattr__(name: str) -> Any:
    for home, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"attemper.lab.training.{home}"), name)
    raise AttributeError(f"module 'attemper.lab.training' has no attribute '{name}'")
