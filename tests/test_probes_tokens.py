"""Probes on tokens and gradients: conditioning, Jacobians, the bound of linear attention, variance, penalties."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.errors import NoSiteError, ParameterError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import InputShape
from attemper.probes import (
    PLACES,
    condition_number,
    diagnose,
    effective_rank,
    gradient_variance,
    linear_attention_bound,
    penalty_push,
    token_similarity,
)
from attemper.probes.conditioning import linear_attention
from attemper.probes.tokens import conditioning_after
from families import build, family


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# -------------------------------------------------------------------------------------------------------- conditioning
@pytest.mark.parametrize("shape", [(3, 40, 8), (3, 8, 40), (12, 12), (2, 9, 8), (1, 5)])
def test_condition_number_is_that_of_torch(shape):
    x = double(*shape)
    torch.testing.assert_close(condition_number(x), torch.linalg.cond(x), rtol=1e-10, atol=0)
    assert condition_number(x.float()).dtype == torch.float64


@pytest.mark.parametrize("kappa", [1e3, 1e8, 1e12])
def test_condition_number_keeps_its_digits_where_a_gram_matrix_would_lose_them(kappa):
    left, right = torch.linalg.qr(double(64, 16)).Q, torch.linalg.qr(double(16, 16)).Q
    x = left @ torch.diag(torch.logspace(0, -math.log10(kappa), 16, dtype=torch.float64)) @ right.T
    assert condition_number(x).item() == pytest.approx(kappa, rel=1e-3)
    assert condition_number(x).item() == pytest.approx(torch.linalg.cond(x).item(), rel=1e-3)


def test_condition_number_of_tokens_that_are_all_alike_is_infinite_or_beyond_float64():
    assert condition_number(torch.ones(6, 4)).item() > 1e15


def test_effective_rank_counts_directions():
    assert effective_rank(torch.eye(7)).item() == pytest.approx(7)
    assert effective_rank(torch.ones(9, 5)).item() == pytest.approx(1, abs=1e-6)
    sigma = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert effective_rank(torch.diag(4 * sigma)).item() == pytest.approx(float((-sigma * sigma.log()).sum().exp()))


def test_similarity_is_the_mean_cosine_of_all_pairs():
    x = double(2, 7, 5)
    cosines = F.cosine_similarity(x[:, :, None], x[:, None], dim=-1)
    pairs = ~torch.eye(7, dtype=torch.bool)
    torch.testing.assert_close(token_similarity(x), cosines[:, pairs].mean(-1))
    assert token_similarity(torch.ones(1, 4, 3)).item() == pytest.approx(1)
    assert math.isnan(token_similarity(torch.ones(1, 3)).item())


def test_the_bound_of_linear_attention_holds_where_the_theory_says_so():
    for tokens, width in ((8, 8), (20, 8), (65, 32)):
        for _ in range(10):
            x = double(3, tokens, width) * torch.logspace(0, -2, width, dtype=torch.float64)
            found = linear_attention_bound(x, *(double(width, width) for _ in range(3)))
            assert found.holds
            assert (found.condition > 1).all()


def test_the_bound_is_reached_by_aligned_weights():
    x = torch.diag(torch.tensor([1.0, 0.1], dtype=torch.float64))
    w = torch.eye(2, dtype=torch.float64)
    found = linear_attention_bound(x, w, w, w)
    assert found.condition.item() == pytest.approx(1e3)
    assert found.bound.item() == pytest.approx(1e3)


def test_the_bound_is_refused_where_it_is_false():
    w = torch.linalg.qr(double(8, 8)).Q
    with pytest.raises(ParameterError, match="at least as many tokens as dimensions; got 4 tokens of 8"):
        linear_attention_bound(double(4, 8), w, w, w)
    with pytest.raises(ParameterError, match=r"square weights \(8, 8\); w_k is \(8, 3\)"):
        linear_attention_bound(double(9, 8), w, double(8, 3), w)
    with pytest.raises(ParameterError, match="w_v is singular"):
        linear_attention_bound(double(9, 8), w, w, torch.zeros(8, 8))
    # Two tokens along one axis and keys that turn it away: the product vanishes although every κ is 1.
    x, turn = torch.eye(4, dtype=torch.float64)[:2], torch.eye(4, dtype=torch.float64).roll(2, 0)
    out = linear_attention(x, torch.eye(4, dtype=torch.float64), turn, torch.eye(4, dtype=torch.float64))
    assert condition_number(x).item() == condition_number(turn).item() == 1
    assert out.abs().max() == 0


# ---------------------------------------------------------------------------------------------------- through a block
def test_tokens_are_taken_where_the_table_says():
    kind = family("timm-vit")
    model, (x,) = build(kind).double().eval(), kind.inputs()["args"]
    x = x.double()
    table = diagnose(model, x, ["conditioning"])
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(x))
        for index, block in enumerate(model.blocks):
            branch = block.attn(block.norm1(tokens))
            stream = tokens + branch
            mlp = block.mlp(block.norm2(stream))
            out = block(tokens)
            rows = {row.place: row for row in table.tokens if row.block == index}
            for place, expected in zip(PLACES, (tokens, branch, stream, mlp, out), strict=True):
                kappa = torch.linalg.cond(expected).sort().values[0]  # the median of two is the lower one
                assert rows[place].condition == pytest.approx(kappa.item(), rel=1e-8), place
                assert rows[place].similarity == pytest.approx(token_similarity(expected).mean().item()), place
            tokens = out


def test_without_the_attention_skip_the_stream_is_the_branch():
    kind = family("timm-vit")
    model, (x,) = build(kind), kind.inputs()["args"]
    attemper.apply(model, "skipless(attention)")
    table = diagnose(model, x, ["conditioning"])
    for block in range(3):
        rows = {row.place: row for row in table.tokens if row.block == block}
        assert rows["attention"].condition == rows["attention + skip"].condition
    assert table.tokens[-1].condition > 10 * diagnose(build(kind), x, ["conditioning"]).tokens[-1].condition


def test_sequence_first_models_are_read_along_the_right_axis():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    first = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    batch = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    batch.load_state_dict(first.state_dict())
    x = torch.randn(3, 9, 16)
    a, b = diagnose(first, x.transpose(0, 1)), diagnose(batch, x)
    for one, other in zip(a.tokens, b.tokens, strict=True):
        assert one.condition == pytest.approx(other.condition, rel=1e-3)
    for one, other in zip(a.heads, b.heads, strict=True):
        assert one.entropy == pytest.approx(other.entropy, rel=1e-5)


def test_networks_without_attention_have_conditioning_too():
    model = build_model("convmixer(width=8, depth=2, kernel=3, patch=2)", InputShape(1, 8, 8, 10))
    x = torch.randn(4, 1, 8, 8)
    found = conditioning_after(model, x, ["blocks.0", "blocks.1"])
    with torch.no_grad():
        maps = model.eval().blocks(model.patches(x))
    expected = torch.linalg.cond(maps.double().flatten(2).transpose(1, 2)).median().item()
    assert found["blocks.1"].condition == pytest.approx(expected, rel=1e-6)
    assert not model.blocks[0]._forward_hooks


# ----------------------------------------------------------------------------------------------------------- gradients
def test_gradient_variance_is_that_of_the_single_gradients():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batches = [(double(4, 6), torch.randint(0, 3, (4,))) for _ in range(5)]

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    rows = gradient_variance(model, loss, batches)
    assert [row.parameter for row in rows] == [name for name, _ in model.named_parameters()]
    for at, row in enumerate(rows):
        single = torch.stack([torch.autograd.grad(loss(b), list(model.parameters()))[at].flatten() for b in batches])
        assert row.mean_norm == pytest.approx(single.mean(0).norm().item())
        assert row.variance == pytest.approx(single.var(0).sum().item())
        assert row.noise_scale == pytest.approx(row.variance / row.mean_norm**2)
    with pytest.raises(ParameterError, match="at least two batches; got 1"):
        gradient_variance(model, loss, batches[:1])


def test_gradient_probes_leave_gradients_statistics_and_random_numbers_alone():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 2))
    model.train()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    gradient_variance(model, lambda x: model(x).square().mean(), [torch.ones(2, 1, 8, 8)] * 3)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_penalty_pushes_what_its_gradient_says():
    kind = family("timm-vit")
    model, (x,) = build(kind), kind.inputs()["args"]
    tempered = attemper.apply(model, "explicit(v=1e-2, ff=1e-3)")
    model.eval()
    rows = penalty_push(tempered, lambda: model(x))
    assert not model.training
    assert rows == tuple(sorted(rows, key=lambda row: -row.norm))
    terms = {row.term for row in rows}
    assert len(terms) > 1
    assert all(term.startswith("explicit.") for term in terms)
    model.train()
    model(x)
    total = tempered.penalty()
    weight = model.blocks[2].mlp.fc2.weight
    (expected,) = torch.autograd.grad(total, weight)
    pushed = [row.norm for row in rows if row.parameter == "blocks.2.mlp.fc2.weight"]
    assert len(pushed) == 1, "one term alone knows this weight"
    assert pushed[0] == pytest.approx(expected.norm().item(), rel=1e-5)
    assert "head.weight" not in {row.parameter for row in rows}, "no penalty knows the classifier"


def test_a_recipe_without_a_penalty_pushes_nothing_and_says_so():
    kind = family("timm-vit")
    model, (x,) = build(kind), kind.inputs()["args"]
    with pytest.raises(NoSiteError, match="no method of this recipe adds a penalty"):
        penalty_push(attemper.apply(model, "dropkey(0.1)"), lambda: model(x))
