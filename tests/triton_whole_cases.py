"""Gradients with a whole head on chip, in Triton's interpreter; run by `test_triton.py` with TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.kernels.attention import launches, operators
from attemper.kernels.common import plans as plan
from attemper.methods import DropKey, HardMask
from attemper.ops.perturbation import Perturbation
from triton_cases import check, make
from triton_hardmask_cases import check as check_methods


@pytest.fixture(autouse=True)
def always_whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel serves float32 too, which the interpreter multiplies exactly; the list counts its launches."""
    launched: list[int] = []

    def split(nq: int, nk: int, *_: object) -> plan.WholePlan:
        return plan.WholePlan(*plan._split(nq), *plan._split(nk), warps=4)

    def counted(q: Tensor, *others: Any) -> launches.BackwardLaunches | None:
        found = launches.backward_launches(q, *others)
        launched.extend([q.shape[2]] * (found is not None and found.whole is not None))
        return found

    monkeypatch.setattr(launches, "whole_plan", split)
    monkeypatch.setattr(launches, "is_static", lambda *_: True)  # however many lengths other tests had
    monkeypatch.setattr(launches, "_backwards", {})
    monkeypatch.setattr(operators, "backward_launches", counted)
    return launched


@pytest.mark.parametrize("p", [None, 0.1])
@pytest.mark.parametrize(("nq", "nk"), [(17, 17), (64, 64), (65, 65), (128, 80), (20, 100), (100, 20)])
def test_gradients_equal_the_reference(nq: int, nk: int, p: float | None, always_whole: list[int]) -> None:
    check(make(1, 2, nq, nk, 16, width_v=24), p)
    assert always_whole == [nq]


@pytest.mark.parametrize("tokens", [3, 66])
def test_rows_that_were_left_undropped_count_in_all_gradients(tokens: int) -> None:
    few = torch.zeros(2, 1, 1, tokens, dtype=torch.bool)
    few[..., :3] = True  # so that many rows lose all of their keys
    check(make(2, 2, tokens, tokens, 16), 0.9, attn_mask=few)


@pytest.mark.parametrize("tokens", [40, 65])
def test_masks(tokens: int) -> None:
    check(make(1, 2, tokens, tokens, 16), 0.3, is_causal=True)
    padding = torch.arange(tokens).view(1, 1, 1, -1) < torch.tensor([tokens - 9, 0]).view(2, 1, 1, 1)
    check(make(2, 1, tokens, tokens, 16), 0.3, attn_mask=padding)
    check(make(1, 2, tokens, tokens, 16), 0.3, attn_mask=torch.rand(1, 2, tokens, tokens) > 0.4)
    check(make(1, 2, tokens, tokens, 16), 0.3, attn_mask=torch.randn(2, tokens, tokens))


@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
@pytest.mark.parametrize("others", [(), (DropKey(0.3),)])
def test_hard_masking(others: tuple[Perturbation, ...], fill: str) -> None:
    check_methods(make(1, 2, 65, 65, 16), [HardMask(0.5, k=5, fill=fill), *others])


def test_logits_far_below_zero_leave_no_trace_beyond_the_last_key() -> None:
    q, k, v = make(1, 1, 65, 65, 16)
    # Near −1600 a float32 logit has three to four decimals left, in the reference too.
    check(((q.detach() - 20).requires_grad_(), (k.detach() + 20).requires_grad_(), v), 0.1, tolerance=2e-4)


def test_shared_keys_of_which_the_last_is_there_or_not(always_whole: list[int]) -> None:
    for share in ("queries", "heads"):
        qkv = make(4, 2, 65, 65, 16)
        dout, results = torch.randn(4, 2, 65, 16), []
        for impl in ("gather", "reference"):
            out = attemper.attention(*qkv, methods=[DropKey(0.3, share=share)], seed=5, impl=impl)
            results.append((out, *torch.autograd.grad(out, qkv, dout)))
        for given, expected in zip(*results, strict=True):
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    assert len(always_whole) == 2


def test_one_program_holds_as_much_as_the_plan_says() -> None:
    half = torch.bfloat16
    assert plan.whole_plan(65, 65, 32, half, True) == plan.WholePlan(64, 16, 64, 16, 4, registers=128)
    assert plan.whole_plan(49, 49, 32, half) == plan.WholePlan(64, 0, 64, 0, 4)
    assert plan.whole_plan(128, 65, 32, half) == plan.WholePlan(64, 64, 64, 16, 4)
    for tokens, width, dtype in ((129, 32, half), (81, 64, half), (50, 128, half), (50, 32, torch.float32)):
        assert plan.whole_plan(tokens, tokens, width, dtype) is None
