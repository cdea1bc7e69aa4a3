"""`attemper.flex`: FlexAttention drops the keys that `attemper.attention` drops, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import attemper
from attemper import Offsets, attention, flex
from attemper.errors import ParameterError, UnsupportedError
from attemper.methods import Blur, DropAttention, DropHead, DropKey, HardMask

METHODS = [
    [], [DropKey(0.0)], [DropKey(0.1)], [DropKey(0.9)], [DropKey(0.5), DropKey(0.5)],
    [DropAttention(0.6, rescale="normalize"), DropKey(0.3)], [DropKey(0.5, share="queries")],
    [DropKey(0.5, share="heads"), DropKey(0.4)],
    [DropAttention(0.6, unit="column", rescale="normalize")],
    [DropKey(0.8), DropAttention(0.5, unit="column", rescale="normalize")],
]  # fmt: skip
GRID = [DropKey(0.4, structure="block", grid=(3, 4), prefix=1), DropKey(0.5, structure="cross", grid=(3, 4), prefix=1)]
OFFSETS = [Offsets(), Offsets(3, 5, 0, 0), Offsets(2, 1, 7, 3), Offsets(0, 0, 2, 6), Offsets(query=1, keys=12)]


def causal(b, h, q, k):
    return q >= k


def kept_by_attention(methods, shape, **options):
    """Boolean (B, H, Nq, Nk): which keys `attention` gives any weight."""
    batch, heads, queries, keys = shape
    q, k = torch.randn(batch, heads, queries, 4), torch.randn(batch, heads, keys, 4)
    weights = attention(
        q, k, torch.eye(keys).expand(batch, heads, -1, -1), methods=methods, impl="reference", **options
    )
    return weights > 0


def kept_by_flex(score_mod, shape, visible=None):
    kept = create_mask(score_mod, *shape, device="cpu")
    return kept if visible is None else kept & create_mask(visible, *shape, device="cpu")


@settings(max_examples=60, deadline=None)
@given(
    methods=st.sampled_from(METHODS), queries=st.integers(1, 12), keys=st.integers(1, 12), is_causal=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
)  # fmt: skip
def test_the_same_keys_are_dropped(methods, queries, keys, is_causal, seed):
    shape = (2, 3, queries, keys)
    dropped = flex.score_mod(methods, seed, shape, is_causal=is_causal)
    wanted = kept_by_attention(methods, shape, seed=seed, is_causal=is_causal)
    assert torch.equal(kept_by_flex(dropped, shape, causal if is_causal else None), wanted)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
def test_long_rows_drop_the_same_keys_beside_short_ones(p):
    """Only short rows are asked whether they lose everything, here those at the beginning of a document."""
    shape, cu = (1, 3, 300, 300), torch.tensor([0, 290, 292, 300])
    for options in ({"is_causal": True}, {"cu_seqlens": cu}, {"is_causal": True, "cu_seqlens": cu}):
        documents = options.get("cu_seqlens", torch.tensor([0, 300]))
        visible = flex.document_mask(documents, 300, is_causal="is_causal" in options)
        wanted = kept_by_attention(DropKey(p), shape, seed=2, **options)
        assert torch.equal(kept_by_flex(flex.score_mod(DropKey(p), 2, shape, **options), shape, visible), wanted)


@pytest.mark.parametrize("method", GRID, ids=str)
@pytest.mark.parametrize("share", ["none", "queries", "heads"])
def test_structures_drop_the_same_keys(method, share):
    method = DropKey(method.p, structure=method.structure, grid=method.grid, prefix=1, share=share)
    shape = (2, 3, 5, 13)
    assert torch.equal(kept_by_flex(flex.score_mod(method, 3, shape), shape), kept_by_attention(method, shape, seed=3))


@pytest.mark.parametrize("at", OFFSETS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_part_of_a_call_drops_its_part(at, is_causal):
    """Rows that have no key at all are left out: both give them none."""
    shape, whole = (2, 2, 5, 6), (5, 7, 12, 12)
    method = DropKey(0.7)
    cut = (slice(at.sample, at.sample + 2), slice(at.head, at.head + 2), slice(at.query, at.query + 5))
    wanted = attemper.keep_mask(4, whole, 0.7)[cut][..., at.key : at.key + 6]
    seen = (at.query + torch.arange(5))[:, None] >= at.key + torch.arange(6) if is_causal else torch.ones(5, 6).bool()
    if at.key == at.keys == 0:  # or else it has a part of the keys, and a row may lose all of these
        wanted = wanted | ~(wanted & seen).any(-1, keepdim=True)
    kept = kept_by_flex(flex.score_mod(method, 4, shape, at=at, is_causal=is_causal), shape)
    assert torch.equal(kept & seen, wanted & seen)


def test_site_and_call_are_those_of_keep_mask():
    shape = (2, 3, 5, 40)
    kept = kept_by_flex(flex.score_mod(DropKey(0.5), 9, shape, site="blocks.3.attn", call=2), shape)
    assert torch.equal(kept, attemper.keep_mask(9, shape, 0.5, site="blocks.3.attn", call=2))


@pytest.mark.parametrize("methods", METHODS, ids=str)
def test_rows_left_without_keys_by_any_mask_keep_theirs(methods):
    shape = (2, 3, 50, 50)
    band = torch.arange(50)[:, None] - torch.arange(50)
    allowed = (band >= 0) & (band < 3)

    def window(b, h, q, k):
        return (q - k >= 0) & (q - k < 3)

    dropped = flex.score_mod(methods, 6, shape, mask_mod=window)
    wanted = kept_by_attention(methods, shape, seed=6, attn_mask=allowed)
    assert torch.equal(kept_by_flex(dropped, shape, window), wanted)
    assert bool(wanted.any(-1).all())


@settings(max_examples=30, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4),
    alike=st.booleans(), is_causal=st.booleans(), methods=st.sampled_from(METHODS),
)  # fmt: skip
def test_packed_documents_drop_the_same_keys(pairs, alike, is_causal, methods):
    lengths = torch.tensor([(q, q if alike else k) for q, k in pairs])
    tokens, keys = lengths.sum(0).tolist()
    if not tokens or not keys:
        return
    cu, cu_k = (torch.cat([torch.zeros(1, dtype=torch.int64), each.cumsum(0)]) for each in lengths.unbind(1))
    shape, packed = (1, 3, tokens, keys), {"cu_seqlens": cu, "cu_seqlens_k": cu_k}
    visible = flex.document_mask(cu, tokens, cu_seqlens_k=cu_k, tokens_k=keys, is_causal=is_causal)
    dropped = flex.score_mod(methods, 8, shape, is_causal=is_causal, **packed)
    wanted = kept_by_attention(methods, shape, seed=8, is_causal=is_causal, **packed)
    assert torch.equal(kept_by_flex(dropped, shape, visible), wanted)


@pytest.mark.parametrize(
    "methods", [[DropKey(0.5)], [DropAttention(0.8, rescale="normalize"), DropKey(0.5, share="heads")]], ids=str
)
@pytest.mark.parametrize("packed", [False, True])
def test_output_and_gradients_are_those_of_attention(monkeypatch, methods, packed):
    """Torch has FlexAttention's gradients on a CPU, but does not offer them to users."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    shape = (1, 4, 20, 20)
    q = torch.randn(1, 4, 20, 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 2, 20, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    documents = {"cu_seqlens": torch.tensor([0, 7, 20])} if packed else {}
    visible = flex.document_mask(documents["cu_seqlens"], 20, is_causal=True) if packed else causal
    mask = create_block_mask(visible, None, None, 20, 20, device="cpu")
    dropped = flex.score_mod(methods, 5, shape, is_causal=True, **documents)
    out = flex_attention(q, k, v, score_mod=dropped, block_mask=mask, enable_gqa=True)
    wanted = attention(q, k, v, methods=methods, seed=5, is_causal=True, impl="reference", **documents)
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=0)
    weight = torch.randn_like(out)
    grads, others = (torch.autograd.grad(each, (q, k, v), weight) for each in (out, wanted))
    torch.testing.assert_close(grads, others, atol=1e-12, rtol=0)


