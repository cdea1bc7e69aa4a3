"""Packed calls: documents that lie one after the other attend as if each were a call of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attemper import Offsets, attention, implementations
from attemper.errors import ParameterError, UnsupportedError
from attemper.methods import Blur, DropAttention, DropHead, DropKey, HardMask
from attemper.ops.documents import places

HEADS, WIDTH, VALUES = 4, 8, 6
WHOLE = Offsets()
INDEPENDENT = [[DropKey(0.4)], [DropKey(0.9)], [DropAttention(0.5, rescale="inverted"), DropKey(0.2)]]
OTHERS = [
    [], [DropKey(0.5, share="queries")], [DropKey(0.3, share="heads"), DropHead(0.4)], [HardMask(0.5, k=1)],
    [Blur(1.0)], [DropAttention(0.5, unit="column", rescale="normalize")],
]  # fmt: skip
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=5)


def offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0, dtype=dtype)


def tensors(queries, keys, kv_heads=HEADS, dtype=torch.float64):
    sizes = [(1, HEADS, queries, WIDTH), (1, kv_heads, keys, WIDTH), (1, kv_heads, keys, VALUES)]
    return tuple(torch.randn(size, dtype=dtype).requires_grad_() for size in sizes)


def one_by_one(q, k, v, lengths, lengths_k, at=WHOLE, **options):
    """A call for each document, which says which sample it is."""
    parts = zip(q.split(lengths, 2), k.split(lengths_k, 2), v.split(lengths_k, 2), strict=True)
    outs = []
    for number, part in enumerate(parts):
        here = at._replace(sample=at.sample + number)
        empty = part[0].new_zeros(1, HEADS, part[0].shape[2], VALUES)
        outs.append(attention(*part, at=here, impl="reference", **options) if part[1].shape[2] else empty)
    return torch.cat(outs, 2)


def assert_same(out, wanted, inputs, tolerance=1e-12):
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=0)
    if out.numel() == 0:
        return
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads, others = (
        torch.autograd.grad((each * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
        for each in (out, wanted)
    )
    torch.testing.assert_close(grads, others, atol=tolerance, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    lengths=LENGTHS.filter(any),
    methods=st.sampled_from(INDEPENDENT + OTHERS),
    causal=st.booleans(),
    kv_heads=st.sampled_from([HEADS, 2]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    at=st.sampled_from([WHOLE, Offsets(sample=3, head=4, heads=8)]),
)
def test_a_packed_call_is_a_call_for_each_document(lengths, methods, causal, kv_heads, dtype, at):
    qkv = tensors(sum(lengths), sum(lengths), kv_heads)
    options = {"methods": methods, "is_causal": causal and not any(isinstance(m, Blur) for m in methods), "seed": 5}
    packed = attention(*qkv, cu_seqlens=offsets(lengths, dtype), impl="reference", at=at, **options)
    assert_same(packed, one_by_one(*qkv, lengths, lengths, at=at, **options), qkv)


@settings(max_examples=20, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4), causal=st.booleans())
def test_keys_may_have_other_lengths_than_queries(pairs, causal):
    lengths, lengths_k = (list(each) for each in zip(*pairs, strict=True))
    if not sum(lengths_k):
        return
    qkv = tensors(sum(lengths), sum(lengths_k))
    options = {"methods": [DropKey(0.4)], "is_causal": causal, "seed": 5}
    cu = {"cu_seqlens": offsets(lengths), "cu_seqlens_k": offsets(lengths_k)}
    assert_same(
        attention(*qkv, **cu, impl="reference", **options), one_by_one(*qkv, lengths, lengths_k, **options), qkv
    )


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS.filter(any), methods=st.sampled_from(INDEPENDENT), causal=st.booleans())
def test_the_masks_are_those_of_the_padded_batch(lengths, methods, causal):
    qkv = tensors(sum(lengths), sum(lengths))
    cu = offsets(lengths)
    document, position = places(cu, sum(lengths))
    longest = max(lengths)
    padded = [x.new_zeros(len(lengths), longest, HEADS, x.shape[3]) for x in qkv]
    for number, x in enumerate(qkv):
        padded[number] = padded[number].index_put((document, position), x[0].transpose(0, 1)).transpose(1, 2)
    real = (torch.arange(longest) < cu.diff()[:, None])[:, None, None]
    options = {"methods": methods, "is_causal": causal, "seed": 5, "impl": "reference"}
    batch = attention(*padded, attn_mask=real, **options)
    wanted = batch.transpose(1, 2)[document, position].transpose(0, 1)[None]
    assert_same(attention(*qkv, cu_seqlens=cu, **options), wanted, qkv)


def test_one_draw_serves_all_documents():
    qkv = tensors(9, 9)
    torch.manual_seed(3)
    out = attention(*qkv, methods=DropKey(0.5), cu_seqlens=offsets([4, 5]))
    after = torch.rand(())
    torch.manual_seed(3)
    seed = torch.ops.attemper.draw_seed(device=torch.device("cpu"))
    assert torch.equal(after, torch.rand(()))
    assert torch.equal(out, attention(*qkv, methods=DropKey(0.5), cu_seqlens=offsets([4, 5]), seed=seed))


def test_a_compiled_packed_call_follows_other_lengths():
    qkv = tensors(9, 9)
    compiled = torch.compile(attention, backend="eager")
    for lengths in ([4, 5], [9], [1, 0, 8]):
        options = {"methods": DropKey(0.5), "cu_seqlens": offsets(lengths), "seed": 3, "impl": "reference"}
        assert torch.equal(compiled(*qkv, **options), attention(*qkv, **options))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([0, 4, 9], "list"),
        (torch.tensor([0.0, 9.0]), "torch.float32"),
        (torch.tensor([[0, 9]]), r"\(1, 2\)"),
        (torch.tensor([0]), "at least two entries"),
        (torch.tensor([1, 9]), "1 … 9"),
        (torch.tensor([0, 8]), "0 … 8"),
        (torch.tensor([0, 5, 4, 9]), "document 1 goes from 5 to 4"),
        (torch.tensor([0, 9], device="meta"), "device of q, cpu, got meta"),
    ],
)
def test_wrong_offsets_are_refused_by_what_is_wrong(wrong, words):
    qkv = tensors(9, 9)
    with pytest.raises(ParameterError, match=words):
        attention(*qkv, cu_seqlens=wrong)
    with pytest.raises(ParameterError, match=words):
        attention(*qkv, cu_seqlens=torch.tensor([0, 9]), cu_seqlens_k=wrong)


def test_arguments_that_do_not_go_together_are_refused():
    qkv, cu = tensors(9, 9), torch.tensor([0, 4, 9])
    with pytest.raises(ParameterError, match="cu_seqlens_k needs cu_seqlens"):
        attention(*qkv, cu_seqlens_k=cu)
    with pytest.raises(ParameterError, match="3 and 2"):
        attention(*qkv, cu_seqlens=cu, cu_seqlens_k=torch.tensor([0, 9]))
    with pytest.raises(ParameterError, match="cu_seqlens_k must say"):
        attention(*tensors(9, 8), cu_seqlens=cu)
    with pytest.raises(ParameterError, match="B must be 1, got 2"):
        attention(*(x.expand(2, -1, -1, -1) for x in qkv), cu_seqlens=cu)
    with pytest.raises(ParameterError, match="attn_mask cannot be given with cu_seqlens"):
        attention(*qkv, cu_seqlens=cu, attn_mask=torch.ones(9, 9, dtype=torch.bool))
    with pytest.raises(ParameterError, match="no query, key or keys"):
        attention(*qkv, cu_seqlens=cu, seed=3, at=Offsets(query=4))


def test_implementations_that_know_no_documents_say_so():
    qkv, cu = tensors(9, 9), torch.tensor([0, 4, 9])
    verdicts = {verdict.name: verdict for verdict in implementations(*qkv, cu_seqlens=cu)}
    assert verdicts["reference"].chosen
    for name in ("sdpa", "gather", "fa4"):
        assert "cu_seqlens" in verdicts[name].reason
        with pytest.raises(UnsupportedError, match="cu_seqlens"):
            attention(*qkv, cu_seqlens=cu, impl=name)
