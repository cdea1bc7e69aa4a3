"""Training: one run from its description to its result."""

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
