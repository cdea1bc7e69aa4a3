"""Figures of `attemper bench` mean what they say, and measuring changes nothing."""

from __future__ import annotations

import dataclasses
import importlib
import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attemper.lab.bench import ops as ops_module
from attemper.lab.bench.ops import bench_ops
from attemper.lab.bench.options import OpsPlan, StepPlan
from attemper.lab.bench.results import Machine, Shape
from attemper.lab.bench.step import StepBench, bench_step
from attemper.lab.bench.targets import ops_target, step_target
from attemper.lab.bench.timing import CpuStopwatch, Deadline, Prepared, interleaved, interval, peak_bytes_on_cpu
from attemper.lab.bench.vit_models import make_vit
from attemper.ops import reference
from test_bench import NAME, QUICK, TINY

attention_module = importlib.import_module("attemper.ops.dispatch")  # the package has a function of that name

pytestmark = pytest.mark.usefixtures("no_profiler")
H200 = Machine(device="NVIDIA H200", cpu="", threads=None, versions={"torch": "2.11.0"})


class PresetStopwatch(CpuStopwatch):
    """Runs every step once, then says that runs took the times it was given, one after another in turns."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__("wall")
        self.given = iter(seconds)

    def prepare(self, step: Any) -> Prepared:
        step()
        return Prepared(step, 2**20)

    def seconds(self, prepared: Prepared) -> float:
        if not hasattr(self, "known"):
            self.known: dict[int, float] = {}
        if id(prepared) not in self.known:
            self.known[id(prepared)] = next(self.given)
        return self.known[id(prepared)]


def test_ratios_are_to_the_fastest_of_torchs_kernels_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [9.0, 4.0, 2.0, 1.0, 3.0, 6.0, 0.5]  # a product; flash, math, math with dropout, sdpa, tiled, reference
    stopwatch = PresetStopwatch(seconds)
    monkeypatch.setattr(ops_module, "make_stopwatch", lambda device, clock: stopwatch)
    report = bench_ops(OpsPlan(shapes=(NAME,), backends=("flash", "math"), methods=("none",), **QUICK))
    ratios = {(r.family, r.name, r.recipe): r.ratio for r in report.rows if r.ratio is not None}
    assert ratios == {
        ("stock", "flash", "none"): 2.0,
        ("stock", "math", "none"): 1.0,
        ("stock", "math", "dropout(0.1)"): 0.5,
        ("attemper", "sdpa", "none"): 1.5,
        ("attemper", "tiled", "none"): 3.0,
        ("attemper", "reference", "none"): 0.25,
    }
    assert report.ceiling_tflops == pytest.approx(2 * 1024**3 / 9 / 1e12)
    flash = report.rows[0]
    assert flash.milliseconds == 4000.0
    assert flash.tflops == pytest.approx(14 * 2 * 2 * 9**2 * 8 / 4 / 1e12)
    assert flash.ceiling_share == pytest.approx(flash.tflops / report.ceiling_tflops)


def test_errors_are_those_of_the_candidate_against_the_float64_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = OpsPlan(shapes=("1x2x17x8",), backends=("math",), methods=("dropkey(0.3)",), **QUICK)
    right = [r.error for r in bench_ops(plan).rows if r.name == "reference"]
    assert right[0] is not None
    assert 0 < right[0] < 1e-5

    def wrong(call: Any) -> Any:  # forgets the methods
        return F.scaled_dot_product_attention(call.q, call.k, call.v)

    added = types.ModuleType("wrong")
    added.refuse, added.attention = reference.refuse, wrong  # type: ignore[attr-defined]
    monkeypatch.setitem(attention_module.IMPLEMENTATIONS, "wrong", added)
    found = [r.error for r in bench_ops(plan).rows if r.name == "wrong"]
    assert found[0] is not None
    assert found[0] > 0.1


def test_candidates_take_turns_in_an_order_that_changes() -> None:
    seen: list[int] = []
    timers = [lambda at=at: float(seen.append(at) or at) for at in range(3)]  # type: ignore[func-returns-value, misc]
    times, _ = interleaved(timers, rounds=6)
    rounds = [tuple(seen[at : at + 3]) for at in range(0, len(seen), 3)]
    assert len(rounds) == 7, "one round to warm up"
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    assert len(set(rounds)) > 3
    assert times.tolist() == [[0.0, 1.0, 2.0]] * 6


def test_the_interval_holds_the_median_and_shrinks_with_the_spread() -> None:
    ratios = np.random.default_rng(0).normal(1.0, 0.1, 200)
    low, high = interval(ratios)
    assert low < np.median(ratios) < high
    assert high - low < 0.1
    assert interval(np.ones(5)) == (1.0, 1.0)


def test_peak_memory_on_a_cpu_counts_what_is_alive_at_once() -> None:
    def step() -> None:
        for _ in range(3):
            torch.empty(2**20, dtype=torch.float32)
        both = [torch.empty(2**18, dtype=torch.float32) for _ in range(2)]
        del both

    assert peak_bytes_on_cpu(step) == 4 * 2**20


def test_the_memory_of_a_step_includes_parameters_and_optimiser_state() -> None:
    report = bench_step(StepPlan(methods=("blur",), batch=1, **QUICK), sizes=TINY)
    weights = sum(p.numel() for p in make_vit(TINY, "timm").parameters())
    assert report.rows[0].peak_mib == pytest.approx(1 + 3 * 4 * weights / 2**20, rel=0.01)


def test_a_step_measures_the_same_model_in_every_round() -> None:
    bench = StepBench(
        TINY,
        "timm",
        torch.randn(2, 3, 16, 16),
        torch.tensor([0, 1]),
        torch.float32,
        CpuStopwatch(),
        Deadline(None),
        print,
    )
    trained = bench.build("none")
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    bench.make_step(trained, "eager")()
    assert all(torch.equal(value, before[name]) for name, value in trained.model.state_dict().items())
    assert trained.optimiser.state, "the optimiser has run"


def test_measuring_leaves_threads_and_the_random_numbers_as_they_were() -> None:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    bench_ops(
        OpsPlan(shapes=(NAME,), backends=("math",), methods=("dropkey",), device="cpu", rounds=2, threads=before + 1)
    )
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_targets_are_those_of_one_machine() -> None:
    assert ops_target(H200, "dropkey(0.1)", Shape(256, 6, 197, 64)) == 0.90
    assert step_target(H200, "graying(svd)", "compiled") == 1.10
    assert step_target(H200, "graying(svd)", "eager") is None
    other = dataclasses.replace(H200, device="2-core x86 CPU")
    assert ops_target(other, "dropkey(0.1)", Shape(256, 6, 197, 64)) is None
    assert step_target(other, "graying(svd)", "compiled") is None


def test_figures_so_far_are_written_after_every_shape() -> None:
    seen: list[int] = []
    plan = OpsPlan(shapes=(NAME, "1x1x5x8"), backends=("math",), methods=("none",), **QUICK)
    bench_ops(plan, after_shape=lambda report: seen.append(len({r.shape for r in report.rows})))
    assert seen == [1, 2]


def test_progress_is_told_and_only_grows() -> None:
    told: list[float] = []
    bench_ops(
        OpsPlan(shapes=(NAME, "1x1x5x8"), backends=("math",), methods=("none",), **QUICK),
        progress=lambda share, what: told.append(share),
    )
    bench_step(
        StepPlan(methods=("cb",), batch=1, **QUICK), sizes=TINY, progress=lambda share, what: told.append(1 + share)
    )
    assert told == sorted(told)
    assert told[-1] == 2.0
