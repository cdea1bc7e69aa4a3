"""Training: one run from its description to its result."""

from attemper.training.check import check_run
from attemper.training.checkpoint import CHECKPOINT, StorageError
from attemper.training.cost import Cost, step_costs
from attemper.training.loop import Progress, run
from attemper.training.ranks import RankError, joined
from attemper.training.spec import Budget, RunSpec
from attemper.training.teacher import settled

__all__ = [
    "CHECKPOINT",
    "Budget",
    "Cost",
    "Progress",
    "RankError",
    "RunSpec",
    "StorageError",
    "check_run",
    "joined",
    "run",
    "settled",
    "step_costs",
]
