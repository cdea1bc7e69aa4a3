"""Which way training pushes attention, and what DropKey adds to it: against every mask of a row, written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.errors import ParameterError
from attemper.probes import diagnose, logit_push
from attemper.probes.smoothing import EDGES, push_of
from families import build, family

SCORES = torch.tensor([1.5, 0.2, -0.4, 0.9], dtype=torch.float64)
GAINS = torch.tensor([-1.0, 0.7, 0.3, -0.2], dtype=torch.float64)
"""∂L/∂A of a row: the key of the largest weight lowers the loss, so descent pushes it up."""


def all_masks(keys, p):
    """Every set of kept keys with its probability; a row that would lose all of its keys keeps them."""
    for kept in itertools.product([True, False], repeat=keys):
        chance = math.prod(1 - p if keep else p for keep in kept)
        yield chance, torch.tensor(kept if any(kept) else (True,) * keys)


def loss_and_push(scores, kept):
    """The loss Σ A c and −∂L/∂S under one mask, from the derivative of softmax."""
    weights = scores.masked_fill(~kept, -math.inf).softmax(-1)
    mean = (weights * GAINS).sum()
    return mean, weights * (mean - GAINS)


class OneRow(nn.Module):
    """Attention of one query over keys whose logits are SCORES and whose values are GAINS."""

    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x):
        return self.attn(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(1, 3)

    def forward(self, x):
        q = x[:, None, :1, None]
        k, v = SCORES[None, None, :, None].expand(len(x), 1, -1, 1), GAINS[None, None, :, None].expand(len(x), 1, -1, 1)
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)[:, 0, :, 0]


# --------------------------------------------------------------------------------------------------- against every mask
def test_the_push_under_dropkey_is_the_mean_over_all_masks():
    p, draws = 0.3, 5_000
    model, ones = OneRow(), torch.ones(draws, 1, dtype=torch.float64)
    attemper.apply(model, f"dropkey({p})", targets=["attn"])
    torch.manual_seed(0)
    plain, dropped = logit_push(model, lambda: model(ones).sum(), passes=1, targets=["attn"])
    weights, spread = SCORES.softmax(-1), (SCORES.softmax(-1) - 0.25).square().sum()
    _, push = loss_and_push(SCORES, torch.ones(4, dtype=torch.bool))
    assert (plain.recipe, dropped.recipe) == ("none", "recipe")
    assert plain.slope == pytest.approx(float((weights * push).sum() / spread), rel=1e-10)

    slopes = [(chance, float((weights * loss_and_push(SCORES, m)[1]).sum() / spread)) for chance, m in all_masks(4, p)]
    expected = sum(chance * slope for chance, slope in slopes)
    deviation = math.sqrt(sum(chance * (slope - expected) ** 2 for chance, slope in slopes) / draws)
    assert abs(dropped.slope - expected) < 5 * deviation
    assert expected < plain.slope, "DropKey weakens the push towards the largest weight"
    assert abs(plain.slope - expected) > 10 * deviation, "so many draws can tell the two apart"


def test_what_dropkey_adds_to_the_loss_is_the_penalty_up_to_the_square_of_the_rate():
    model, one = OneRow(), torch.ones(1, 1, dtype=torch.float64)
    (row,) = logit_push(model, lambda: model(one).sum(), targets=["attn"])
    plain, push = loss_and_push(SCORES, torch.ones(4, dtype=torch.bool))
    weights = SCORES.softmax(-1)
    assert row.penalty == pytest.approx(float((push * weights / (1 - weights)).sum()), rel=1e-10)
    # The same sum with 1/(1 − A): a row's push sums to zero.
    assert row.penalty == pytest.approx(float((push / (1 - weights)).sum()), rel=1e-10)

    def left_over(p):
        expected = sum(chance * loss_and_push(SCORES, mask)[0] for chance, mask in all_masks(4, p))
        return float(expected - plain) - p * row.penalty

    # What remains is a polynomial in p that begins with p²: halving p divides it by 4, up to a term of order p.
    assert left_over(1e-3) / left_over(5e-4) == pytest.approx(4, rel=0.02)
    assert row.penalty > 0


def test_the_gradient_of_the_penalty_flattens_attention():
    scores = SCORES.clone().requires_grad_()

    def expected_loss(p):
        return sum(
            chance * (scores.masked_fill(~mask, -math.inf).softmax(-1) * GAINS).sum()
            for chance, mask in all_masks(4, p)
        )

    (extra,) = torch.autograd.grad(expected_loss(0.1) - expected_loss(0.0), scores)
    assert (SCORES.softmax(-1) * -extra).sum() < 0


# --------------------------------------------------------------------------------------------------------- what is told
def test_the_numbers_are_what_they_are_said_to_be():
    logits = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    allowed = torch.rand(2, 3, 5, 6) > 0.3
    allowed[..., 0] = True
    weights, gradient = logits.masked_fill(~allowed, -math.inf).softmax(-1), torch.randn_like(logits)
    gradient = torch.where(allowed, gradient, 0.0)
    gradient = torch.where(allowed, gradient - gradient.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True), 0.0)
    found = push_of(weights, allowed, gradient)
    along = spread = largest = moved = 0.0
    bins = [[] for _ in EDGES[1:]]
    for row, ok, g in zip(weights.view(-1, 6), allowed.view(-1, 6), gradient.view(-1, 6), strict=True):
        a, push = row[ok], -g[ok]
        along += float(((a - a.mean()) * push).sum())
        spread += float(((a - a.mean()) ** 2).sum())
        largest += float(push[a.argmax()])
        moved += float(push.clamp_min(0).sum())
        for weight, value in zip(a * len(a), push, strict=True):
            bins[max(i for i, edge in enumerate(EDGES[:-1]) if weight >= edge)].append(float(value))
    assert float(found.along) == pytest.approx(along, abs=1e-12)
    assert float(found.spread) == pytest.approx(spread, rel=1e-12)
    assert float(found.on_largest) == pytest.approx(largest, rel=1e-12)
    assert float(found.moved) == pytest.approx(moved, rel=1e-12)
    assert found.counted.tolist() == [len(values) for values in bins]
    torch.testing.assert_close(found.binned, torch.tensor([sum(values) for values in bins], dtype=torch.float64))


@pytest.mark.parametrize("name", ["timm-vit", "torchvision-vit", "nn-decoder", "hand-written"])
def test_the_gradient_is_that_of_the_logits_however_attention_is_computed(name):
    """A small step along the push of every logit changes the loss as its length says: L′ = −Σ push²."""
    from attemper.probes import smoothing

    kind = family(name)
    model, inputs = build(kind), kind.inputs()
    x = inputs["args"]
    target = torch.zeros(len(x[0]), dtype=torch.long)
    seen, moves = [], {}

    class Recording(smoothing.LogitWatch):
        def zero(self, call, like):
            zero = super().zero(call, like)
            moved = zero + moves[len(seen)] if len(seen) in moves else zero
            seen.append(zero)
            return moved

    def loss(watches):
        seen.clear()
        with smoothing.looking(watches):
            out = smoothing.first_tensor(model(*x)).double()
        return F.cross_entropy(out.flatten(0, -2), target.repeat_interleave(out.flatten(0, -2).shape[0] // len(target)))

    model.double().eval()
    x = tuple(part.double() for part in x)
    watches = [(site.module, Recording(site)) for site in smoothing.find_attention(model).attentions]
    gradients = torch.autograd.grad(loss(watches), list(seen))
    slope = sum(float(g.square().sum()) for g in gradients)
    step = 1e-3 / math.sqrt(slope)
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            moves.update({at: -sign * step * g for at, g in enumerate(gradients)})
            values.append(float(loss(watches)))
    # A central difference errs by the third derivative times step², far below a thousandth of the slope.
    assert (values[1] - values[0]) / (2 * step) == pytest.approx(slope, rel=1e-3)


class Causal(nn.Module):
    """Attention that sees no later token: by the flag of the fused call, or by a mask and the hint beside it."""

    def __init__(self, how):
        super().__init__()
        self.how, self.attn = how, nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        padding = torch.arange(x.shape[1]).expand(len(x), -1) > x.shape[1] - 2 if self.how == "padded" else None
        hinted = self.how != "unhinted"
        return self.attn(x, x, x, padding, need_weights=False, attn_mask=hidden, is_causal=hinted)[0]


class Fused(nn.Module):
    """The flag of the fused call."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.attn = FusedAttention(dropout)

    def forward(self, x):
        return self.attn(x)


