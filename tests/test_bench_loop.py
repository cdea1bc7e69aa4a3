"""`attemper bench loop`: every cell that can be measured is, and ratios are to the same loop without any method."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attemper
from attemper.errors import ParameterError
from attemper.lab.bench import loop as loop_module
from attemper.lab.bench.__main__ import main
from attemper.lab.bench.default_recipes import loop_recipes
from attemper.lab.bench.html_page import make_page
from attemper.lab.bench.loop import CellBench, Prepared, bench_loop, cells_of
from attemper.lab.bench.loop_models import MODELS, make_call
from attemper.lab.bench.options import LoopPlan
from attemper.lab.bench.results import Head, LoopReport, LoopRow, Machine, load
from attemper.lab.bench.step import TWIN
from attemper.lab.bench.tables import failures, full_tables, summary, tally, targets
from attemper.lab.bench.targets import LOOP, loop_target
from attemper.lab.bench.timing import Deadline

pytestmark = pytest.mark.usefixtures("no_profiler")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
H200 = Machine(device="NVIDIA H200", cpu="", threads=None, versions={})
QUICK: dict[str, Any] = {"device": "cpu", "rounds": 2, "steps": 1, "threads": 1}


@pytest.mark.parametrize("name", ["vit-s", "swin-t", "bert", "gpt"])
def test_every_model_trains_under_a_recipe_in_its_small_size(name: str) -> None:
    plan = LoopPlan(cells=(f"{name}:2:eager",), methods=("dropkey + explicit(v=1e-3, ff=1e-3)",), **QUICK)
    report = bench_loop(plan)
    assert not failures(report)
    assert [row.recipe for row in report.rows] == ["none", TWIN, *loop_recipes(plan.methods)]
    none = report.rows[0]
    assert none.ratio == none.memory_ratio == none.first_ratio == 1.0
    for row in report.rows:
        assert row.low is not None
        assert row.ratio is not None
        assert row.high is not None
        assert row.low <= row.ratio <= row.high
        assert row.host_ratio is not None
        assert row.graph_skips is None
    assert report.models == {name: MODELS[name].small}


def test_a_step_of_a_loop_trains_what_a_plain_loop_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the loop's step, with its penalties, are those of the loop that the documentation shows."""
    seen: list[list[torch.Tensor | None]] = []

    class Optimiser(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append([None if p.grad is None else p.grad.clone() for g in self.param_groups for p in g["params"]])

    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, lr, fused: Optimiser(parameters, lr=lr))
    bench = CellBench(("vit-s", 2, "eager"), CPU, torch.float32, lambda: 0.0, Deadline(None), 1, lambda *_: None)
    torch.manual_seed(0)
    trained = MODELS["vit-s"].make(False, 2, CPU)
    bench.make_step(trained, "explicit(v=0.5)", "eager")()
    torch.manual_seed(0)
    plain = MODELS["vit-s"].make(False, 2, CPU)
    tempered = attemper.apply(plain.model, "explicit(v=0.5)")
    loss = plain.criterion(plain.model(*plain.inputs)) + tempered.penalty()
    loss.backward()
    for ours, parameter in zip(seen[0], plain.model.parameters(), strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, parameter.grad)


def test_the_call_is_attention_with_and_without_methods() -> None:
    """Without methods it is torch's own; the gradients of both reach Q, K and V."""
    bench = CellBench(("call", 1, "eager"), CPU, torch.float32, lambda: 0.0, Deadline(None), 1, lambda *_: None)
    call = make_call(False, 1, CPU)
    seen = []
    q, k, v = call.inputs
    for t in (q, k, v):
        t.register_hook(lambda grad: seen.append(grad.clone()))
    bench.make_call(call, "none")()
    out = F.scaled_dot_product_attention(*(t.detach().requires_grad_() for t in (q, k, v)))
    assert len(seen) == 3
    assert out.shape == q.shape
    bench.make_call(call, "dropkey(0.5)")()
    assert len(seen) == 6
    assert not all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))
    assert q.grad is None


def test_ratios_are_medians_over_rounds_of_what_was_taken_in_the_same_round() -> None:
    """Each step takes what a clock that steps by the recipe's own time says, the host half of the first of them."""
    now = [0.0]
    bench = CellBench(("call", 1, "eager"), CPU, torch.float32, lambda: now[0], Deadline(None), 4, lambda *_: None)

    def taking(seconds: float) -> Prepared:
        def step() -> None:
            now[0] += seconds

        return Prepared(step, first_seconds=10 * seconds, graph_skips=None, peak_bytes=int(seconds * 2**20))

    rows = [LoopRow(model="call", batch=1, mode="eager", recipe=r) for r in ("none", "a", "b")]
    found = bench.timed(rows, {0: taking(2.0), 1: taking(3.0), 2: taking(1.0)}, rounds=3)
    assert [row.ratio for row in found] == [1.0, 1.5, 0.5]
    assert [row.host_ratio for row in found] == [1.0, 1.5, 0.5]
    assert [row.memory_ratio for row in found] == [1.0, 1.5, 0.5]
    assert [row.first_ratio for row in found] == [1.0, 1.5, 0.5]
    assert found[1].milliseconds == 3000.0
    assert found[1].peak_mib == 3.0


