"""Log-sum-exps and parts of rows in Triton's interpreter; run by `test_triton.py` with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import attemper
from attemper import Offsets, attention, merge_parts
from attemper.errors import UnsupportedError
from attemper.kernels.attention.prepare import drop_table
from attemper.methods import DropHead, DropKey, HardMask
from attemper.ops.stream import Stream

Tensors = tuple[Tensor, ...]
METHODS = {
    "none": [],
    "dropkey": [DropKey(0.3)],
    "drophead, hardmask and dropkey": [DropHead(0.3), HardMask(0.5, k=3), DropKey(0.3)],
    "hardmask by -inf": [HardMask(0.5, k=3, fill="neg_inf")],
    "few keys are left": [DropKey(0.95)],
}


def make(queries: int, keys: int, heads: int = 2) -> Tensors:
    shapes = ((2, heads, queries, 16), (2, 2, keys, 16), (2, 2, keys, 24))
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


def check(given: Tensors, wanted: Tensors, qkv: Tensors) -> None:
    """Output, log-sum-exps and gradients of both are equal."""
    torch.testing.assert_close(given, wanted, rtol=2e-5, atol=2e-5)
    douts = torch.randn_like(given[0]), torch.randn_like(given[1])
    grads, wanted_grads = (torch.autograd.grad(both, qkv, douts, retain_graph=True) for both in (given, wanted))
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-4, atol=1e-4)


def both(qkv: Tensors, **options: object) -> tuple[Tensors, Tensors]:
    triton, reference = (attention(*qkv, return_lse=True, impl=impl, **options) for impl in ("triton", "reference"))
    return triton, reference


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
def test_log_sum_exps_and_their_gradients_equal_the_reference(name: str, causal: bool, heads: int) -> None:
    qkv = make(20, 11, heads)
    check(*both(qkv, methods=METHODS[name], seed=3, is_causal=causal), qkv)


@pytest.mark.parametrize("p", [0.0, 0.8])
@pytest.mark.parametrize("at", [None, Offsets(1, 1, 3, 5)])
def test_rows_that_a_mask_leaves_without_keys_have_none(p: float, at: Offsets | None) -> None:
    qkv, mask = make(21, 19), torch.rand(2, 1, 21, 19) < 0.5
    mask[1, :, 4:7] = False
    given, wanted = both(qkv, methods=[DropKey(p)], seed=3, attn_mask=mask, at=at)
    assert (given[1][1, :, 4:7] == -torch.inf).all()
    check(given, wanted, qkv)


@pytest.mark.parametrize("causal", [True, False])
def test_parts_and_what_they_merge_to_equal_the_reference(causal: bool) -> None:
    p, (q, k, v) = 0.7, (qkv := make(24, 24))
    kept = attemper.keep_mask(6, (2, 2, 24, 24), p)
    kept = kept.tril() if causal else kept
    merged = []
    for impl in ("triton", "reference"):
        parts = []
        for key, end in itertools.pairwise((0, 3, 16, 24)):
            at, some = Offsets(key=key, keys=24), slice(key, end)
            part = attention(
                q, k[:, :, some], v[:, :, some], methods=[DropKey(p)], seed=6, is_causal=causal, at=at, impl=impl,
                return_lse=True,
            )  # fmt: skip
            assert torch.equal(part[1] == -torch.inf, ~kept[..., some].any(-1))
            parts.append(part)
        merged.append(merge_parts(parts))
    check(*merged, qkv)


def test_a_part_without_log_sum_exps_has_the_same_output() -> None:
    qkv, options = make(20, 4), {"methods": [DropKey(0.8)], "seed": 2, "at": Offsets(keys=5), "impl": "triton"}
    out = attention(*qkv, **options)
    again, lse = attention(*qkv, return_lse=True, **options)
    assert torch.equal(out, again)
    assert torch.equal((out == 0).all(-1), lse == -torch.inf)
    grads = torch.autograd.grad(out.sum(), qkv)
    torch.testing.assert_close(grads, torch.autograd.grad(again.sum(), qkv), rtol=1e-5, atol=1e-5)


def test_log_sum_exps_of_half_precision_are_float32() -> None:
    qkv = tuple(x.detach().half() for x in make(17, 19))  # the interpreter cannot multiply bfloat16
    (out, lse), (_, wanted) = both(qkv, methods=[DropKey(0.3)], seed=3)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(lse, wanted, rtol=1e-4, atol=1e-4)


def test_refusals_name_what_is_unsupported() -> None:
    q, k, v = make(5, 5)
    with pytest.raises(UnsupportedError, match=r"\(return_lse\) under boolean masks only"):
        attention(q, k, v, attn_mask=torch.zeros(5, 5), return_lse=True, impl="triton")
    part = {"methods": [DropKey(0.1)], "seed": 0, "at": Offsets(key=3)}
    with pytest.raises(UnsupportedError, match=r"part of the keys \(at.key, at.keys\) under boolean masks only"):
        attention(q, k, v, attn_mask=torch.zeros(5, 5), impl="triton", **part)
    with pytest.raises(UnsupportedError, match=r"outside of torch\.func only"):
        torch.func.grad(lambda q: attention(q, k, v, impl="triton", **part).sum())(q)


@pytest.mark.slow
def test_opcheck_of_the_operator() -> None:
    q, k, v = make(5, 6)
    table = drop_table(Stream(torch.tensor(3)), 0, 6)
    for partial in (False, True):
        torch.library.opcheck(torch.ops.attemper.attention_and_lse, (q, k, v, partial, None, table, 0.25, False))
