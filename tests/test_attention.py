"""`attemper.attention`: equal to torch without methods, to the paper's Algorithm 1 with DropKey, and never NaN."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attemper import attention, keep_mask
from attemper.methods import DropAttention, DropKey
from attemper.ops.seeds import draw_seed

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)
IMPLS = ["reference", "sdpa"]


def randn(*shape, seed=0, dtype=torch.float64, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def qkv(queries=7, keys=7, *, heads=6, kv_heads=6, width=8, value_width=8, batch=2, dtype=torch.float64, grad=False):
    q = randn(batch, heads, queries, width, seed=1, dtype=dtype, grad=grad)
    k = randn(batch, kv_heads, keys, width, seed=2, dtype=dtype, grad=grad)
    v = randn(batch, kv_heads, keys, value_width, seed=3, dtype=dtype, grad=grad)
    return q, k, v


def boolean_mask(*shape):
    mask = randn(*shape, seed=4) > 0
    mask[..., 0] = True
    return mask


def weights_of(q, k, **arguments):
    """The attention weights themselves, read off by values that are the identity."""
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return attention(q, k, eye, **arguments)


# Without methods.

CALLS = {
    "self": ({}, {}),
    "cross": ({"queries": 4, "keys": 9}, {}),
    "grouped heads": ({"kv_heads": 2}, {}),
    "one group": ({"kv_heads": 1}, {"is_causal": True}),
    "value width": ({"value_width": 5}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal cross": ({"queries": 4, "keys": 9}, {"is_causal": True}),
    "scale": ({}, {"scale": 0.7}),
    "boolean mask": ({}, {"attn_mask": boolean_mask(2, 6, 7, 7)}),
    "boolean padding": ({"queries": 4}, {"attn_mask": boolean_mask(2, 1, 1, 7)}),
    "float mask": ({}, {"attn_mask": randn(7, 7)}),
    "float mask with -inf": ({}, {"attn_mask": randn(1, 6, 7, 7).masked_fill(~boolean_mask(7, 7), -torch.inf)}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", CALLS)
def test_without_methods_it_is_torchs_attention(name, impl, dtype):
    sizes, arguments = CALLS[name]
    q, k, v = qkv(**sizes, dtype=dtype)
    mask = arguments.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        arguments = {**arguments, "attn_mask": mask.to(dtype)}
    out = attention(q, k, v, **arguments, impl=impl)
    assert out.dtype == dtype
    assert out.shape == (*q.shape[:3], v.shape[3])
    exact = {key: x.double() if isinstance(x, torch.Tensor) and x.dtype == dtype else x for key, x in arguments.items()}
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **exact, enable_gqa=True)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (6, 5, 7), (1, 1, 5, 1), (2, 6, 1, 1), (2, 1, 1, 7)], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_every_mask_that_broadcasts_is_served(kind, shape, impl):
    q, k, v = qkv(5, 7)
    mask = torch.ones(shape, dtype=torch.bool) if kind == "boolean" else randn(*shape)
    logits = q @ k.mT / math.sqrt(8) + (mask if kind == "float" else 0)
    torch.testing.assert_close(attention(q, k, v, attn_mask=mask, impl=impl), logits.softmax(-1) @ v)


@pytest.mark.parametrize("shape", [(2, 6, 7, 9), (7, 9), (2, 1, 1, 9)], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_causal_and_mask_together_are_both_obeyed(kind, shape):
    q, k, v = qkv(7, 9)
    mask = boolean_mask(*shape) if kind == "boolean" else randn(*shape)
    out = attention(q, k, v, attn_mask=mask, is_causal=True)
    full = mask.expand(2, 6, 7, 9)
    for i in range(7):
        seen = torch.arange(9) <= i
        logits = torch.einsum("bhe,bhne->bhn", q[:, :, i], k) / 8**0.5
        logits = logits + full[:, :, i] if kind == "float" else logits
        powers = logits.exp() * (seen & full[:, :, i] if kind == "boolean" else seen)
        expected = torch.einsum("bhn,bhne->bhe", powers / powers.sum(-1, keepdim=True), v)
        torch.testing.assert_close(out[:, :, i], expected, atol=1e-12, rtol=1e-12)


def test_gradients_without_methods_are_torchs():
    results = []
    for run in (attention, F.scaled_dot_product_attention):
        q, k, v = qkv(5, 7, grad=True)
        mask = randn(6, 5, 7).requires_grad_()
        arguments = {"impl": "reference"} if run is attention else {}
        run(q, k, v, attn_mask=mask, **arguments).square().sum().backward()
        results.append([q.grad, k.grad, v.grad, mask.grad])
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-12)


# With DropKey: Algorithm 1 of the paper.


def algorithm_1(q, k, v, keep):
    """The published listing: −1e12 is added to every dropped logit before softmax."""
    logits = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    logits = logits + (1 - keep.to(logits.dtype)) * -1e12
    return logits.softmax(dim=-1) @ v


@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (5, 24)])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropkey_is_the_published_algorithm_forward_and_backward(p, queries, keys):
    keep = keep_mask(78, (2, 6, queries, keys), p)
    assert keep.any(-1).all()
    assert not keep.all()
    results = []
    for run in (algorithm_1, lambda q, k, v, _: attention(q, k, v, methods=[DropKey(p)], seed=78, impl="reference")):
        q, k, v = qkv(queries, keys, grad=True)
        out = run(q, k, v, keep)
        (out * randn(*out.shape, seed=9)).sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    torch.testing.assert_close(*results, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_dropkey_under_masks_drops_allowed_keys_and_spares_rows_that_would_lose_all(kind):
    q, k, v = qkv(6, 6)
    allowed = boolean_mask(2, 1, 6, 6) & torch.ones(6, 6, dtype=torch.bool).tril()
    allowed[..., 0] = True
    mask = boolean_mask(2, 1, 6, 6)
    bias = randn(2, 1, 6, 6) if kind == "float" else torch.zeros(())
    given = torch.where(mask, bias, -torch.inf) if kind == "float" else mask
    keep = keep_mask(5, (2, 6, 6, 6), 0.6)
    lost = ~(keep & allowed).any(-1, keepdim=True)
    assert lost.any()
    logits = torch.where(allowed & (keep | lost), q @ k.mT / 8**0.5 + bias, -torch.inf)
    out = attention(q, k, v, attn_mask=given, is_causal=True, methods=[DropKey(0.6)], seed=5)
    torch.testing.assert_close(out, logits.softmax(-1) @ v, atol=1e-12, rtol=0)


def test_dropkey_with_grouped_heads_draws_for_every_query_head():
    q, k, v = qkv(6, 16, kv_heads=2)
    out = attention(q, k, v, methods=[DropKey(0.4)], seed=3)
    expected = algorithm_1(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), keep_mask(3, (2, 6, 6, 16), 0.4))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


METHODS = [
    DropKey(0.4),
    DropKey(0.4, share="heads"),
    DropAttention(0.4, rescale="inverted"),
    DropAttention(0.4, rescale="normalize"),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_gradients_are_exact(method):
    q, k, v = qkv(3, 4, heads=2, kv_heads=1, width=2, value_width=1, batch=1, grad=True)
    mask = randn(3, 4).masked_fill(torch.arange(4) == 1, -torch.inf).requires_grad_()

    def run(q, k, v, mask):
        return attention(q, k, v, attn_mask=mask, methods=[method], seed=2, is_causal=True)

    assert torch.autograd.gradcheck(run, (q, k, v, mask))


def test_rate_zero_is_no_method_at_all():
    q, k, v = qkv()
    for method in (DropKey(0.0), DropAttention(0.0, rescale="normalize"), DropAttention(0.0, rescale="inverted")):
        out = attention(q, k, v, methods=method, seed=0)
        torch.testing.assert_close(out, attention(q, k, v, impl="reference"), atol=0, rtol=0)


def test_seed_as_int_and_as_tensor_are_the_same():
    q, k, v = qkv()
    for seed in (0, -5, 2**40 + 1):
        a = attention(q, k, v, methods=[DropKey(0.3)], seed=seed)
        assert torch.equal(a, attention(q, k, v, methods=[DropKey(0.3)], seed=torch.tensor(seed)))
        assert not torch.equal(a, attention(q, k, v, methods=[DropKey(0.3)], seed=seed + 1))


def test_without_a_seed_one_is_drawn_from_torchs_generator():
    q, k, v = qkv()
    torch.manual_seed(0)
    first, second = (attention(q, k, v, methods=[DropKey(0.3)]) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(attention(q, k, v, methods=[DropKey(0.3)], seed=draw_seed(q.device)), first)
    assert torch.equal(attention(q, k, v, methods=[DropKey(0.3)]), second)


def test_without_methods_nothing_is_drawn():
    state = torch.get_rng_state()
    attention(*qkv(), impl="reference")
    assert torch.equal(torch.get_rng_state(), state)


# Few keys, high rates, any mask, any dtype.


def padding(kind, lengths, keys, dtype):
    real = (torch.arange(keys) < torch.tensor(lengths)[:, None])[:, None, None]
    if kind == "none":
        return torch.ones_like(real), None
    if kind == "boolean":
        return real, real
    low = {"-inf": -torch.inf, "minimum": torch.finfo(dtype).min, "-100": -100.0}[kind]
    return real, torch.zeros(real.shape, dtype=dtype).masked_fill(~real, low)


@st.composite
def small_calls(draw):
    keys = draw(st.integers(1, 4))
    p = draw(st.one_of(st.floats(0, 0.99), st.just(0.99)))
    dtype = draw(st.sampled_from(DTYPES))
    shared = draw(st.sampled_from(["none", "queries", "heads"]))
    methods = [
        DropKey(p, share=shared),
        DropAttention(p, rescale="normalize"),
        DropAttention(p, detach=True, rescale="normalize"),
    ]
    methods.append(DropAttention(p, unit="column", w=draw(st.integers(1, keys)), rescale="normalize"))
    lengths = draw(st.lists(st.integers(1, keys), min_size=2, max_size=2))
    kind = draw(st.sampled_from(["none", "boolean", "-inf", "minimum", "-100"]))
    real, mask = padding(kind, lengths, keys, dtype)
    q, k, v = qkv(draw(st.integers(1, 4)), keys, heads=2, kv_heads=draw(st.sampled_from([1, 2])), dtype=dtype)
    method = draw(st.lists(st.sampled_from(methods), min_size=1, max_size=2))
    arguments = {"attn_mask": mask, "is_causal": draw(st.booleans()), "methods": method}
    return q, k, v, real, {**arguments, "seed": draw(st.integers(-(2**63), 2**63 - 1))}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(small_calls())
def test_rows_sum_to_one_and_nothing_is_nan(call):
    q, k, _, real, arguments = call
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    weights = weights_of(q, k, **arguments)
    sums = weights.double().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=TOLERANCE[q.dtype], rtol=0)
    assert (weights.double().masked_select(~real) < 1e-30).all()
    if arguments["is_causal"]:
        assert (weights.triu(1) == 0).all()
    (weights * randn(*weights.shape, seed=8, dtype=q.dtype)).sum().backward()
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(small_calls())
def test_masked_keys_have_no_influence(call):
    q, k, v, real, arguments = call
    out = attention(q, k, v, **arguments)
    masked = ~real.transpose(-2, -1)
    k2 = torch.where(masked, randn(*k.shape, seed=20, dtype=k.dtype), k)
    v2 = torch.where(masked, randn(*v.shape, seed=21, dtype=v.dtype), v)
    assert torch.equal(attention(q, k2, v2, **arguments), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["boolean", "float"])
@pytest.mark.parametrize(
    "methods", [[], [DropKey(0.5)], [DropAttention(0.5, detach=True, rescale="normalize")]], ids=str
)
def test_a_row_without_any_allowed_key_is_zero(methods, kind, dtype):
    mask = torch.tensor([[True, True], [False, False]])
    given = mask if kind == "boolean" else torch.zeros(2, 2, dtype=dtype).masked_fill(~mask, -torch.inf)
    for impl in ["auto", "reference"]:
        q, k, v = qkv(2, 2, dtype=dtype, grad=True)
        out = attention(q, k, v, attn_mask=given, methods=methods, seed=1 if methods else None, impl=impl)
        assert (out[:, :, 1] == 0).all()
        assert (out[:, :, 0] != 0).any()
        out.sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v))
        assert (q.grad[:, :, 1] == 0).all()


# How much is dropped.


def dropped_by_row(p, keys, seeds, mask=None, **arguments):
    q, k = torch.zeros(25, 8, 50, 2), torch.zeros(25, 8, keys, 2)
    found = [weights_of(q, k, attn_mask=mask, methods=[DropKey(p)], seed=s, **arguments) == 0 for s in range(seeds)]
    return torch.stack(found).double()


def expected_share(p, n):
    """Mean and standard deviation of a row's dropped share with n allowed keys: all n dropped means none is."""
    chances = [math.comb(n, dropped) * p**dropped * (1 - p) ** (n - dropped) for dropped in range(n)]
    mean = sum(chance * dropped / n for dropped, chance in enumerate(chances))
    square = sum(chance * (dropped / n) ** 2 for dropped, chance in enumerate(chances))
    assert mean == pytest.approx(p - p**n, abs=1e-12)
    return mean, math.sqrt(max(square - mean**2, 0.0))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("keys", [1, 2, 3, 4])
