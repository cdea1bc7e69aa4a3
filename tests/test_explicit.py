"""Explicit dropout and Arora's form, against Monte-Carlo expectations and traces that are written out."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import attemper
from attemper.methods import AroraDropout, ExplicitDropout, Place
from attemper.methods.arora import arora
from attemper.methods.explicit import av_square, linear_square, logit_square, own_square
from attemper.methods.kinds import AttentionRecord, LayerRecord

HERE = Place(0, 1)
ATTENTION = ("q", "k", "v", "av")
EXPECTATIONS = ("paper", "exact", "inverted")
P = 0.3


def record(batch=1, tokens=4, keys=None, width=4, heads=2):
    """A self-attention (or, with `keys`, a cross-attention) in float64, without biases."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query = draw(batch, tokens, width)
    key = query if keys is None else draw(batch, keys, width)
    w_q, w_k, w_v = draw(width, width), draw(width, width), draw(width, width)
    q, k, v = (split(x @ w.T, heads) for x, w in ((query, w_q), (key, w_k), (key, w_v)))
    out = weights_of(q, k) @ v
    return AttentionRecord(query, key, key, w_q, w_k, w_v, out, None, q, k, None, False, None)


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def weights_of(q, k):
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)


def terms(r, **options):
    strengths = {component: options.pop(component, 1.0) for component in ATTENTION}
    return ExplicitDropout(**strengths, p=P, **options).attention_terms(r, HERE)


def ff_term(x, weight, which="ff1", **options):
    return ExplicitDropout(ff=1.0, p=P, **options).mlp_terms(which, LayerRecord(x, weight), HERE)[which]


