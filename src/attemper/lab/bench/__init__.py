"""What regularised attention costs on a machine: the operator by shape, and whole training steps.

`bench_ops` and `bench_step` measure and give a report back; `save` and `load` keep it as JSON. `commands.py` has both
as commands.
"""

from attemper.lab.bench.ops import OpsPlan, bench_ops
from attemper.lab.bench.results import OpsReport, OpsRow, Shape, StepReport, StepRow, load, save
from attemper.lab.bench.step import StepPlan, bench_step

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
