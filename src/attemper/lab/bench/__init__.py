"""What regularised attention costs on a machine: the operator by shape, and whole training steps.

`bench_ops` and `bench_step` measure and give a report back; `save` and `load` keep it as JSON. `commands.py` has both
as commands. What measures is loaded when it is asked for, so that the command line does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attemper.lab.bench.options import OpsPlan, StepPlan
from attemper.lab.bench.results import OpsReport, OpsRow, Shape, StepReport, StepRow, load, save

if TYPE_CHECKING:
    from attemper.lab.bench.ops import bench_ops
    from attemper.lab.bench.step import bench_step

__all__ = [
    "OpsPlan",
    "OpsReport",
    "OpsRow",
    "Shape",
    "StepPlan",
    "StepReport",
    "StepRow",
    "bench_ops",
    "bench_step",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in ("bench_ops", "bench_step"):
        return getattr(importlib.import_module(f"attemper.lab.bench.{name.removeprefix('bench_')}"), name)
    raise AttributeError(f"module 'attemper.lab.bench' has no attribute '{name}'")
