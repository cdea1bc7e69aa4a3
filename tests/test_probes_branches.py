"""Jacobians of the branches of blocks: attention and feed-forward network, without and with their skips."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

import attemper
from attemper.errors import ParameterError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import InputShape
from attemper.probes import diagnose, module_jacobians
from families import build, family

FOUR = ("attention", "attention + skip", "mlp", "mlp + skip")


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def encoder(width=4, *, layers=1, **options):
    options = {"batch_first": True, "norm_first": True, "dropout": 0.0, "activation": "gelu"} | options
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).double().eval()


def jacobian(function, x):
    """The whole of it, row by row by torch: (outputs, inputs) of x (N, d)."""
    return torch.autograd.functional.jacobian(function, x).reshape(-1, x.numel())


def complement_of_norm(x):
    """An orthonormal basis (N·d, N·(d − 2)) of what a layer norm keeps of the tokens x (N, d)."""
    lost = torch.stack([torch.ones_like(x), x - x.mean(-1, keepdim=True)], -1)
    kept = torch.linalg.qr(lost, mode="complete").Q[..., 2:]
    return torch.block_diag(*kept)


def kappa(matrix):
    sigma = torch.linalg.svdvals(matrix)
    return (sigma[0] / sigma[-1]).item()


def rows_of(table, block=0):
    return {row.place: row for row in table.jacobians if row.block == block}


def attention_of(layer):
    def attention(tokens):
        normed = layer.norm1(tokens)[None] if layer.norm_first else tokens[None]
        return layer.self_attn(normed, normed, normed, need_weights=False)[0][0]

    return attention


def mlp_of(layer):
    def mlp(tokens):
        return layer.linear2(layer.activation(layer.linear1(layer.norm2(tokens) if layer.norm_first else tokens)))

    return mlp


# ----------------------------------------------------------------------------------------------- against torch, by hand
def test_each_branch_has_the_jacobian_of_autograd_without_what_its_norm_loses():
    model, x = encoder(), double(3, 5, 4)
    found = rows_of(diagnose(model, x, ["jacobian"]))
    layer, eye = model.layers[0], torch.eye(20, dtype=torch.float64)
    stream = x[0] + attention_of(layer)(x[0])
    assert tuple(found) == FOUR
    for place, function, at in (("attention", attention_of(layer), x[0]), ("mlp", mlp_of(layer), stream.detach())):
        whole = jacobian(function, at)
        alone, with_skip = found[place], found[f"{place} + skip"]
        # A decomposition errs by some 1e-15 of the largest value: by κ times that, relative to the smallest.
        assert alone.condition == pytest.approx(kappa(whole @ complement_of_norm(at)), rel=1e-8)
        assert with_skip.condition == pytest.approx(kappa(whole + eye), rel=1e-8)
        assert with_skip.largest == pytest.approx(torch.linalg.svdvals(whole + eye)[0].item(), rel=1e-10)
        assert (alone.left_out, with_skip.left_out) == (10, 0)
        assert (alone.coordinates, alone.whole) == (20, True)
        assert "κ leaves out 10 directions that the norm loses: the mean and the centred input" in alone.reason


def test_behind_a_norm_at_the_end_of_a_block_nothing_is_left_out():
    model, x = encoder(norm_first=False), double(1, 5, 4)
    found = rows_of(diagnose(model, x, ["jacobian"]))
    layer, eye = model.layers[0], torch.eye(20, dtype=torch.float64)
    behind = layer.norm1(x[0] + attention_of(layer)(x[0])).detach()  # what the feed-forward network gets
    for place, function, at in (("attention", attention_of(layer), x[0]), ("mlp", mlp_of(layer), behind)):
        whole = jacobian(function, at)
        assert found[place].condition == pytest.approx(kappa(whole), rel=1e-8)
        assert found[f"{place} + skip"].condition == pytest.approx(kappa(whole + eye), rel=1e-8)
        assert found[place].left_out == 0


def test_a_removed_skip_leaves_the_branch_alone():
    model, x = encoder(width=8), double(1, 4, 8)
    before = rows_of(diagnose(model, x, ["jacobian"]))
    tempered = attemper.apply(model, "skipless(attention)")
    found = rows_of(diagnose(model, x, ["jacobian"]))
    assert found["attention + skip"].condition == found["attention"].condition == before["attention"].condition
    assert found["attention + skip"].left_out == 8
    assert found["mlp + skip"].left_out == 0
    tempered.remove()
    assert rows_of(diagnose(model, x, ["jacobian"])) == before


class Parallel(nn.Module):
    """Both branches see the block's input."""

    def __init__(self, together):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.together = together

    def forward(self, *, hidden_states):
        normed = self.norm(hidden_states)
        attended, mixed = self.attn(normed, normed, normed, need_weights=False)[0], self.mlp(normed)
        return hidden_states + (attended + mixed) if self.together else (hidden_states + attended) + mixed


