"""impl="gather": DropKey whose key set all queries share, on gathered keys, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attemper
from attemper import attention, implementations
from attemper.errors import UnsupportedError
from attemper.methods import Blur, DropHead, DropKey, HardMask
from attemper.methods.dropkey import shared_keep
from attemper.ops.stream import Stream

SHARES = ["queries", "heads"]
SEED = 11


def make(batch=2, heads=4, queries=5, keys=11, width=8, kv_heads=None, dtype=torch.float64):
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = [(batch, heads, queries, width), (batch, kv_heads, keys, width), (batch, kv_heads, keys, 6)]
    return tuple(torch.randn(size, dtype=dtype).requires_grad_() for size in sizes)


def outputs(impl, qkv, method, seed=SEED, **options):
    out = attention(*qkv, methods=method, seed=seed, impl=impl, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), qkv)


def assert_same_as_reference(qkv, method, seed=SEED, **options):
    for name, a, b in zip(
        ("out", "dq", "dk", "dv"),
        outputs("gather", qkv, method, seed, **options),
        outputs("reference", qkv, method, seed, **options),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def reason(qkv, methods, **options):
    return {verdict.name: verdict.reason for verdict in implementations(*qkv, methods=methods, **options)}["gather"]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("keys", "p"), [(1, 0.5), (2, 0.9), (10, 0.3), (11, 0.3), (11, 0.05), (11, 0.99), (16, 0.5)])
def test_output_and_gradients_are_the_references(share, keys, p):
    for seed in range(3):
        assert_same_as_reference(make(keys=keys), DropKey(p, share=share), seed)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads(share, kv_heads):
    assert_same_as_reference(make(kv_heads=kv_heads), DropKey(0.3, share=share))
    padding = torch.rand(2, 1, 1, 11) > 0.4
    assert_same_as_reference(make(kv_heads=kv_heads), DropKey(0.3, share=share), attn_mask=padding)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("p", [0.25, 0.3, 0.62])
def test_the_keys_are_the_references_bit_for_bit(share, p):
    batch, heads, keys = 3, 2, 17
    q, k = torch.zeros(batch, heads, 4, 8), torch.zeros(batch, heads, keys, 8)
    eye = torch.eye(keys).expand(batch, heads, keys, keys)
    for seed in (0, -(2**63), 2**40 + 3):
        weights = attention(q, k, eye, methods=DropKey(p, share=share), seed=seed, impl="gather")
        keep = shared_keep(Stream(torch.tensor(seed)), batch, heads if share == "queries" else 1, keys, p)
        assert torch.equal(weights > 0, keep.expand(batch, heads, 4, keys))


def test_the_last_drawn_key_is_kept_as_often_as_the_rate_asks():
    q, k = torch.zeros(400, 2, 1, 8), torch.zeros(400, 2, 5, 8)
    eye = torch.eye(5).expand(400, 2, 5, 5)
    kept = (attention(q, k, eye, methods=DropKey(0.3, share="queries"), seed=0, impl="gather") > 0).sum(-1)
    assert kept.unique().tolist() == [3, 4]
    assert abs(kept.double().mean() - 3.5) < 4 * (0.25 / 800) ** 0.5


def hidden(mask: Tensor, kind: str) -> Tensor:
    if kind == "boolean":
        return mask
    low = {"-inf": -torch.inf, "-100": -100.0}[kind]
    return torch.randn(mask.shape, dtype=torch.float64).masked_fill(~mask, low)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", ["boolean", "-inf", "-100"])
@pytest.mark.parametrize("shape", [(11,), (1, 11), (2, 1, 1, 11), (1, 4, 1, 11), (2, 4, 1, 11)])
def test_masks_are_gathered_along(shape, kind, share):
    mask = hidden(torch.rand(shape) > 0.3, kind)
    assert_same_as_reference(make(), DropKey(0.4, share=share), attn_mask=mask)


@pytest.mark.parametrize("shape", [(5, 11), (1, 4, 5, 11), (2, 1, 5, 11)])
def test_a_position_bias_is_gathered_along(shape):
    for share in SHARES:
        assert_same_as_reference(make(), DropKey(0.3, share=share), attn_mask=torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", ["boolean", "-inf", "-100"])
def test_a_sample_that_would_lose_all_of_its_keys_keeps_them(share, kind):
    lengths = torch.tensor([1, 2, 4, 5, 3, 1, 2, 11])
    mask = hidden((torch.arange(11) < lengths[:, None])[:, None, None], kind)
    lost = 0
    for seed in range(4):
        keep = shared_keep(Stream(torch.tensor(seed)), 8, 4 if share == "queries" else 1, 11, 0.45)
        lost += int((~(keep & (torch.arange(11) < lengths[:, None])[:, None, None]).any(-1)).sum())
        assert_same_as_reference(make(batch=8), DropKey(0.45, share=share), seed, attn_mask=mask)
    assert lost > 0


def test_a_sample_without_any_allowed_key_is_zero():
    mask = torch.ones(2, 1, 1, 11, dtype=torch.bool)
    mask[1] = False
    assert_same_as_reference(make(), DropKey(0.3, share="heads"), attn_mask=mask)
    assert (attention(*make(), attn_mask=mask, methods=DropKey(0.3, share="heads"), seed=0)[1] == 0).all()


@pytest.mark.parametrize("share", SHARES)
def test_composes_with_what_stays_outside_of_softmax(share):
    methods = [DropKey(0.3, share=share), Blur(1.0), DropHead(0.3)]
    assert_same_as_reference(make(kv_heads=2), methods)
    assert_same_as_reference(make(), methods, attn_mask=torch.rand(2, 1, 1, 11) > 0.3)


def test_gradients_are_exact():
    q, k, v = make(1, 2, 3, 7, 2)
    bias = torch.randn(1, 1, 1, 7, dtype=torch.float64).requires_grad_()

    def call(q, k, v, bias):
        return attention(q, k, v, attn_mask=bias, methods=DropKey(0.4, share="heads"), seed=2, impl="gather")

    assert torch.autograd.gradcheck(call, (q, k, v, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_as_exact_as_torchs_own(dtype):
    q, k, v = (t.detach().to(dtype) for t in make(keys=33))
    method = DropKey(0.3, share="queries")
    given, expected = (
        attention(q, k, v, methods=method, seed=1, impl=impl).double() for impl in ("gather", "reference")
    )
    assert given.dtype == torch.float64
    assert (given - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


def test_compiles_in_one_graph_and_draws_the_same_keys():
    qkv = make(dtype=torch.float32)
    mask = torch.rand(2, 1, 1, 11) > 0.3

    def call(q, k, v):
        return attention(q, k, v, attn_mask=mask, methods=DropKey(0.3, share="heads"))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, compiled):
        torch.manual_seed(3)
        results.append(torch.autograd.grad(function(*qkv).square().sum(), qkv))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


def test_each_drawn_key_gets_its_gradient_and_the_others_none():
    q, k, v = make(keys=20)
    out = attention(q, k, v, methods=DropKey(0.5, share="queries"), seed=5, impl="gather")
    (dv,) = torch.autograd.grad(out.sum(), v)
    keep = shared_keep(Stream(torch.tensor(5)), 2, 4, 20, 0.5)
    assert torch.equal(dv.abs().sum(-1) > 0, keep[:, :, 0])


def test_auto_takes_it_and_says_why():
    verdicts = {verdict.name: verdict for verdict in implementations(*make(), methods=DropKey(0.3, share="heads"))}
    assert verdicts["gather"].chosen
    assert "less than attention without methods" in verdicts["gather"].because
    assert verdicts["sdpa"].because == ""
    assert "inside of softmax" in verdicts["sdpa"].reason


def test_what_it_cannot_serve_is_refused_with_the_reason_and_auto_goes_on():
    qkv = make(queries=11)
    shared = DropKey(0.3, share="heads")
    assert "no method of this call" in reason(qkv, DropKey(0.3))
    assert "no method of this call" in reason(qkv, ())
    assert "HardMask" in reason(qkv, [shared, HardMask(0.1)])
    assert "has 2" in reason(qkv, [shared, shared])
    assert "causal" in reason(qkv, shared, is_causal=True)
    assert "one set is gathered for all rows" in reason(qkv, shared, attn_mask=torch.rand(11, 11) > 0.5)
    assert "may" not in reason(qkv, shared, attn_mask=torch.randn(11, 11))
    assert "at least half" in reason(qkv, DropKey(0.7, share="heads"), attn_mask=torch.rand(11) > 0.5)
    with pytest.raises(UnsupportedError, match=r"impl='gather'.*causal.*These can: reference"):
        attention(*qkv, methods=shared, is_causal=True, impl="gather")
    for verdict in implementations(*qkv, methods=shared, is_causal=True):
        assert verdict.chosen == (verdict.name == "reference")
        assert ("gather cannot serve" in verdict.because) == verdict.chosen


def test_a_tempered_model_draws_as_by_the_reference():
    encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    tempered = attemper.apply(encoder, "dropkey(0.3, share=heads)")
    x = torch.randn(2, 9, 16)
    torch.manual_seed(0)
    first = encoder(x)
    tempered.remove()
    tempered = attemper.apply(encoder, "dropkey(0.3, share=heads)", impl="reference")
    torch.manual_seed(0)
    torch.testing.assert_close(encoder(x), first)
    tempered.remove()