class FusedAttention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.num_heads, self.dropout = nn.Linear(8, 24), 2, dropout

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("recipe", ["blur(2)", "dropkey(0.4)", "hardmask(0.5, k=2)", "blur(1) + dropattention(0.2)"])
@pytest.mark.parametrize("how", ["fused", "hinted", "unhinted", "padded"])
def test_causal_attention_computes_in_the_probe_what_it_computes_in_training(how, recipe):
    model = (Fused() if how == "fused" else Causal(how)).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    losses = []

    def loss():
        torch.manual_seed(3)
        losses.append(model(x).square().sum())
        return losses[-1]

    tempered = attemper.apply(model, recipe)
    try:
        tempered.loss(lambda: model(x), lambda out: out.sum())  # the first pass is watched
        expected = loss().item()
        logit_push(model, loss, passes=1)
    finally:
        tempered.remove()
    plain, acting = (each.item() for each in losses[1:])
    assert acting == pytest.approx(expected, rel=1e-12)
    assert plain != pytest.approx(expected, rel=1e-6), "the recipe does something here"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_causal_attention_with_a_penalty_alone_has_the_same_push(dropout):
    model, x = Fused(dropout).double(), torch.randn(2, 6, 8, dtype=torch.float64)

    def loss():
        torch.manual_seed(3)
        return model(x).square().sum()

    (alone,) = logit_push(model, loss)
    attemper.apply(model, "explicit(v=1e-2)")
    model(x)
    _, penalised = logit_push(model, loss, passes=1)
    assert penalised.slope == pytest.approx(alone.slope, rel=1e-9)


