"""Floating-point operations: of runs, as counted by hand; and of our operators, as torch's counter sees them."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attemper.kernels.attention import packed, penalised, prepare  # noqa: F401
from attemper.kernels.common.flops import tell_counter
from attemper.kernels.fa4 import mixed  # noqa: F401
from attemper.kernels.penalties import logits  # noqa: F401
from attemper.lab.report.study import render
from attemper.lab.study.export import is_table, to_csv, to_markdown
from attemper.lab.study.result_shape import misshapen
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.flops import count, count_flops
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from interpreter import needs_triton, run_cases
from summaries import NAMES, entry

tell_counter()  # other tests may have loaded our operators before this file loaded the counter

B, H, NQ, NK, E, V = 2, 6, 5, 7, 16, 8
OURS = torch.ops.attemper
PAIRS = 2 * B * H * NQ * NK


def counted(act: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        act()
    return int(counter.get_total_flops())


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype, requires_grad=dtype == torch.float32)


# ----------------------------------------------------------------------------------------------------------- operators
def attention_of(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if name == "mixed_attention":
        table = empty(NK + 3, dtype=torch.int32)
        return OURS.mixed_attention(q, k, v, table, 0.25)[0]
    return getattr(OURS, name)(q, k, v, *([None, None] if name == "fused_attention" else [None]), 0.25, False)[0]


@pytest.mark.parametrize("name", ["fused_attention", "fa4_attention", "mixed_attention"])
@pytest.mark.parametrize("kv_heads", [H, 2])
def test_fused_attention_is_counted_in_both_directions(name: str, kv_heads: int) -> None:
    q, k, v = empty(B, H, NQ, E), empty(B, kv_heads, NK, E), empty(B, kv_heads, NK, V)
    made = []
    assert counted(lambda: made.append(attention_of(name, q, k, v))) == PAIRS * (E + V)
    assert counted(lambda: made[0].sum().backward()) == PAIRS * (3 * E + 2 * V)


def test_the_counts_are_those_of_torchs_own_fused_attention() -> None:
    q, k, v = (torch.randn(B, H, NK, E, requires_grad=True) for _ in range(3))
    theirs = counted(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    q, k, v = (empty(B, H, NK, E) for _ in range(3))
    assert counted(lambda: attention_of("fused_attention", q, k, v).sum().backward()) == theirs


@pytest.mark.parametrize(("values", "wanted"), [(False, False), (True, False), (False, True), (True, True)])
def test_attention_of_one_projection_is_counted_with_its_penalties(values: bool, wanted: bool) -> None:
    qkv = empty(B, NK, 3 * H * E)
    pairs, gram = 2 * B * H * NK * NK, 2 * B * H * NK * E * E
    made: list[torch.Tensor] = []
    if not (values or wanted):
        forward = counted(lambda: made.append(OURS.packed_attention(qkv, H, None, None, 0.25, False)[0].sum()))
    else:
        found = []
        forward = counted(
            lambda: found.append(OURS.penalised_attention(qkv, None, H, values, wanted, None, None, 0.25, False))
        )
        made.append(found[0][0].sum() + found[0][3].sum())
    assert forward == pairs * 2 * E + 2 * gram * wanted
    assert counted(made[0].backward) == pairs * 5 * E + 2 * gram * wanted


def test_logit_squares_are_counted_as_gram_matrices() -> None:
    q, k = empty(B, NQ, H * E), empty(B, NK, H * E)
    gram = 2 * B * H * (NQ + NK) * E * E
    made: list[torch.Tensor] = []
    assert counted(lambda: made.append(OURS.logit_squares(q, k, None, None, H))) == gram
    assert counted(lambda: made[0].sum().backward()) == 2 * gram


def test_the_search_for_the_largest_logits_counts_once() -> None:
    q, k = empty(B, H, NQ, E).detach(), empty(B, 2, NK, E).detach()
    hard = empty(NK + 3, dtype=torch.int32)
    act = lambda: OURS.row_cuts(q, k, None, None, None, hard, 0.25, False, 3, True)  # noqa: E731
    assert counted(act) == PAIRS * E


class IdleKernel:
    """Is launched as kernels are, and does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[[], None]:
        return lambda: None


def test_a_counter_that_is_loaded_late_is_told_at_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import flop_registry

    from attemper.kernels.common import direct, flops

    monkeypatch.setattr(flops, "COUNTER", "nowhere")
    monkeypatch.delitem(flop_registry, OURS.fused_attention)
    flops.counted_by(OURS.fused_attention, flops.attention_flops)
    assert OURS.fused_attention not in flop_registry
    direct.launch(IdleKernel(), (1,))
    assert OURS.fused_attention in flop_registry


@needs_triton
@pytest.mark.slow
def test_the_counter_sees_kernels_that_run() -> None:
    run_cases("triton_flops_cases.py", "not slow")


# ---------------------------------------------------------------------------------------------------------------- runs
TASK = "digits(train=300, test=100)"
WIDTH, DEPTH, MLP, TOKENS, CLASSES = 16, 2, 24, 17, 10
MODEL = f"vit-digits(depth={DEPTH}, width={WIDTH}, heads=2, mlp={MLP})"
PATCHES = 2 * 16 * 4 * WIDTH
LINEAR = DEPTH * 2 * TOKENS * WIDTH * (4 * WIDTH + 2 * MLP) + 2 * WIDTH * CLASSES
"""QKV, the projection behind attention, the MLP; the head."""
ATTENTION = DEPTH * 2 * 2 * TOKENS * TOKENS * WIDTH


