"""Parts of rows: `attention(…, return_lse=True)` of some keys at a time, merged by their log-sum-exps."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attemper
from attemper import Offsets, attention, merge_parts
from attemper.errors import ParameterError, UnsupportedError
from attemper.methods import Blur, DropAttention, DropHead, DropKey, HardMask

QUERIES, KEYS = 7, 9
METHODS = {
    "none": [],
    "dropkey": [DropKey(0.4)],
    "most keys": [DropKey(0.9)],
    "two drops": [DropAttention(0.5, rescale="normalize"), DropKey(0.5)],
    "dropkey and drophead": [DropKey(0.6), DropHead(0.5)],
}


def inputs(queries: int = QUERIES, keys: int = KEYS) -> tuple[Tensor, Tensor, Tensor]:
    """Four heads, of which each two share their keys and values."""
    draw = torch.Generator().manual_seed(5)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 5))
    q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def seen_and_kept(methods: list, seed: int, causal: bool) -> Tensor:
    """Boolean (2, 4, QUERIES, KEYS): what no mask hides and no method drops, from `keep_mask`."""
    kept = torch.ones(2, 4, QUERIES, KEYS, dtype=torch.bool)
    for lane, method in enumerate(methods):
        if not isinstance(method, DropHead):
            kept &= attemper.keep_mask(seed, kept.shape, method.p, lane=lane)
    return kept.tril() if causal else kept


def ring(qkv: tuple[Tensor, ...], query_cuts: list[int], key_cuts: list[int], at: Offsets, **options) -> tuple:
    """(out, lse) of all queries, each part of which meets the parts of the keys one by one."""
    q, k, v = qkv
    rows = []
    for query, query_end in itertools.pairwise([0, *query_cuts, q.shape[2]]):
        parts = []
        for key, key_end in itertools.pairwise([0, *key_cuts, k.shape[2]]):
            here = at._replace(query=query, key=key, keys=k.shape[2])
            some = q[:, :, query:query_end], k[:, :, key:key_end], v[:, :, key:key_end]
            parts.append(attention(*some, at=here, return_lse=True, **options))
        rows.append(merge_parts(parts))
    return tuple(torch.cat(column, 2) for column in zip(*rows, strict=True))


def cuts(end: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(1, end - 1), max_size=3).map(sorted)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=15, deadline=None)
@given(query_cuts=cuts(QUERIES), key_cuts=cuts(KEYS).filter(len), causal=st.booleans(), seed=st.integers(0, 99))
def test_merged_parts_are_the_whole_call(name, query_cuts, key_cuts, causal, seed):
    """Output, log-sum-exps and gradients, wherever a row keeps a key; zeros and −inf where it keeps none."""
    qkv, options = inputs(), {"methods": METHODS[name], "is_causal": causal, "seed": seed}
    out, lse = ring(qkv, query_cuts, key_cuts, Offsets(heads=4), **options)
    whole, whole_lse = attention(*qkv, return_lse=True, **options)
    kept = seen_and_kept(METHODS[name], seed, causal).any(-1)
    torch.testing.assert_close(out[kept], whole[kept], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse[kept], whole_lse[kept], rtol=1e-10, atol=1e-12)
    assert not out[~kept].any()
    assert (lse[~kept] == -torch.inf).all()
    dout, dlse = torch.randn(out.shape, dtype=out.dtype), torch.randn(lse.shape, dtype=lse.dtype)
    given = torch.autograd.grad((out, lse), qkv, (dout, dlse))
    wanted = torch.autograd.grad((whole, whole_lse), qkv, (dout * kept[..., None], dlse * kept))
    torch.testing.assert_close(given, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mask", ["none", "boolean", "additive", "causal"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_log_sum_exps_are_those_of_the_logits_that_are_left(mask, p):
    q, k, v = inputs()
    hidden = torch.rand(2, 1, QUERIES, KEYS) < 0.3
    hidden[0, 0, 2] = True
    logits = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    options = {}
    if mask == "boolean":
        options["attn_mask"], logits = ~hidden, logits.masked_fill(hidden, -torch.inf)
    elif mask == "additive":
        options["attn_mask"] = torch.randn(QUERIES, KEYS, dtype=torch.float64)
        logits = logits + options["attn_mask"]
    elif mask == "causal":
        options["is_causal"] = True
        logits = logits.masked_fill(~torch.ones(QUERIES, KEYS).tril().bool(), -torch.inf)
    dropped = logits.masked_fill(~attemper.keep_mask(3, logits.shape, p), -torch.inf)
    lost = (dropped == -torch.inf).all(-1, keepdim=True)  # such a row of a whole call keeps all that it has
    wanted = torch.where(lost, logits, dropped).logsumexp(-1)
    out, lse = attention(q, k, v, methods=[DropKey(p)] if p else [], seed=3, return_lse=True, **options)
    torch.testing.assert_close(lse, wanted, rtol=1e-12, atol=1e-12)
    alone = attention(q, k, v, methods=[DropKey(p)] if p else [], seed=3, **options)
    torch.testing.assert_close(out, alone, rtol=1e-12, atol=1e-12)
    assert (lse[0, :, 2] == -torch.inf).all() == (mask == "boolean")


@pytest.mark.parametrize("methods", [[HardMask(0.5, k=3)], [Blur(2.0), DropKey(0.2)]], ids=str)
def test_log_sum_exps_have_the_right_gradients_under_any_method(methods):
    q, k, v = inputs(3, 4)

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, methods=methods, seed=4, return_lse=True)

    assert torch.autograd.gradcheck(both, (q, k, v), fast_mode=True)


def test_only_a_part_of_the_keys_leaves_rows_without_any():
    q, k, v = (x.detach() for x in inputs(200, 2))
    drop = {"methods": [DropKey(0.7)], "seed": 8}
    lost = ~attemper.keep_mask(8, (2, 4, 200, 2), 0.7).any(-1)
    assert lost.any()
    for at in (Offsets(), Offsets(keys=2)):
        assert (attention(q, k, v, at=at, **drop) != 0).all()
    part, lse = attention(q, k, v, at=Offsets(keys=3), return_lse=True, **drop)
    assert torch.equal((part == 0).all(-1), lost)
    assert torch.equal(lse == -torch.inf, lost)
    assert torch.equal(part, attention(q, k, v, at=Offsets(keys=3), **drop))


def test_parts_may_be_merged_one_after_the_other():
    qkv, options = inputs(), {"methods": [DropKey(0.5)], "seed": 1}
    at_once = ring(qkv, [], [2, 3, 7], Offsets(), **options)
    q, k, v = qkv
    merged = None
    for key, end in ((7, 9), (3, 7), (0, 2), (2, 3)):  # in any order
        at = Offsets(key=key, keys=KEYS)
        part = attention(q, k[:, :, key:end], v[:, :, key:end], at=at, return_lse=True, **options)
        merged = part if merged is None else merge_parts([merged, part])
    torch.testing.assert_close(merged, at_once, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_made_in_float32(dtype):
    q, k, v = (x.detach().to(dtype) for x in inputs())
    out, lse = ring((q, k, v), [3], [4], Offsets(), seed=0)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    exact = attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    first = attention(q, k, v, return_lse=True)
    assert merge_parts([(first[0].float(), first[1]), first])[0].dtype == torch.float32


def test_log_sum_exps_far_apart_do_not_overflow():
    out = torch.ones(1, 1, 3, 2)
    lse = torch.tensor([[[1000.0, -1000.0, -torch.inf]]])
    merged, total = merge_parts([(out, lse), (-out, -lse * torch.tensor([1.0, 1.0, -1.0]))])
    assert merged[0, 0, :, 0].tolist() == [1.0, -1.0, 0.0]
    assert total.flatten().tolist() == [1000.0, 1000.0, -torch.inf]


@pytest.mark.slow
def test_a_compiler_takes_parts_in_one_graph():
    q, k, v = (x.detach() for x in inputs())

    def whole(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return ring((q, k, v), [], [4], Offsets(), methods=[DropKey(0.5)], seed=2)

    compiled = torch.compile(whole, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), whole(q, k, v), rtol=0, atol=0)


def test_parts_that_make_no_sense_are_refused():
    q, k, v = inputs()
    with pytest.raises(ParameterError, match=r"at\.keys is 10, and this call has the keys 4 to 12"):
        attention(q, k, v, seed=1, at=Offsets(key=4, keys=10))
    with pytest.raises(ParameterError, match="needs whole rows of keys, and this call has the keys 0 to 8"):
        attention(q, k, v, methods=[HardMask(0.5, k=2)], seed=1, at=Offsets(keys=10))
    with pytest.raises(ParameterError, match="return_lse cannot be given with cu_seqlens"):
        attention(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 7]), cu_seqlens_k=torch.tensor([0, 9]),
                  return_lse=True)  # fmt: skip
    out, lse = attention(q, k, v, return_lse=True)
    for parts, message in (
        ([], "at least one"), ([out], "must be \\(out, lse\\)"), ([(out, lse[..., :2])], "must agree in their shapes"),
        ([(out, lse), (out[:, :1], lse[:, :1])], "must agree in their shapes"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=message):
            merge_parts(parts)


def test_who_gives_no_log_sum_exps_says_so():
    q, k, v = inputs()
    with pytest.raises(UnsupportedError, match=r"gives no log-sum-exps \(return_lse\).*These can: reference"):
        attention(q, k, v, return_lse=True, impl="sdpa")
    chosen = [verdict.name for verdict in attemper.implementations(q, k, v, return_lse=True) if verdict.chosen]
    assert chosen == ["reference"]
