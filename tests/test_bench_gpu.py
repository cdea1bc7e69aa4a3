"""`attemper bench` on a GPU."""

from __future__ import annotations

import pytest
import torch

from attemper.lab.bench.loop import bench_loop
from attemper.lab.bench.ops import bench_ops
from attemper.lab.bench.options import LoopPlan, OpsPlan, StepPlan
from attemper.lab.bench.step import bench_step
from attemper.lab.bench.tables import failures
from attemper.lab.bench.timing import CudaStopwatch
from test_bench import TINY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_on_a_gpu_every_candidate_of_a_short_sequence_runs_from_a_graph() -> None:
    report = bench_ops(OpsPlan(device="cuda", shapes=("4x2x65x32",), rounds=3))
    served = [r for r in report.rows if r.failure is None]
    assert {"stock", "flex", "listing", "attemper"} == {r.family for r in served}
    assert all(r.captured for r in served), [str(r) for r in served if not r.captured]
    assert all(r.error < 0.02 for r in served if r.error is not None)
    assert report.head.clock == "cuda events"


def test_on_a_gpu_memory_is_what_a_pass_adds() -> None:
    stopwatch = CudaStopwatch(torch.device("cuda"))
    kept = torch.ones(2**20, device="cuda")
    assert stopwatch.prepare(lambda: kept + 1).peak_bytes == 4 * 2**20


def test_on_a_gpu_running_out_of_memory_is_a_row_and_the_next_shape_is_measured() -> None:
    shapes = ("4x8x49152x64", "4x2x65x32")
    report = bench_ops(OpsPlan(device="cuda", shapes=shapes, methods=("none",), backends=("flash", "math"), rounds=2))
    reasons = [r.failure or "" for r in report.rows if r.name == "math" and r.shape.tokens == 49152]
    assert all("out of memory" in reason for reason in reasons)
    assert all(r.ratio is not None for r in report.rows if r.name == "math" and r.shape.tokens == 65)


def test_on_a_gpu_a_step_is_measured_eager_and_compiled() -> None:
    report = bench_step(StepPlan(device="cuda", methods=("dropkey", "cb"), batch=4, rounds=2), sizes=TINY)
    assert not failures(report)
    assert {r.mode for r in report.rows} == {"eager", "compiled"}


def test_on_a_gpu_loops_are_measured_eager() -> None:
    plan = LoopPlan(device="cuda", cells=("call:8:eager", "vit-s:8:eager"), methods=("dropkey",), rounds=2, steps=1)
    report = bench_loop(plan)
    assert not failures(report)
    assert all(row.host_milliseconds is not None and row.peak_mib for row in report.rows)