def spec(recipe: str = "none", model: str = MODEL, **budget: Any) -> RunSpec:
    given = {"epochs": 1, "batch_size": 50, **budget}
    return RunSpec(task=TASK, model=model, recipe=recipe, seed=0, budget=Budget(**given))


@pytest.fixture(scope="module")
def digits() -> Any:
    return open_task(TASK, None)


def test_a_vits_operations_are_those_counted_by_hand(digits: Any) -> None:
    found = count_flops(spec(), digits, batch_size=50, accumulate=3)
    assert found is not None
    assert found["forward"] == PATCHES + LINEAR + ATTENTION
    # Backward has two products for each, but no gradient of the image.
    assert found["step"] == 3 * 50 * (2 * PATCHES + 3 * (LINEAR + ATTENTION))


def test_consistency_computes_twice_and_elementwise_methods_count_nothing(digits: Any) -> None:
    plain = count_flops(spec(), digits, 50)
    assert plain is not None
    for recipe in ("dropkey(0.1)", "cb", "skipless(attention)", "hardmask(0.3)"):
        assert count_flops(spec(recipe), digits, 50) == plain, recipe
    twice = count_flops(spec("blur + consistency"), digits, 50)
    assert twice is not None
    # The image is embedded once for both passes.
    assert twice["step"] == 2 * plain["step"] - 50 * 2 * PATCHES
    fewer = count_flops(spec("dropkey(0.5, share=queries)"), digits, 50)
    assert fewer is not None
    assert fewer["step"] < plain["step"], "half of the keys are not even looked at"
    more = count_flops(spec("explicit(q=1e-3)"), digits, 50)
    assert more is not None
    assert more["step"] > plain["step"]


def test_depthwise_convolutions_count_as_many_products_in_each_gradient(digits: Any) -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    x = torch.randn(2, 8, 5, 5, requires_grad=True)
    products = 2 * 2 * 25 * 9 * 8
    assert count(lambda: conv(x)) == products
    assert count(lambda: conv(x).sum().backward()) == 3 * products
    assert count(lambda: nn.ConvTranspose2d(8, 4, 3, stride=2)(x).sum().backward()) == 3 * 2 * 2 * 25 * 8 * 4 * 9
    mixer = count_flops(spec(model="convmixer(width=8, depth=2, kernel=3)"), digits, 50)
    assert mixer is not None
    assert 2.5 * 50 * mixer["forward"] < mixer["step"] < 3 * 50 * mixer["forward"]


def test_a_run_says_what_it_computed_and_draws_nothing_for_it(digits: Any) -> None:
    state = torch.get_rng_state()
    found = count_flops(spec(accumulate=2), digits, 50, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert run(spec(accumulate=2), digits)["flops"] == found


def test_a_model_that_looks_at_values_has_no_count_and_a_run_nevertheless(
    digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) if float(x.sum()) < 1e9 else x

    from attemper.lab.models.convmixer import ConvMixer

    forward = ConvMixer.forward
    monkeypatch.setattr(ConvMixer, "forward", looks)
    assert run(spec(model="convmixer(width=4, depth=1, kernel=3)"), digits)["flops"] is None


def test_results_without_counts_are_read_and_wrong_ones_named() -> None:
    assert misshapen({}) is None
    assert misshapen({"flops": None}) is None
    assert misshapen({"flops": {"forward": 1, "step": 2}}) is None
    for wrong in ({"forward": 1}, {"forward": 1.5, "step": 2}, 7, {"forward": -1, "step": 2}):
        assert misshapen({"flops": wrong}) == "its flops is not what a run writes"


# --------------------------------------------------------------------------------------------------------------- tables
FLOPS = {"forward": 1_266_816, "step": 243_216_384}


def made_up(*flops: dict[str, int] | None) -> dict[str, Any]:
    rows = [entry(at, name, seeds=2, epochs=2, rng=random.Random(at)) for at, name in enumerate(NAMES[: len(flops)])]
    for row, found in zip(rows, flops, strict=True):
        row["flops"] = found
    budget = {"epochs": 2, "batch_size": 64}
    plan = {"task": "digits", "model": "vit-digits", "seeds": [0, 1], "budget": budget, "recipes": []}
    words = {"title": "digits", "metric": "accuracy", "verdict": "So it is.", "notes": [], "confidence": 0.95}
    return {**words, "plan": plan, "recipes": rows}


def test_operations_stand_beside_accuracy_on_the_page_and_in_every_file() -> None:
    summary = made_up(FLOPS, None)
    page = render(summary)
    assert "243 M<small>1.27 M forward</small>" in page
    markdown = to_markdown(summary)
    assert "| rank | step time | FLOPs, step |\n" in markdown
    assert "| 243 M |\n" in markdown
    assert is_table(markdown.encode(), "markdown")
    first, second = csv.DictReader(io.StringIO(to_csv(summary)))
    assert (first["forward_flops"], first["step_flops"]) == ("1266816", "243216384")
    assert (second["forward_flops"], second["step_flops"]) == ("", "")


def test_tables_of_older_results_have_no_such_column() -> None:
    summary = made_up(None, None)
    for row in summary["recipes"]:
        del row["flops"]
    assert "FLOPs" not in render(summary)
    assert "FLOPs" not in to_markdown(summary)
    assert is_table(to_markdown(summary).encode(), "markdown")
    assert all(line["step_flops"] == "" for line in csv.DictReader(io.StringIO(to_csv(summary))))