# ------------------------------------------------------------------------------------------------- the expectations
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("component", [*ATTENTION, "ff1", "ff2"])
def test_exact_is_the_expectation_over_masks(component, heads):
    r = record(heads=heads)
    x, w_q, w_k, w_v = r.query[0], *(w.unflatten(0, (heads, -1)) for w in (r.w_q, r.w_k, r.w_v))  # w: (H, e, d)
    a = weights_of(r.q, r.k)[0]
    ff = torch.randn(6, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    dropped = torch.rand(20_000, *x.shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64) < P
    gone = (x * dropped)[:, None]  # (masks, 1, N, d): what dropout takes away
    behind = {
        "q": lambda: (gone @ w_q.mT) @ (x @ w_k.mT).mT,
        "k": lambda: (x @ w_q.mT) @ (gone @ w_k.mT).mT,
        "v": lambda: gone @ w_v.mT,
        "av": lambda: a @ (gone @ w_v.mT),
        "ff1": lambda: gone @ ff.T,
        "ff2": lambda: gone @ ff.T,
    }
    halves = behind[component]().square().sum((1, 2, 3)) / 2
    mean, error = halves.mean(), halves.std() / math.sqrt(len(halves))

    def ours(expectation):
        options = {"expectation": expectation, "reduction": "sum"}
        return ff_term(r.query, ff, component, **options) if component[:2] == "ff" else terms(r, **options)[component]

    assert abs(ours("exact") - mean) < 3 * error
    assert abs(ours("paper") - mean) > 10 * error, "the masks tell the paper's reading from the exact one"


def test_inverted_is_the_variance_of_dropout_with_rescaling():
    r = record()
    keep = torch.rand(20_000, *r.query.shape[1:], generator=torch.Generator().manual_seed(2), dtype=torch.float64) >= P
    noise = r.query[0] * (keep / (1 - P) - 1)
    halves = (noise @ r.w_v.T).square().sum((1, 2)) / 2
    error = halves.std() / math.sqrt(len(halves))
    assert abs(terms(r, expectation="inverted", reduction="sum")["v"] - halves.mean()) < 3 * error


def naive(r, heads):
    """The paper's ½ Tr(…) with E[X̃ᵀX̃] = p²G, sample by sample and head by head, every matrix written out."""
    total = {component: torch.zeros((), dtype=torch.float64) for component in ATTENTION}
    for b in range(r.query.shape[0]):
        x_q, x_k, x_v = r.query[b], r.key[b], r.value[b]
        g_q, g_k, g_v = (P**2 * x.T @ x for x in (x_q, x_k, x_v))
        for w_q, w_k in zip(r.w_q.chunk(heads), r.w_k.chunk(heads), strict=True):
            total["q"] += torch.trace(x_k @ w_k.T @ w_q @ g_q @ w_q.T @ w_k @ x_k.T) / 2
            total["k"] += torch.trace(x_q @ w_q.T @ w_k @ g_k @ w_k.T @ w_q @ x_q.T) / 2
        total["v"] += torch.trace(r.w_v @ g_v @ r.w_v.T) / 2
        for h, w_v in enumerate(r.w_v.chunk(r.q.shape[1])):
            a = weights_of(r.q[b, h], r.k[b, h])
            total["av"] += P**2 * torch.trace(a @ x_v @ w_v.T @ w_v @ x_v.T @ a.T) / 2
    return total


@pytest.mark.parametrize("keys", [None, 7], ids=["self", "cross"])
@pytest.mark.parametrize("heads", ["per_head", "joint"])
def test_paper_equals_its_trace_formulas(heads, keys):
    r = record(batch=3, tokens=5, keys=keys, width=6, heads=3)
    ours, expected = terms(r, heads=heads, reduction="sum"), naive(r, 1 if heads == "joint" else 3)
    for component in ATTENTION:
        assert ours[component] == pytest.approx(float(expected[component]), rel=1e-10)
    x, weight = r.query, r.w_q[:4]
    for which in ("ff1", "ff2"):
        by_hand = sum(P**2 * torch.trace(weight @ sample.T @ sample @ weight.T) / 2 for sample in x)
        assert ff_term(x, weight, which, reduction="sum") == pytest.approx(float(by_hand), rel=1e-10)


def test_no_slice_of_a_wide_joint_product_is_left_out():
    r = record(tokens=3, width=150, heads=1)  # three slices, the last one narrower
    for expectation in EXPECTATIONS:
        c, d = {"paper": (P**2, 0.0), "exact": (P**2, P * (1 - P)), "inverted": (0.0, P / (1 - P))}[expectation]
        gram = r.query[0].T @ r.query[0]
        middle = c * gram + d * gram.diag().diag()
        other = r.query[0] @ r.w_k.T @ r.w_q
        by_hand = torch.trace(other @ middle @ other.T) / 2
        ours = terms(r, expectation=expectation, heads="joint", reduction="sum")["q"]
        assert ours == pytest.approx(float(by_hand), rel=1e-10)


def test_q_and_k_are_equal_under_paper_and_not_under_exact():
    r = record(batch=2, tokens=5, width=6, heads=3)
    paper, exact = terms(r, expectation="paper"), terms(r, expectation="exact")
    assert paper["q"] == pytest.approx(float(paper["k"]), rel=1e-12)
    assert abs(exact["q"] / exact["k"] - 1) > 0.01


def test_the_square_of_attention_is_the_same_from_weights_and_some_queries_at_a_time(monkeypatch):
    monkeypatch.setattr("attemper.methods.explicit.QUERIES", 3)
    fused = record(batch=2, tokens=7)
    whole = dataclasses.replace(fused, weights=weights_of(fused.q, fused.k), q=None, k=None)
    assert av_square(fused, P, "exact") == pytest.approx(float(av_square(whole, P, "exact")), rel=1e-12)


@pytest.mark.parametrize("kind", ["causal", "padding", "bias"])
def test_av_sees_the_masks(kind):
    r = record(batch=2, tokens=5)
    logits = r.q @ r.k.mT / math.sqrt(r.q.shape[-1])
    padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None]
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    if kind == "causal":
        r = dataclasses.replace(r, is_causal=True)
        a = logits.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    elif kind == "padding":
        r, a = dataclasses.replace(r, attn_mask=padding), logits.masked_fill(~padding, -torch.inf).softmax(-1)
    else:
        r, a = dataclasses.replace(r, attn_mask=bias), (logits + bias).softmax(-1)
    u = r.value.square() @ r.w_v.unflatten(0, (2, -1)).square().sum(1).T  # (B, N, H)
    by_hand = P / (1 - P) * torch.einsum("bhia,bah->", a.square(), u)
    assert av_square(r, P, "inverted") == pytest.approx(float(by_hand), rel=1e-12)


