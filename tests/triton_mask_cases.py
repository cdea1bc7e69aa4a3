"""Additive masks, methods outside of softmax and torch.func with the Triton kernels, in Triton's interpreter.

`test_triton.py` runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attemper
from attemper.methods import Blur, DropHead, DropKey, HardMask
from triton_cases import check, make
from triton_hardmask_cases import check as check_methods


@pytest.mark.parametrize("p", [None, 0.3])
@pytest.mark.parametrize("shape", [(1, 2, 20, 37), (2, 1, 1, 37), (20, 1)], ids=str)
def test_additive_masks_broadcast_along_any_axis(shape: tuple[int, ...], p: float | None) -> None:
    check(make(2, 2, 20, 37, 16), p, attn_mask=torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_masks_of_another_dtype(dtype: torch.dtype) -> None:
    check(make(1, 1, 20, 37, 16), 0.3, attn_mask=torch.randn(20, 37).to(dtype))


@pytest.mark.parametrize("p", [None, 0.7])
@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min, -1e4, -100.0])
def test_hidden_keys_count_for_nothing_and_lost_rows_keep_theirs(low: float, p: float | None) -> None:
    mask = torch.randn(1, 1, 17, 20).masked_fill(torch.rand(1, 1, 17, 20) > 0.15, low)
    mask[..., 5, :] = low  # hidden altogether: zeros, or all keys alike where a minimum stands for −inf
    # At −1e4 a float32 logit has three decimals left, in the reference too.
    check(make(1, 2, 17, 20, 16), p, 2e-4 if low == -1e4 else 1e-5, attn_mask=mask)


def test_additive_and_causal_at_once() -> None:
    check(make(1, 2, 35, 35, 16), 0.6, 1e-5, attn_mask=torch.randn(35, 35), is_causal=True)
    padding = torch.zeros(2, 1, 1, 20).masked_fill(torch.arange(20) < 3, -1e4)
    # The first rows see keys at −1e4 only, where a float32 logit has three decimals left, in the reference too.
    check(make(2, 1, 20, 20, 16), 0.6, 2e-4, attn_mask=padding, is_causal=True)


def test_a_mask_of_large_steps_keeps_its_far_keys() -> None:
    """A position bias is no mask: what it puts far away still counts where the content is large enough."""
    q, k, v = make(1, 1, 20, 40, 16)
    slope = -5.0 * (torch.arange(20)[:, None] - torch.arange(40)).abs()
    check(((q.detach() * 30).requires_grad_(), k, v), 0.2, 1e-4, attn_mask=slope)


def test_blur_before_and_dropped_heads_after() -> None:
    padding = torch.arange(20) < torch.tensor([20, 13])[:, None, None, None]
    check_methods(make(2, 4, 20, 20, 16, kv_heads=2), [Blur(1.0), DropKey(0.3), DropHead(0.4)], attn_mask=padding)
    check_methods(make(1, 2, 20, 20, 16), [DropKey(0.3), Blur(1.0)], is_causal=True)
    check_methods(make(1, 2, 20, 20, 16), [Blur(1.0)], attn_mask=torch.randn(20, 20))


def test_a_later_key_moves_no_earlier_row_under_blur_and_dropkey() -> None:
    q, k, v = (t.detach() for t in make(1, 2, 20, 20, 16))
    moved = k.clone()
    moved[:, :, 9] += 100
    outs = [
        attemper.attention(q, x, v, is_causal=True, methods=[Blur(1.0, w=7), DropKey(0.2)], seed=0, impl="triton")
        for x in (k, moved)
    ]
    assert torch.equal(outs[0][:, :, :9], outs[1][:, :, :9])
    assert not torch.equal(outs[0][:, :, 9:], outs[1][:, :, 9:])


def test_opcheck_with_an_additive_mask() -> None:
    q, k, v = make(1, 2, 17, 20, 16)
    mask = torch.randn(1, 1, 17, 20)
    tops = torch.ops.attemper.row_tops(mask, 17, False)
    assert torch.equal(tops, mask.amax(-1))
    torch.library.opcheck(torch.ops.attemper.row_tops, (mask, 17, True))
    torch.library.opcheck(torch.ops.attemper.fused_attention, (q, k, v, mask, None, 0.25, False, tops))


def mapped(impl: str, *methods: object, mask: Tensor | None = None) -> object:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attemper.attention(q, k, v, methods=methods, attn_mask=mask, seed=1, impl=impl)
        return out.square().sum()

    return torch.func.vmap(torch.func.grad(call, argnums=(0, 1, 2)), in_dims=(0, None, 0))


@pytest.mark.parametrize("methods", [(), (DropKey(0.3),), (HardMask(0.4, k=3), DropKey(0.2))], ids=str)
def test_vmap_gives_what_each_call_would_by_itself(methods: tuple[object, ...]) -> None:
    q, v, k = torch.randn(2, 1, 2, 9, 16), torch.randn(2, 1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    mask = torch.randn(9, 9) if methods else None
    given, expected = (mapped(impl, *methods, mask=mask)(q, k, v) for impl in ("triton", "reference"))
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)


def test_second_derivatives_are_refused_with_the_reason() -> None:
    q, k, v = make(1, 1, 5, 5, 16)
    (dq,) = torch.autograd.grad(attemper.attention(q, k, v, impl="triton").square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        dq.sum().backward()
    twice = torch.func.grad(
        lambda x: torch.func.grad(lambda y: attemper.attention(y, k, v, impl="triton").sum())(x).sum()
    )
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        twice(q.detach())
