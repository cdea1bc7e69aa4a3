"""DropAttention: every unit and rescaling against its formula, and composed with DropKey."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from attemper import attention, keep_mask
from attemper.errors import ParameterError
from attemper.methods import DropAttention, DropKey
from attemper.methods.dropattention import dropattention, window_keep
from attemper.ops.stream import Stream

SHAPE = (2, 3, 6, 20)
SEED = 31


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(shape=SHAPE):
    batch, heads, queries, keys = shape
    sizes = ((batch, heads, queries, 4), (batch, heads, keys, 4), (batch, heads, keys, 5))
    return [randn(*size, seed=i).requires_grad_() for i, size in enumerate(sizes)]


def results(run, shape=SHAPE):
    """Output and the three gradients."""
    q, k, v = inputs(shape)
    out = run(q, k, v)
    (out * randn(*out.shape, seed=9)).sum().backward()
    return [out, q.grad, k.grad, v.grad]


def by_attention(*methods, seed=SEED, shape=SHAPE):
    return results(lambda q, k, v: attention(q, k, v, methods=methods, seed=seed, impl="reference"), shape)


def by_hand(change, shape=SHAPE):
    """`change` takes the weights of plain attention to those that meet the values."""
    return results(lambda q, k, v: change((q @ k.mT / 2).softmax(-1)) @ v, shape)


def weights_of(*methods, shape=SHAPE, seed=SEED, **arguments):
    q, k, _ = inputs(shape)
    eye = torch.eye(shape[3], dtype=torch.float64).expand(*shape[:2], -1, -1)
    return attention(q, k, eye, methods=methods, seed=seed, **arguments).detach()


def assert_same(given, expected):
    torch.testing.assert_close(given, expected, atol=1e-12, rtol=0)


def normalized(weights, keep, detach=False):
    total = (weights * keep).sum(-1, keepdim=True)
    return weights * keep / (total.detach() if detach else total)


def test_defaults():
    assert dataclasses.asdict(DropAttention()) == {
        **{"p": 0.1, "schedule": "constant", "match": "max"},
        **{"unit": "element", "w": 1, "rescale": "inverted", "detach": False},
        **{"until": None, "start": None, "ramp": None, "each": "block", "entropy": 0.01},
    }


# Single weights.


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_normalize_is_dropkey_forward_and_backward(p):
    assert_same(by_attention(DropAttention(p, rescale="normalize")), by_attention(DropKey(p)))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_normalize_divides_by_the_sum_of_what_is_kept(p):
    keep = keep_mask(SEED, SHAPE, p)
    assert keep.any(-1).all()
    assert_same(by_attention(DropAttention(p, rescale="normalize")), by_hand(lambda weights: normalized(weights, keep)))
    assert_same(
        by_hand(lambda weights: dropattention(weights, keep, p)), by_attention(DropAttention(p, rescale="normalize"))
    )


@pytest.mark.parametrize("unit", ["element", "column"])
def test_detach_changes_nothing_but_the_gradient_through_the_sum(unit):
    attached = by_attention(DropAttention(0.4, unit=unit, rescale="normalize"))
    detached = by_attention(DropAttention(0.4, unit=unit, detach=True, rescale="normalize"))
    keep = keep_mask(SEED, SHAPE if unit == "element" else (2, 3, 1, 20), 0.4)
    assert_same(detached, by_hand(lambda weights: normalized(weights, keep, detach=True)))
    assert_same([detached[0], detached[3]], [attached[0], attached[3]])
    for ours, others in zip(detached[1:3], attached[1:3], strict=True):
        assert (ours - others).abs().max() > 1e-3


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_inverted_divides_by_one_minus_p(p):
    keep = keep_mask(SEED, SHAPE, p)
    assert_same(by_attention(DropAttention(p, rescale="inverted")), by_hand(lambda weights: weights * keep / (1 - p)))


def test_inverted_keeps_the_weights_in_expectation():
    q, k, _ = (x.detach().expand(1000, -1, -1, -1) for x in inputs((1, 3, 6, 20)))
    eye = torch.eye(20, dtype=torch.float64).expand(1000, 3, -1, -1)
    many = attention(q, k, eye, methods=[DropAttention(0.3, rescale="inverted")], seed=SEED)
    plain = attention(q[:1], k[:1], eye[:1])[0]
    assert ((many.mean(0) - plain).abs() < 5 * plain * math.sqrt(0.3 / 0.7 / 1000)).all()  # 360 weights
    assert abs((many / plain).mean() - 1) < 4 * math.sqrt(0.3 / 0.7 / many.numel())


# Columns and runs of keys.


@pytest.mark.parametrize("rescale", ["normalize", "inverted"])
def test_a_column_is_dropped_for_all_queries_of_a_head(rescale):
    method = DropAttention(0.4, unit="column", rescale=rescale)
    keep = keep_mask(SEED, (2, 3, 1, 20), 0.4)
    assert len({row.numpy().tobytes() for row in keep.view(-1, 20)}) == 6
    assert torch.equal(weights_of(method) > 0, keep.expand(SHAPE))
    formula = {"normalize": lambda w: normalized(w, keep), "inverted": lambda w: w * keep / 0.6}[rescale]
    assert_same(by_attention(method), by_hand(formula))


def dropped_keys(method, keys, seeds=10):
    masks = [~method.keep((200, 20, 1, keys), Stream(torch.tensor(seed)))[:, :, 0] for seed in range(seeds)]
    return torch.cat(masks).flatten(0, 1)


@pytest.mark.parametrize("p", [0.1, 0.6])
@pytest.mark.parametrize("w", [1, 2, 3, 5])
def test_runs_of_keys_start_with_rate_p_over_w(w, p):
    dropped = dropped_keys(DropAttention(p, unit="column", w=w, rescale="normalize"), 14)
    for key in range(14):
        chance = 1 - (1 - p / w) ** min(w, key + 1)  # fewer runs can begin before the first keys
        error = math.sqrt(chance * (1 - chance) / len(dropped))
        assert abs(dropped[:, key].double().mean() - chance) < 4 * error


@pytest.mark.parametrize("w", [2, 3, 5])
def test_runs_are_w_keys_long_unless_they_meet_or_reach_the_end(w):
    keep = DropAttention(0.3, unit="column", w=w, rescale="normalize").keep((50, 10, 1, 16), Stream(torch.tensor(1)))
    starts = ~keep_mask(1, (50, 10, 1, 16), 0.3 / w)
    expected = torch.zeros_like(starts)
    for start in range(16):
        expected[..., start : start + w] |= starts[..., start : start + 1]
    assert starts.any()
    assert torch.equal(~keep, expected)
    assert torch.equal(window_keep(starts, w), keep)


# No row loses everything.


@pytest.mark.parametrize("p", [0.5, 0.99])
@pytest.mark.parametrize("keys", [1, 2, 3])
@pytest.mark.parametrize(
    "parameters",
    [
        *[{}, {"rescale": "normalize", "detach": True}, {"rescale": "normalize"}, {"unit": "column"}],
        *[{"unit": "column", "rescale": "normalize", "detach": True}, {"unit": "column", "rescale": "normalize"}],
    ],
    ids=str,
)
def test_a_row_that_would_lose_all_keys_is_left_as_it_is(parameters, keys, p):
    shape = (4, 3, 5, keys)
    method = DropAttention(p, **parameters)
    keep = keep_mask(SEED, shape if method.unit == "element" else (4, 3, 1, keys), p).expand(shape)
    lost = ~keep.any(-1)
    assert lost.any()
    weights, plain = weights_of(method, shape=shape), weights_of(DropAttention(0.0, rescale="normalize"), shape=shape)
    assert (weights.sum(-1) > 0).all()
    assert_same(weights[lost], plain[lost])
    formula = plain * keep / (1 - p) if method.rescale == "inverted" else normalized(plain, keep)
    assert_same(weights[~lost], formula[~lost])


@pytest.mark.parametrize(
    "parameters", [{}, {"rescale": "normalize", "detach": True}, {"rescale": "normalize"}], ids=str
)
def test_only_allowed_keys_count_towards_a_row(parameters):
    shape = (4, 3, 5, 4)
    allowed = torch.tensor([True, False, True, False])
    for mask in (allowed, torch.where(allowed, 0.0, -100.0).double()):
        method = DropAttention(0.7, **parameters)
        weights = weights_of(method, shape=shape, attn_mask=mask.expand(5, 4))
        plain = weights_of(DropAttention(0.0, rescale="normalize"), shape=shape, attn_mask=mask.expand(5, 4))
        keep = keep_mask(SEED, shape, 0.7)
        lost = ~(keep & allowed).any(-1)
        assert (lost & keep.any(-1)).any()
        assert_same(weights[lost], plain[lost])
        assert (weights[..., ~allowed] < 1e-30).all()


@pytest.mark.parametrize("parameters", [{"rescale": "normalize"}, {"rescale": "normalize", "detach": True}], ids=str)
def test_rows_sum_to_one_where_the_kept_weights_underflow(parameters):
    q = torch.tensor([[[[1.0]]]]).expand(1, 1, 40, 1).clone().requires_grad_()
    k = torch.tensor([[[[0.0], [-2000.0]]]])
    out = attention(q, k, torch.eye(2)[None, None], methods=[DropAttention(0.5, **parameters)], seed=1)
    torch.testing.assert_close(out.sum(-1), torch.ones(1, 1, 40))
    (out * randn(1, 1, 40, 2).float()).sum().backward()
    assert q.grad.isfinite().all()


# Together with DropKey, in one call.

TOGETHER = {
    "normalize": lambda weights, keep, p: normalized(weights, keep),
    "inverted": lambda weights, keep, p: weights * keep / (1 - p),
}


@pytest.mark.parametrize("rescale", TOGETHER)
@pytest.mark.parametrize("swapped", [False, True])
def test_two_methods_in_one_call_are_the_two_by_hand(rescale, swapped):
    methods = [DropKey(0.2), DropAttention(0.3, rescale=rescale)]
    lanes = (1, 0) if swapped else (0, 1)
    keys, elements = (keep_mask(SEED, SHAPE, m.p, lane=lane) for m, lane in zip(methods, lanes, strict=True))
    assert (keys & elements).any(-1).all()
    # Whatever the order in which they are given, DropKey acts before softmax and DropAttention after it.
    expected = by_hand(lambda weights: TOGETHER[rescale](normalized(weights, keys), elements, 0.3))
    assert_same(by_attention(*(methods[::-1] if swapped else methods)), expected)


@pytest.mark.parametrize("rescale", TOGETHER)
@pytest.mark.parametrize("swapped", [False, True])
def test_two_methods_spare_a_row_that_the_second_would_empty(rescale, swapped):
    shape = (4, 3, 5, 4)
    methods = [DropKey(0.5), DropAttention(0.6, rescale=rescale)]
    keys = keep_mask(SEED, shape, 0.5, lane=int(swapped))
    elements = keep_mask(SEED, shape, 0.6, lane=int(not swapped))
    lost = keys.any(-1) & elements.any(-1) & ~(keys & elements).any(-1)
    assert lost.any()
    both = weights_of(*(methods[::-1] if swapped else methods), shape=shape)
    plain = weights_of(DropKey(0.0), shape=shape)
    assert_same(both[lost], normalized(plain, keys)[lost])
    assert (both.sum(-1) > 0).all()
    assert (both[keys.any(-1)][~keys[keys.any(-1)]] == 0).all()


# Errors.


@pytest.mark.parametrize("p", [-0.01, 1, 2.0, math.nan, "0.1", None, False])
def test_rate_must_be_a_number_below_one(p):
    with pytest.raises(ParameterError, match=rf"p must be a number in \[0, 1\), got {p!r}"):
        DropAttention(p, rescale="normalize")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"unit": "row"}, "unit must be one of element, column; got 'row'"),
        ({"rescale": "none"}, "rescale must be one of normalize, inverted; got 'none'"),
        ({"unit": "column", "w": 0}, "w must be an integer of at least 1, got 0"),
        ({"unit": "column", "w": 2.0}, "w must be an integer of at least 1, got 2.0"),
        ({"unit": "column", "w": True}, "w must be an integer of at least 1, got True"),
        ({"w": 2}, "w=2 drops runs of keys and needs unit=column; unit is element"),
        ({"detach": "yes"}, "detach must be true or false, got 'yes'"),
        ({"detach": 1}, "detach must be true or false, got 1"),
        ({"detach": True, "rescale": "inverted"}, "detach=true needs rescale=normalize"),
        ({"match": "median"}, "match must be one of max, mean; got 'median'"),
    ],
)
def test_wrong_parameters_are_named(parameters, message):
    with pytest.raises(ParameterError, match=message):
        DropAttention(0.1, **parameters)


def test_runs_longer_than_the_keys_are_refused():
    with pytest.raises(ParameterError, match="w=21 is larger than the number of keys, 20"):
        by_attention(DropAttention(0.1, unit="column", w=21, rescale="normalize"))
    by_attention(DropAttention(0.1, unit="column", w=20, rescale="normalize"))


def test_in_a_model_runs_are_as_long_as_the_keys_at_most():
    method = DropAttention(0.1, unit="column", w=21, rescale="normalize")
    assert method.fitted(20) == DropAttention(0.1, unit="column", w=20, rescale="normalize")
    assert method.fitted(21) is method