def test_a_new_seed_compiles_nothing_anew():
    """Made outside of the compiled code or inside of it, of a number or a tensor."""
    q = torch.randn(2, 3, 10, 8)
    outside, inside = CompileCounterWithBackend("eager"), CompileCounterWithBackend("eager")

    def attend(q, seed):
        return flex_attention(q, q, q, score_mod=flex.score_mod(DropKey(0.6), seed, (2, 3, 10, 10), site="a"))

    for seed in (1, -2, 2**62):
        dropped = flex.score_mod(DropKey(0.6), seed, (2, 3, 10, 10), site="a")
        given = torch.compile(flex_attention, backend=outside, fullgraph=True)(q, q, q, score_mod=dropped)
        made = torch.compile(attend, backend=inside, fullgraph=True)(q, torch.tensor(seed))
        assert torch.equal(given, made)
    assert outside.frame_count == inside.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods", [[DropKey(0.6)], [DropAttention(0.5, rescale="normalize"), DropKey(0.4, share="queries")]], ids=str
)
def test_compiled_attention_drops_the_same_keys(methods):
    q = torch.randn(2, 3, 40, 16)
    compiled = torch.compile(flex_attention, fullgraph=True)
    mask = create_block_mask(causal, None, None, 40, 40, device="cpu")
    for seed in (1, 2**61 + 7):
        dropped = flex.score_mod(methods, seed, (2, 3, 40, 40), is_causal=True)
        wanted = attention(q, q, q, methods=methods, seed=seed, is_causal=True, impl="reference")
        torch.testing.assert_close(compiled(q, q, q, score_mod=dropped, block_mask=mask), wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (HardMask(0.3, k=2), "hardmask.* needs the largest logits"),
        (DropHead(0.3), "drophead.* scales heads"),
        (Blur(1.0), "blur.* changes the keys"),
        (DropAttention(0.3, rescale="inverted"), "dropattention.* after softmax.*rescale=normalize"),
        (DropAttention(0.3, detach=True, rescale="normalize"), "dropattention.* after softmax.*without detach"),
        (DropKey("learn"), "dropkey.* at a given rate"),
    ],
)
def test_what_a_score_mod_cannot_do_is_refused_by_name(method, words):
    with pytest.raises(UnsupportedError, match=words):
        flex.score_mod([DropKey(0.1), method], 3, (1, 2, 6, 6))


def test_wrong_arguments_are_refused():
    with pytest.raises(ParameterError, match="four sizes"):
        flex.score_mod(DropKey(0.1), 3, (1, 2, 6))
    with pytest.raises(ParameterError, match="at least 1"):
        flex.score_mod(DropKey(0.1), 3, (1, 2, 0, 6))
    with pytest.raises(ParameterError, match="B must be 1"):
        flex.score_mod(DropKey(0.1), 3, (2, 2, 6, 6), cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ParameterError, match="0 … 5"):
        flex.document_mask(torch.tensor([0, 5]), 6)
    with pytest.raises(UnsupportedError, match="draws for every query"):
        flex.score_mod(GRID[0], 3, (1, 2, 13, 13), cu_seqlens=torch.tensor([0, 13]))
    with pytest.raises(ParameterError, match="methods must act on attention"):
        flex.score_mod("dropkey", 3, (1, 2, 6, 6))