# -------------------------------------------------------------------------------------------------- against Arora
def test_all_three_expectations_are_sums_of_aroras_form_and_cross_terms():
    r = record(batch=3, tokens=5)
    gram = sum(x.T @ x for x in r.value)
    own = torch.trace(r.w_v @ gram.diag().diag() @ r.w_v.T)
    cross = torch.trace(r.w_v @ (gram - gram.diag().diag()) @ r.w_v.T)
    by_hand = {
        "paper": P**2 / 2 * (own + cross),
        "exact": P / 2 * own + P**2 / 2 * cross,
        "inverted": P / (2 * (1 - P)) * own,
    }
    for expectation, expected in by_hand.items():
        assert terms(r, expectation=expectation, reduction="sum")["v"] == pytest.approx(float(expected), rel=1e-12)
        assert ff_term(r.value, r.w_v, expectation=expectation, reduction="sum") == pytest.approx(float(expected))
    ours = AroraDropout(q=1, k=1, v=2, p=P).attention_terms(r, HERE)
    assert ours["v"] == pytest.approx(float(2 * P / (1 - P) * own / 15), rel=1e-12)
    assert own_square(r.value, r.w_v) == pytest.approx(float(own), rel=1e-12)


def test_arora_weighs_each_channel_by_its_column():
    r = record(batch=2, tokens=3)
    by_hand = sum(
        float(r.w_q[:, j].square().sum()) * float(r.query[..., j].square().mean()) for j in range(r.query.shape[-1])
    )
    assert arora(r.query, r.w_q, P) == pytest.approx(P / (1 - P) * by_hand, rel=1e-12)
    mlp = AroraDropout(ff=1, p=P).mlp_terms("ff2", LayerRecord(r.query, r.w_q), HERE)
    assert mlp["ff2"] == pytest.approx(P / (1 - P) * by_hand, rel=1e-12)


# ------------------------------------------------------------------------------------------------------- reductions
@pytest.mark.parametrize("keys", [None, 7], ids=["self", "cross"])
@pytest.mark.parametrize("expectation", EXPECTATIONS)
def test_batch_size_has_no_influence_under_mean(expectation, keys):
    one = record(batch=2, tokens=5, keys=keys)
    doubled = AttentionRecord(
        *(torch.cat([x, x]) for x in (one.query, one.key, one.value)),
        *(one.w_q, one.w_k, one.w_v, torch.cat([one.out, one.out]), None),
        *(torch.cat([x, x]) for x in (one.q, one.k)),
        *(None, False, None),
    )
    mean, again = terms(one, expectation=expectation), terms(doubled, expectation=expectation)
    total, twice = (terms(r, expectation=expectation, reduction="sum") for r in (one, doubled))
    for component in ATTENTION:
        assert again[component] == pytest.approx(float(mean[component]), rel=1e-12)
        assert twice[component] == pytest.approx(2 * float(total[component]), rel=1e-12)


TIMES_MEAN = {
    "mean": lambda samples, tokens: 1,
    "sum": lambda samples, tokens: samples * tokens,
    "literal": lambda samples, tokens: tokens,
    "authors": lambda samples, tokens: 2 * samples,
}
"""What each reduction is of the mean, for the same heads."""