def test_few_keys_are_dropped_at_the_rescued_rate(keys, p):
    dropped = dropped_by_row(p, keys, seeds=8).flatten(0, -2).mean(-1)
    mean, deviation = expected_share(p, keys)
    assert abs(dropped.mean() - mean) <= 4 * deviation / math.sqrt(dropped.numel())


@pytest.mark.parametrize("p", [0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("keys", [16, 50])
def test_sixteen_keys_or_more_are_dropped_at_rate_p(keys, p):
    dropped = dropped_by_row(p, keys, seeds=2)
    assert abs(dropped.mean() - p) <= 4 * math.sqrt(p * (1 - p) / dropped.numel())


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min, -100.0])
def test_only_real_keys_count_towards_the_rescue(low):
    mask = torch.tensor([0.0, 0.0, low, low, low])
    dropped = dropped_by_row(0.5, 5, seeds=8, mask=mask.expand(1, 1, 1, 5))[..., :2].flatten(0, -2).mean(-1)
    mean, deviation = expected_share(0.5, 2)
    assert abs(dropped.mean() - mean) <= 4 * deviation / math.sqrt(dropped.numel())


def test_causal_rows_count_only_the_keys_that_they_see():
    dropped = dropped_by_row(0.5, 4, seeds=8, is_causal=True)
    for n in (1, 2, 3, 4):
        share = dropped[..., n - 1, :n].mean(-1)
        mean, deviation = expected_share(0.5, n)
        assert abs(share.mean() - mean) <= 4 * deviation / math.sqrt(share.numel())