def test_cells_with_targets_come_first_and_compiled_ones_last_where_nobody_says_which() -> None:
    cells = cells_of(LoopPlan(), CUDA)
    assert set(LOOP) <= set(cells)
    modes = [mode for _, _, mode in cells]
    assert modes[: modes.count("eager")] == ["eager"] * modes.count("eager")
    eager = [cell in LOOP for cell in cells if cell[2] == "eager"]
    assert eager == sorted(eager, reverse=True)
    texts = [(model, batch) for model in ("bert", "gpt") for batch in (8, 32, 256)]
    assert sorted({(m, b) for m, b, _ in cells if m in ("bert", "gpt")}) == texts
    assert cells_of(LoopPlan(cells=("gpt:3:compiled", "vit-s:8:eager")), CUDA) == [
        ("gpt", 3, "compiled"),
        ("vit-s", 8, "eager"),
    ]
    assert all(mode == "eager" and batch == 2 for _, batch, mode in cells_of(LoopPlan(), CPU))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cells": ("vit-s:8",)}, "model:batch:mode"),
        ({"cells": ("vit-s:0:eager",)}, "model:batch:mode"),
        ({"cells": ("vit:8:eager",)}, "Did you mean 'vit-s'"),
        ({"cells": ("call:8:compiled",)}, "eager only"),
        ({"cells": ("vit-s:8:eager",), "batches": (8,)}, "leave out"),
        ({"models": ("resnet",)}, "models must be among"),
        ({"modes": ("fast",)}, "modes must be among"),
        ({"batches": (0,)}, "batches must be"),
        ({"steps": 0}, "steps must be"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        bench_loop(LoopPlan(**{**QUICK, **given}))


def test_what_does_not_fit_into_the_minutes_is_a_row_that_says_so() -> None:
    plan = LoopPlan(cells=("call:1:eager", "vit-s:2:eager"), methods=("dropkey",), minutes=1e-9, **QUICK)
    seen: list[LoopReport] = []
    report = bench_loop(plan, after_cell=seen.append)
    assert [len(each.rows) for each in seen] == [3, 6]
    assert all("limit of" in (row.failure or "") for row in report.rows)


def test_a_recipe_that_a_model_refuses_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    report = bench_loop(LoopPlan(cells=("gpt:1:eager",), methods=("cb", "dropkey"), **QUICK))
    failed = {row.recipe: row.failure for row in report.rows}
    assert "causal" in str(failed["cb(cb)"])
    assert failed["dropkey(0.1)"] is None
    monkeypatch.setattr("attemper.lab.bench.loop_models.importlib.util.find_spec", lambda name: None)
    report = bench_loop(LoopPlan(cells=("gpt:1:eager",), methods=("dropkey",), **QUICK))
    assert all("pip install transformers" in (row.failure or "") for row in report.rows)


def report_of(*rows: LoopRow) -> LoopReport:
    head = Head(date="2026-11-19", command="", machine=H200, dtype="bfloat16", rounds=7, clock="wall")
    return LoopReport(head=head, models={"vit-s": "ViT-S/16"}, rows=rows)


def test_targets_of_steps_are_for_steps_and_those_of_a_call_for_its_host() -> None:
    vit, call = ("vit-s", 8, "eager"), ("call", 8, "eager")
    shared = {"recipe": "dropkey(0.1)", "milliseconds": 1.0, "host_milliseconds": 1.0}
    rows = [
        LoopRow(
            model=m, batch=b, mode=mode, ratio=1.2, host_ratio=1.3,
            target=loop_target(H200, (m, b, mode), "dropkey(0.1)"), **shared,
        )
        for m, b, mode in (vit, call)
    ]  # fmt: skip
    report = report_of(*rows)
    verdicts = {(cells[0], cells[1]): cells[2] for cells in targets(report).rows}
    assert verdicts["vit-s, batch 8, eager", "`dropkey(0.1)`"] == "1.20 > 1.10, missed"
    assert verdicts["call, batch 8, eager", "`dropkey(0.1)`"] == "1.30 ≤ 1.50, met"
    total = sum(map(len, LOOP.values()))
    assert tally(report) == f"Of {total} targets: 1 met, 1 missed, {total - 2} not measured."
    assert "1.20 (host 1.30)" in summary(report).rows[0]
    page = make_page(report)
    assert "1.20 &gt; 1.10, missed" in page or "1.20 > 1.10, missed" in page
    assert tally(report) in page
    assert [table.title for table in full_tables(report)] == ["vit-s, batch 8, eager", "call, batch 8, eager"]


def test_every_target_is_of_a_recipe_that_is_measured_by_itself() -> None:
    assert {recipe for aims in LOOP.values() for recipe in aims} <= set(loop_recipes())
    assert loop_target(dataclasses.replace(H200, device="another"), ("vit-s", 8, "eager"), "dropkey(0.1)") is None


def test_the_command_measures_shows_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json, page = tmp_path / "loop.json", tmp_path / "loop.html"
    words = "loop --device cpu --cells call:2:eager --methods dropkey --rounds 2 --steps 1 --threads 1"
    assert main([*words.split(), "--json", str(json), "--page", str(page)]) == 0
    report = load(json)
    assert isinstance(report, LoopReport)
    assert report.head.command == f"attemper bench {words} --json loop.json --page loop.html"
    assert "dropkey(0.1)" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
    assert main(["loop", "--cells", "vit-s"]) == 2
    assert "model:batch:mode" in capsys.readouterr().err


@pytest.mark.slow
def test_a_compiled_loop_is_measured() -> None:
    plan = LoopPlan(cells=("vit-s:2:compiled",), methods=("dropkey", "explicit(v=1e-3, ff=1e-3)"), **QUICK)
    report = bench_loop(plan)
    assert not failures(report)
    assert loop_module.GRAPHED == ("reduce-overhead", "max-autotune")