def test_looking_at_gradients_leaves_no_trace():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 8)
    tempered = attemper.apply(model, "dropkey(0.3)")
    random = torch.get_rng_state()
    table = diagnose(model, x, ["smoothing"])
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert [(row.block, row.recipe) for row in table.smoothing] == [
        (0, "none"), (0, "recipe"), (1, "none"), (1, "recipe"),
    ]  # fmt: skip
    assert "on largest" in str(table)
    assert len(table.to_dict()["smoothing"][0]["bins"]) == len(EDGES) - 1
    tempered.remove()
    assert [row.recipe for row in diagnose(model, x, ["smoothing"]).smoothing] == ["none", "none"]


@pytest.mark.parametrize("recipe", ["explicit(v=1e-2)", "dropkey(0.2) + consistency"])
def test_what_a_recipe_adds_to_the_loss_is_added(recipe):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 8)
    tempered = attemper.apply(model, recipe)
    plain, acting = diagnose(model, x, ["smoothing"]).smoothing[:2]
    assert plain.slope != acting.slope
    tempered.loss(lambda: model(x), lambda out: out.square().mean()).backward()  # training goes on as before


def test_a_loss_of_ones_own_is_used_and_a_model_without_classes_needs_one():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = torch.randn(2, 5, 8)
    once = diagnose(model, x, ["smoothing"], loss=lambda: model(x)[:, 0, 0].sum()).smoothing[0]
    twice = diagnose(model, x, ["smoothing"], loss=lambda: 2 * model(x)[:, 0, 0].sum()).smoothing[0]
    assert twice.slope == pytest.approx(2 * once.slope, rel=1e-4)
    assert twice.on_largest == pytest.approx(once.on_largest, rel=1e-4)
    single = nn.Sequential(model, nn.Linear(8, 1))
    with pytest.raises(ParameterError, match=r"gives \(2, 5, 1\), from which no class can be taken; give loss="):
        diagnose(single, x, ["smoothing"])
    with pytest.raises(ParameterError, match="passes must be a number of passes, at least 1; got 0"):
        logit_push(model, lambda: model(x).sum(), passes=0)