@pytest.mark.parametrize("expectation", EXPECTATIONS)
@pytest.mark.parametrize("reduction", TIMES_MEAN)
def test_reductions_are_multiples_of_the_mean_by_samples_and_the_tokens_of_the_component(reduction, expectation):
    r = record(batch=3, tokens=5, keys=7, width=6, heads=3)
    ours = terms(r, reduction=reduction, heads="joint", expectation=expectation)
    mean = terms(r, heads="joint", expectation=expectation)
    for component, tokens in {"q": 5, "k": 7, "v": 7, "av": 5}.items():
        times = TIMES_MEAN[reduction](3, tokens)
        assert ours[component] == pytest.approx(times * float(mean[component]), rel=1e-12)
    ff = ff_term(r.query, r.w_q, reduction=reduction, expectation=expectation)
    times = TIMES_MEAN[reduction](3, 5)
    assert ff == pytest.approx(times * float(ff_term(r.query, r.w_q, expectation=expectation)), rel=1e-12)


@pytest.mark.parametrize("reduction", TIMES_MEAN)
def test_the_reductions_of_arora_are_the_same_multiples_so_it_stays_twice_inverted(reduction):
    r = record(batch=3, tokens=5, keys=7)
    both = AroraDropout(q=1, k=1, v=1, p=P, reduction=reduction), AroraDropout(q=1, k=1, v=1, p=P)
    ours, mean = (method.attention_terms(r, HERE) for method in both)
    for component, tokens in {"q": 5, "k": 7, "v": 7}.items():
        assert ours[component] == pytest.approx(TIMES_MEAN[reduction](3, tokens) * float(mean[component]), rel=1e-12)
    inverted = terms(r, reduction=reduction, expectation="inverted")
    assert ours["v"] == pytest.approx(2 * float(inverted["v"]), rel=1e-12)


def test_authors_takes_all_heads_together_whatever_is_asked_for():
    r = record(batch=3, tokens=5, width=6, heads=3)
    joint, asked = terms(r, reduction="authors", heads="joint"), terms(r, reduction="authors", heads="per_head")
    assert asked["q"] == joint["q"] != terms(r, reduction="literal")["q"]


def test_literal_is_the_printed_half_trace_of_each_sequence_averaged_over_the_batch():
    r = record(batch=3, tokens=5, width=6, heads=3)
    printed, ours = naive(r, 1), terms(r, reduction="literal", heads="joint")
    for component in ATTENTION:
        assert ours[component] == pytest.approx(float(printed[component]) / 3, rel=1e-10)


@pytest.mark.parametrize(("reduction", "sums"), [("mean", False), ("literal", False), ("sum", True), ("authors", True)])
def test_penalties_say_whether_they_are_sums_over_the_batch(reduction, sums):
    assert ExplicitDropout(v=1, reduction=reduction).sums == AroraDropout(v=1, reduction=reduction).sums == sums


def test_arora_has_both_layers_of_the_mlp_apart():
    x, weight = record().query, record().w_q
    layer = LayerRecord(x, weight)
    assert AroraDropout(ff2=1).mlp_terms("ff1", layer, HERE) == {}
    apart = AroraDropout(ff1=0.5, ff2=2)
    assert apart.mlp_terms("ff1", layer, HERE)["ff1"] == pytest.approx(0.5 * float(arora(x, weight, 0.2)), rel=1e-12)
    assert apart.mlp_terms("ff2", layer, HERE)["ff2"] == pytest.approx(2 * float(arora(x, weight, 0.2)), rel=1e-12)
    with pytest.raises(attemper.errors.ParameterError, match="ff sets both ff1 and ff2"):
        AroraDropout(ff=1, ff2=1)
    with pytest.raises(attemper.errors.ParameterError, match="one of mean, sum, literal, authors; got 'max'"):
        AroraDropout(v=1, reduction="max")