class Blocks(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(hidden_states=x)
        return x


@pytest.mark.parametrize("together", [False, True])
def test_branches_beside_each_other_are_differentiated_by_the_input_of_the_block(together):
    model, x = Blocks(Parallel(together), Parallel(together)).double().eval(), double(2, 3, 8)
    found = rows_of(diagnose(model, x, ["jacobian"]))
    block, keep = model.blocks[0], complement_of_norm(x[0])

    def attention(tokens):
        normed = block.norm(tokens)[None]
        return block.attn(normed, normed, normed, need_weights=False)[0][0]

    def mlp(tokens):
        return block.mlp(block.norm(tokens))

    parts = {"attention": jacobian(attention, x[0]), "mlp": jacobian(mlp, x[0])}
    parts["block"] = parts["attention"] + parts["mlp"]
    expected = ("block", "block + skip") if together else FOUR
    assert tuple(found) == expected
    for place in expected:
        if "skip" not in place:
            assert found[place].condition == pytest.approx(kappa(parts[place] @ keep), rel=1e-8)
            assert found[place].left_out == 6
    first = parts["block" if together else "attention"] + torch.eye(24)
    assert found[expected[1]].condition == pytest.approx(kappa(first), rel=1e-8)


def test_models_with_tokens_first_are_looked_at_one_sample_at_a_time():
    first = encoder(batch_first=False)
    batch = encoder()
    batch.load_state_dict(first.state_dict())
    x = double(3, 5, 4)
    found, expected = diagnose(first, x.transpose(0, 1), ["jacobian"]), diagnose(batch, x, ["jacobian"])
    for one, other in zip(found.jacobians, expected.jacobians, strict=True):
        assert one.condition == pytest.approx(other.condition, rel=1e-8)
        assert one.coordinates == 20


class InPlace(nn.Module):
    """Changes the stream that its norm must remember: this can be run, and not differentiated."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, *, hidden_states):
        normed = self.norm(hidden_states)
        hidden_states += self.attn(normed, normed, normed, need_weights=False)[0]
        return hidden_states


def test_what_cannot_be_differentiated_is_said_to_be_unknown():
    table = diagnose(Blocks(InPlace(), InPlace()), torch.randn(2, 3, 8), ["jacobian"])
    assert [(row.place, row.condition) for row in table.jacobians[:2]] == [
        ("attention", None),
        ("attention + skip", None),
    ]
    assert "of blocks 0, 1: not known: what its gradient needs is changed in place" in str(table)


def test_above_the_limit_the_largest_value_is_there_and_the_rest_is_said_to_be_unknown():
    model, x, lines = encoder(width=8), double(1, 5, 8), []
    whole = rows_of(diagnose(model, x, ["jacobian"], jacobian_limit=40))
    table = diagnose(model, x, ["jacobian"], jacobian_limit=39, log=lines.append)
    for place, row in rows_of(table).items():
        # Of a branch behind a norm the whole leaves directions out, along which ε keeps a share of some 1e-5.
        rel = 1e-9 if "skip" in place else 1e-4
        assert row.largest == pytest.approx(whole[place].largest, rel=rel), place
        assert (row.condition, row.whole) == (None, False)
    assert "of block 0: κ is not known: 40 coordinates, and the limit is 39" in str(table)
    assert lines == [f"block 0, {place}: the Jacobian of 40 coordinates" for place in ("attention", "mlp")]


def test_half_precision_is_looked_at_in_float64():
    model, x = encoder(width=8), double(1, 4, 8)
    half = encoder(width=8).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    model.load_state_dict(half.state_dict())
    x = x.to(torch.bfloat16)
    expected = rows_of(diagnose(model, x.double(), ["jacobian"]))
    for place, row in rows_of(diagnose(half, x, ["jacobian"])).items():
        assert row.condition == pytest.approx(expected[place].condition, rel=1e-8)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_looking_leaves_no_trace():
    model, x = encoder(width=8, layers=2, dropout=0.1).train(), double(2, 4, 8)
    random = torch.get_rng_state()
    before = model(x)
    torch.set_rng_state(random)
    table = diagnose(model, x, ("conditioning", "jacobian"))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model(x), before)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert {(row.block, row.place) for row in table.jacobians} == {(b, place) for b in range(2) for place in FOUR}
    assert "κ(Jacobian)" in str(table)
    assert table.to_dict()["jacobians"][0]["left_out"] == 8


def test_a_model_without_a_stream_has_no_jacobian_and_says_why():
    kind = family("nn-mha")
    (row,) = diagnose(build(kind), kind.inputs()["args"], ["jacobian"]).jacobians
    assert row.condition is None
    assert row.reason.startswith("not known: SelfAttention does not add its attention")


# ------------------------------------------------------------------------------------------------ without attention
def test_mixers_have_jacobians_of_both_branches():
    model = build_model("convmixer(width=4, depth=1, kernel=3, patch=2)", InputShape(1, 8, 8, 10)).double().eval()
    x = double(3, 1, 8, 8)
    rows = module_jacobians(model, x, ["blocks.0", "blocks.0.spatial"])
    assert [row.place for row in rows] == [
        "branch 1", "branch 1 + skip", "branch 2", "branch 2 + skip", "block", "block + skip",
    ]  # fmt: skip
    block, maps = model.blocks[0], model.patches(x[:1]).detach()
    mixed = (maps + block.spatial(maps)).detach()
    eye = torch.eye(64, dtype=torch.float64)
    for at, function, place in ((0, block.spatial, maps), (2, block.channel, mixed), (4, block.spatial, maps)):
        whole = jacobian(function, place)
        assert rows[at].condition == pytest.approx(kappa(whole), rel=1e-8)
        assert rows[at + 1].condition == pytest.approx(kappa(whole + eye), rel=1e-8)
    assert not block._forward_hooks


def test_residual_networks_have_the_jacobian_of_what_they_add_and_of_the_sum():
    block = torchvision.models.resnet.BasicBlock(2, 3, 1, nn.Conv2d(2, 3, 1)).double().eval()
    x = double(2, 2, 3, 3)

    def branch(x):
        return block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))

    alone, total = module_jacobians(nn.Sequential(block), x, ["0"])
    shortcut = jacobian(block.downsample, x[:1])
    whole = jacobian(branch, x[:1])
    assert alone.largest == pytest.approx(torch.linalg.svdvals(whole)[0].item(), rel=1e-10)
    assert total.condition == pytest.approx(kappa(whole + shortcut), rel=1e-8)
    with pytest.raises(ParameterError, match=r"Sequential has no module 'blocks\.7'"):
        module_jacobians(nn.Sequential(block), x, ["blocks.7"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf-bert", FOUR),
        ("hf-falcon", ("block", "block + skip")),
        ("hf-perceiver", FOUR),
        ("timm-cait", FOUR),
        ("torchvision-vit", FOUR),
        ("nn-decoder", FOUR),
        ("timm-swin", FOUR),
    ],
)
def test_families_have_jacobians_of_their_branches(name, expected):
    kind = family(name)
    inputs = kind.inputs()
    table = diagnose(build(kind), inputs.get("args", inputs), ["jacobian"], jacobian_limit=1_000)
    assert tuple(rows_of(table, table.jacobians[0].block)) == expected
    assert all(row.largest is not None for row in table.jacobians)
