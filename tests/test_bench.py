"""`attemper bench`: everything that can be measured is, and what cannot says why."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import attemper
from attemper.errors import AttemperError, ParameterError, UnknownMethodError
from attemper.lab.bench import candidates as candidates_module
from attemper.lab.bench import timing
from attemper.lab.bench.candidates import BACKENDS, RATE, candidates, flex_dropkey, listing
from attemper.lab.bench.default_recipes import ops_recipes, step_recipes
from attemper.lab.bench.ops import bench_ops
from attemper.lab.bench.options import OpsPlan, StepPlan
from attemper.lab.bench.results import Shape
from attemper.lab.bench.shapes import CPU_SHAPES, CUDA_SHAPES
from attemper.lab.bench.step import TWIN, bench_step, compiled
from attemper.lab.bench.tables import failures
from attemper.lab.bench.targets import OPS, STEP
from attemper.lab.bench.timing import CudaStopwatch, Deadline, interleaved
from attemper.lab.bench.vit_models import BASE, LIBRARIES, SMALL, ViT, make_vit
from attemper.methods import DropKey
from attemper.ops import reference

attention_module = importlib.import_module("attemper.ops.dispatch")  # the package has a function of that name

pytestmark = pytest.mark.usefixtures("no_profiler")
TINY = ViT("tiny", image=16, patch=8, width=16, blocks=2, heads=2, classes=4)
QUICK: dict[str, Any] = {"device": "cpu", "rounds": 2, "threads": 1}
SIZES = Shape(2, 2, 9, 8)
NAME = "2x2x9x8"


# What is measured.


def test_ops_measures_every_implementation_and_every_backend_or_says_why_not() -> None:
    report = bench_ops(
        OpsPlan(shapes=(NAME,), backends=("cudnn", "flash", "efficient", "math", "flex", "listing"), **QUICK)
    )
    q = torch.zeros(SIZES.sizes)
    for recipe in ops_recipes():
        found = {r.name: r for r in report.rows if r.family == "attemper" and r.recipe == recipe}
        for verdict in attemper.implementations(q, q, q, methods=attemper.parse(recipe)):  # type: ignore[arg-type]
            assert found[verdict.name].chosen == verdict.chosen
            assert (found[verdict.name].milliseconds is not None) == verdict.serves
            assert found[verdict.name].failure == (None if verdict.serves else verdict.reason)
    stock = {(r.name, r.recipe) for r in report.rows if r.family == "stock"}
    assert stock == set(itertools.product(("cudnn", "flash", "efficient", "math"), ("none", f"dropout({RATE})")))
    assert {r.recipe for r in report.rows if r.family == "flex"} == {"none", f"dropkey({RATE})"}
    assert all((r.failure is None) != (r.milliseconds is None) for r in report.rows)


def test_ops_measures_dropkey_shared_or_not_hard_masking_of_five_and_blur_unless_told_otherwise() -> None:
    methods = [attemper.parse(recipe) for recipe in ops_recipes()]
    wanted = ["none", "dropkey(0.1)", "dropkey(0.3, share=heads)", "hardmask(0.1, k=5)", "blur"]
    assert methods == [attemper.parse(recipe) for recipe in wanted]


def test_an_implementation_that_is_added_to_attemper_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    added = types.ModuleType("gather")
    added.refuse, added.attention = reference.refuse, reference.attention  # type: ignore[attr-defined]
    monkeypatch.setitem(attention_module.IMPLEMENTATIONS, "gather", added)
    report = bench_ops(OpsPlan(shapes=(NAME,), backends=("math",), methods=("dropkey(0.2)",), **QUICK))
    measured = [r.name for r in report.rows if r.family == "attemper" and r.milliseconds is not None]
    assert "gather" in measured


def test_a_step_is_measured_for_every_method_that_there_is_at_settings_that_act() -> None:
    recipes = [attemper.parse(recipe) for recipe in step_recipes()]
    names = {method.name for methods in recipes for method in methods}
    assert names == {method.name for method in attemper.list_methods()}
    assert not any(method.idle for methods in recipes for method in methods)


def test_every_target_is_of_something_that_is_measured() -> None:
    assert set(OPS) <= set(ops_recipes())
    assert set(STEP) <= set(step_recipes())
    sizes = {(shape.tokens, shape.width) for shape in CUDA_SHAPES.values()}
    assert all(set(by_size) == sizes for by_size in OPS.values())


def test_a_step_has_figures_for_none_its_twin_and_every_recipe() -> None:
    plan = StepPlan(methods=("dropkey", "cb", "explicit(v=1e-3)", "ffdropout(0.1) + rdrop"), batch=2, **QUICK)
    report = bench_step(plan, sizes=TINY)
    wanted = ["none", TWIN, *step_recipes(plan.methods)]
    assert [r.recipe for r in report.rows] == wanted
    assert not failures(report)
    for r in report.rows:
        assert r.ratio is not None
        assert r.low is not None
        assert r.high is not None
        assert r.low <= r.ratio <= r.high
        assert r.milliseconds is not None
        assert r.samples_per_s == pytest.approx(2 / r.milliseconds * 1e3)
    assert report.rows[0].ratio == report.rows[0].memory_ratio == 1.0


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_model_of_either_library_has_the_sizes_that_the_report_names(library: str) -> None:
    model = make_vit(SMALL, library)
    weights = sum(p.numel() for p in model.parameters())
    per_block = 12 * SMALL.width**2
    assert SMALL.blocks * per_block < weights < 1.05 * SMALL.blocks * per_block
    assert model(torch.zeros(1, 3, SMALL.image, SMALL.image)).shape == (1, SMALL.classes)
    assert "197 tokens" in str(BASE)


def test_models_of_many_recipes_are_each_compiled_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would take them for one function, and after eight of them run the rest eagerly."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    models = [torch.nn.Linear(4, width) for width in range(1, 13)]
    forwards = [compiled(model) for model in models]
    x = torch.randn(2, 4)
    for _ in range(2):
        for model, forward in zip(models, forwards, strict=True):
            torch.testing.assert_close(forward(x), model(x))
    assert counter.frame_count == len(models)


# What is compared with computes what its name says.


def test_the_papers_listing_is_attention_where_it_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, 3, 17, 8) for _ in range(3))
    monkeypatch.setattr(candidates_module, "RATE", 0.0)
    torch.testing.assert_close(listing(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_the_papers_listing_drops_keys_before_softmax() -> None:
    q, k, v = torch.zeros(1, 64, 64, 8), torch.zeros(1, 64, 64, 8), torch.eye(64).expand(1, 64, 64, 64)
    weights = listing(q, k, v)
    assert (weights == 0).double().mean().item() == pytest.approx(RATE, abs=0.005)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 64, 64))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flexattention_drops_the_keys_that_attemper_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates_module, "draw_seed", lambda where: torch.tensor(5))
    q, k, v = (torch.randn(2, 3, 33, 16) for _ in range(3))
    wanted = attemper.attention(q, k, v, methods=[DropKey(RATE)], seed=5)
    torch.testing.assert_close(flex_dropkey(q, k, v), wanted)


def test_every_candidate_that_serves_computes_attention_of_the_right_shape() -> None:
    q, k, v = (torch.randn(SIZES.sizes) for _ in range(3))
    for candidate in candidates(q, k, v, ("math", "listing"), ops_recipes()):
        if candidate.make is not None:
            assert candidate.make()(q, k, v).shape == SIZES.sizes, candidate


# What cannot be measured.


def test_an_implementation_that_breaks_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 61.00 GiB. GPU 0 has …")

    monkeypatch.setattr(attention_module.IMPLEMENTATIONS["sdpa"], "attention", broken)
    report = bench_ops(OpsPlan(shapes=(NAME,), backends=("math",), methods=("none",), **QUICK))
    found = {r.name: r for r in report.rows if r.family == "attemper"}
    assert found["sdpa"].failure == "out of memory: Tried to allocate 61.00 GiB. GPU 0 has …"
    assert found["sdpa"].milliseconds is None
    assert found["reference"].ratio is not None


def test_a_call_that_torch_has_no_kernel_for_says_what_torch_said() -> None:
    report = bench_ops(OpsPlan(shapes=(NAME,), backends=("flash",), methods=("none",), **QUICK))
    reasons = [r.failure for r in report.rows if (r.family, r.recipe) == ("stock", "dropout(0.1)")]
    assert reasons == ["no kernel for this call; Both fused kernels do not support non-zero dropout."]


def test_a_method_that_does_not_fit_the_shape_is_a_row_that_says_why() -> None:
    report = bench_ops(OpsPlan(shapes=("1x1x3x8",), backends=("math",), methods=("hardmask(0.1, k=5)",), **QUICK))
    reasons = [r.failure for r in report.rows if r.name == "reference"]
    assert reasons == ["k=5 is more than the number of keys, 3; give k up to that, or a fraction of the keys"]


def test_a_compiler_that_fails_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **options: Any) -> Any:
        raise RuntimeError("no C++ compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    report = bench_ops(OpsPlan(shapes=(NAME,), backends=("math", "listing-compiled"), methods=("none",), **QUICK))
    assert [r.failure for r in report.rows if r.family == "listing"] == ["no C++ compiler"]
    plan = StepPlan(methods=("cb",), modes=("eager", "compiled"), batch=1, **QUICK)
    step = bench_step(plan, sizes=TINY)
    assert {(r.mode, r.failure) for r in step.rows} == {("eager", None), ("compiled", "no C++ compiler")}


def test_a_candidate_that_fails_during_the_rounds_leaves_the_others_their_figures() -> None:
    calls = itertools.count()

    def fails_later() -> float:
        if next(calls) > 1:
            raise RuntimeError("gave up")
        return 1.0

    times, why = interleaved([lambda: 2.0, fails_later, lambda: 3.0], rounds=4)
    assert why == {1: "gave up"}
    assert times[:, [0, 2]].tolist() == [[2.0, 3.0]] * 4
    assert np.isnan(times[-1, 1])


def test_a_time_limit_leaves_rows_that_say_so() -> None:
    report = bench_ops(OpsPlan(shapes=(NAME,), backends=("math",), methods=("blur",), minutes=1e-9, **QUICK))
    assert {r.failure for r in report.rows if r.failure and "limit" in r.failure} == {Deadline(1e-9).reason}
    step = bench_step(StepPlan(methods=("cb", "blur"), batch=1, minutes=1e-9, **QUICK), sizes=TINY)
    assert [r.failure is None for r in step.rows] == [True, False, False, False]


def test_a_step_is_prepared_only_if_that_leaves_time_for_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def passed(self: Deadline, ahead: float = 0.0) -> bool:
        asked.append(ahead)
        return len(asked) == 4  # which is when the last recipe is about to be prepared

    monkeypatch.setattr(Deadline, "passed", passed)
    step = bench_step(StepPlan(methods=("cb", "blur"), batch=1, **QUICK), sizes=TINY)
    assert [r.failure is None for r in step.rows] == [True, True, True, False]
    ahead = asked[:4]  # then come the rounds, which only ask whether the time is over
    assert ahead[0] == 0.0
    assert ahead == sorted(set(ahead))
    assert set(asked[4:]) <= {0.0}


def test_a_deadline_looks_ahead() -> None:
    assert [Deadline(1.0).passed(ahead) for ahead in (0.0, 50.0, 61.0)] == [False, False, True]
    assert not Deadline(None).passed(1e9)


@pytest.mark.parametrize(
    ("plan", "allowed"),
    [
        (OpsPlan(shapes=("64x32",), device="cpu"), ["64x32", *CPU_SHAPES]),
        (OpsPlan(shapes=("0x1x1x1",)), ["0x1x1x1"]),
        (
            OpsPlan(shapes=("65536x64x65536x128",), backends=("math",), rounds=2, device="cpu"),
            ["65536, 64, 65536, 128"],
        ),
        (OpsPlan(backends=("fa2",)), ["fa2", *BACKENDS]),
        (OpsPlan(backends=("flex",)), ["flex", "cudnn", "math"]),
        (OpsPlan(methods=("dropkye",)), ["dropkye", *(m.name for m in attemper.list_methods())]),
        (OpsPlan(methods=("cb",)), ["DropKey(0.1)", "ContextBroadcast"]),
        (OpsPlan(methods=("dropkey(0.1, schedule=decreasing)",)), ["dropkey(0.1, schedule=decreasing)"]),
        (OpsPlan(rounds=1), ["rounds", "2", "1"]),
        (OpsPlan(clock="sun"), ["wall", "cpu", "sun"]),  # type: ignore[arg-type]
        (OpsPlan(threads=0), ["threads", "0"]),
        (OpsPlan(minutes=0.0), ["minutes", "0"]),
        (OpsPlan(device="tpu"), ["auto", "cpu", "cuda", "tpu"]),  # type: ignore[arg-type]
        (StepPlan(methods=("dropkye",)), ["dropkye", *(m.name for m in attemper.list_methods())]),
        (StepPlan(methods=("skipless + droppath",)), ["skipless"]),
        (StepPlan(modes=("jit",)), ["eager", "compiled", "jit"]),  # type: ignore[arg-type]
        (StepPlan(batch=0), ["batch", "0"]),
        (StepPlan(library="keras"), ["timm", "torchvision", "keras"]),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_exist_is_refused_with_the_names_that_do(plan: OpsPlan | StepPlan, allowed: list[str]) -> None:
    with pytest.raises(AttemperError) as error:
        bench_ops(plan) if isinstance(plan, OpsPlan) else bench_step(plan)
    assert not [word for word in allowed if word not in str(error.value)]


def test_a_cuda_device_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ParameterError, match="finds no CUDA device"):
        bench_ops(OpsPlan(device="cuda"))


def test_a_library_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attemper.lab.bench.vit_models.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ParameterError, match="not installed"):
        bench_step(StepPlan(**QUICK), sizes=TINY)


def test_an_unknown_method_is_the_recipes_own_error() -> None:
    with pytest.raises(UnknownMethodError):
        ops_recipes(["dropkye"])


@pytest.mark.parametrize(
    ("gib", "seconds", "in_a_loop", "captured"),
    [
        (0.3, 0.001, False, True),
        (0.3, 0.2, False, True),
        (60, 0.001, False, True),
        (60, 0.2, False, False),
        (0.3, 0.001, True, False),
    ],
)
def test_passes_run_from_a_graph_unless_they_are_long_and_would_hold_much_memory(
    gib: float, seconds: float, in_a_loop: bool, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention-4 takes a millisecond to launch, which even a pass of 10 ms does not hide."""
    monkeypatch.setattr(timing, "peak_bytes", lambda device, step: int(gib * 2**30))
    monkeypatch.setattr(CudaStopwatch, "seconds", lambda self, prepared: seconds)
    monkeypatch.setattr(CudaStopwatch, "_capture", lambda self, step: step)
    stopwatch = CudaStopwatch.__new__(CudaStopwatch)
    stopwatch.device = torch.device("cuda")
    prepared = stopwatch.prepare(lambda: None, in_a_loop)
    assert prepared.captured == captured
    assert prepared.in_a_loop == in_a_loop