# ------------------------------------------------------------------------------------------- gradients and memory
@pytest.mark.parametrize("expectation", EXPECTATIONS)
@pytest.mark.parametrize("which", ["linear", "logit", "av"])
def test_gradients_are_right(which, expectation):
    r = record(batch=2, tokens=3, keys=4)
    leaves = [x.clone().requires_grad_() for x in (r.query, r.key, r.w_q, r.w_k, r.w_v)]

    def penalty(query, key, w_q, w_k, w_v):
        if which == "linear":
            return linear_square(query, w_q, P, expectation)
        if which == "logit":
            return logit_square(query, w_q, query @ w_q.T, key @ w_k.T, 2, P, expectation)
        q, k, v = split(query @ w_q.T, 2), split(key @ w_k.T, 2), split(key @ w_v.T, 2)
        out = weights_of(q, k) @ v
        made = AttentionRecord(query, key, key, w_q, w_k, w_v, out, None, q, k, None, False, None)
        return av_square(made, P, expectation)

    assert torch.autograd.gradcheck(penalty, leaves)


class Largest(TorchDispatchMode):
    """The most elements that any operation gave."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.numel())
        return out


@pytest.mark.parametrize(
    ("batch", "tokens", "width", "heads", "limit"),
    [(1, 4096, 16, 1, 4096 * 4096), (8, 16, 512, 1, 8 * 512 * 512)],
    ids=["tokens × tokens", "batch × width × width"],
)
@pytest.mark.parametrize("expectation", ["paper", "exact"])
def test_no_penalty_builds_a_square_matrix_per_sample(batch, tokens, width, heads, limit, expectation):
    x, *weights = (torch.randn(*shape, requires_grad=True) for shape in [(batch, tokens, width)] + 3 * [(width, width)])
    q, k, v = (split(x @ w.T, heads) for w in weights)
    out = nn.functional.scaled_dot_product_attention(q, k, v)
    r = AttentionRecord(x, x, x, *weights, out, None, q, k, None, False, None)
    method = ExplicitDropout(q=1, k=1, v=1, av=1, ff=1, expectation=expectation, heads="joint")
    with Largest() as largest:
        penalty = (
            sum(method.attention_terms(r, HERE).values())
            + method.mlp_terms("ff1", LayerRecord(x, weights[0]), HERE)["ff1"]
        )
        penalty.backward()
    assert x.grad is not None
    assert batch * tokens * width <= largest.elements < limit


def test_mean_and_strength_are_linear_and_a_rate_of_zero_penalises_nothing():
    r = record()
    values = [float(terms(r, v=strength)["v"]) for strength in (1.0, 2.0, 4.0)]
    assert all(after == pytest.approx(2 * before) for before, after in pairwise(values))
    nothing = ExplicitDropout(q=1, v=1, av=1, p=0.0, expectation="exact").attention_terms(r, HERE)
    assert all(float(value) == 0.0 for value in nothing.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"explicit needs the strength of at least one component.*explicit\(v=5e-4, ff=5e-4\)"),
        ({"v": math.nan}, "v must be a number of at least 0, got nan"),
        ({"v": [0.1, math.nan]}, r"v\[1\] must be a number of at least 0, got nan"),
        ({"q": -1.0}, "q must be a number of at least 0, got -1.0"),
        ({"ff": 0.1, "ff1": 0.2}, "ff sets both ff1 and ff2"),
        ({"v": 1, "p": 1.0}, r"p must be a number in \[0, 1\), got 1.0"),
        ({"v": 1, "expectation": "mean"}, "expectation must be one of paper, exact, inverted; got 'mean'"),
        ({"v": 1, "reduction": "none"}, "reduction must be one of mean, sum, literal, authors"),
    ],
)
def test_bad_parameters_are_named(options, message):
    with pytest.raises(attemper.errors.ParameterError, match=message):
        ExplicitDropout(**options)


def test_squares_of_logits_do_not_overflow_under_autocast_to_float16() -> None:
    x = 30 * torch.randn(2, 40, 16)
    weight = torch.randn(16, 16)
    arguments = (x, weight, x @ weight.T, x @ weight.T, 2, P, "paper")
    expected = logit_square(*arguments)
    with torch.autocast("cpu", torch.float16):
        torch.testing.assert_close(logit_square(*arguments), expected)
