"""Branches that a loop adds, outside of the modules that compute them: the same formulas, or a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.errors import UnmetError
from attemper.methods.kinds import Tokens
from attemper.ops.stream import Stream
from plain_blocks import WIDTH, Attention, Block, tokens


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Outside(nn.Module):
    """vit-pytorch's way: a layer is a list of two parts, and both sums are in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), FeedForward()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:
            x = attention(x) + x
            x = mlp(x) + x
        return x


def test_a_layer_that_is_a_list_is_one_block_of_a_schedule() -> None:
    tempered = attemper.apply(Outside(), "dropkey(0.4, schedule=decreasing) + ffdropout(0.4, schedule=decreasing)")
    assert {(row.block, row.rate) for row in tempered.summary()} == {(0, 0.4), (1, 0.2)}
    assert {row.site for row in tempered.summary() if row.block == 0} == {"layers.0.0", "layers.0.1.net.3"}


class Parts(nn.Module):
    """Attention and MLPs listed apart: each is a block of its own, and neither adds anything."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.mlps = nn.ModuleList(FeedForward() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = attention(x) + x
            x = mlp(x) + x
        return x


class HalfABlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm1(x))


class HalfOutside(nn.Module):
    """A block adds its attention; its MLP is run, and added, by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HalfABlock() for _ in range(2))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x + layer.mlp(x)
        return x


class Checkpointed(Outside):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:
            x = checkpoint(lambda x, part: part(x) + x, x, attention, use_reentrant=self.reentrant)
            x = mlp(x) + x
        return x


class CheckpointedBefore(Outside):
    """Only what comes before the sums is inside of checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:
            x = checkpoint(attention, x, use_reentrant=False) + x
            x = mlp(x) + x
        return x


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().train()


def pairs(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Attention and MLP of each layer, in order."""
    if isinstance(model, Parts):
        return list(zip(model.attentions, model.mlps, strict=True))
    if isinstance(model, HalfOutside):
        return [(lambda x, block=block: block.attn(block.norm1(x)), block.mlp) for block in model.layers]
    return [(layer[0], layer[1]) for layer in model.layers]


def temper_and_run(model: nn.Module, recipe: str) -> None:
    attemper.apply(model, recipe)
    model(tokens().requires_grad_())


OUTSIDE = [Outside, Parts, HalfOutside, CheckpointedBefore]


@pytest.mark.parametrize("kind", OUTSIDE)
def test_sums_in_a_loop_outside_of_the_blocks_are_found(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    x, plain = tokens(), made(kind)
    bare, both, dropped = made(kind), made(kind), made(kind)
    attemper.apply(bare, "skipless")
    attemper.apply(both, "skipless(both)")
    attemper.apply(dropped, "droppath(0.5)")
    expected, nothing = x, x
    for attention, mlp in pairs(plain):
        expected = attention(expected)
        expected = mlp(expected) + expected
        nothing = mlp(attention(nothing))
    torch.testing.assert_close(bare(x), expected)
    torch.testing.assert_close(bare.eval()(x), expected)
    torch.testing.assert_close(both(x), nothing)
    monkeypatch.setattr(Stream, "keep", lambda self, shape, p: torch.zeros(tuple(shape), dtype=torch.bool))
    assert torch.equal(dropped(x), x)
    assert torch.equal(dropped.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_whole_layer_of_a_loop_is_dropped(kind: type[nn.Module]) -> None:
    model, x = made(kind), tokens()
    tempered = attemper.apply(model, "layerdrop(0.5)")
    layers = len({row.block for row in tempered.summary()})
    outputs = [x]
    for attention, mlp in pairs(made(kind)):
        attended = [attention(x) + x for x in outputs]
        if kind is Parts:  # attention and MLP are layers of their own there
            attended += outputs
            outputs = [*attended, *(mlp(x) + x for x in attended)]
        else:
            outputs += [mlp(x) + x for x in attended]
    assert len(outputs) == 2**layers
    seen = set()
    for seed in range(40):
        torch.manual_seed(seed)
        given = model(x)
        seen |= {number for number, wanted in enumerate(outputs) if torch.allclose(given, wanted, atol=1e-5)}
    assert len(seen) > 2, "a layer is dropped as a whole, each by itself"
    rates = {row.site: row.rate for row in tempered.summary()}
    assert set(rates.values()) == {0.5}
    assert any("layers" in name or "attentions" in name for name in rates)


@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_sums_inside_of_checkpoints_are_refused_where_they_would_be_computed_again(
    recipe: str, reentrant: bool
) -> None:
    model = made(Checkpointed)
    model.reentrant = reentrant
    with pytest.raises(UnmetError, match="inside of an activation checkpoint"):
        temper_and_run(model, recipe)


def test_tokens_are_grayed_where_they_enter_the_loop() -> None:
    model, plain = made(Outside), made(Outside)
    attemper.apply(model, "graying(where=tokens, eps=0.5)")
    grayed = attemper.methods.TokenGraying(where="tokens", eps=0.5).map_tokens(tokens(), Tokens(None), None)
    torch.testing.assert_close(model(tokens()), plain(grayed))


def test_what_a_loop_makes_of_its_input_first_is_not_taken_for_tokens() -> None:
    class Embedding(Outside):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.relu(x))

    model = made(Embedding)
    with pytest.raises(UnmetError, match="adds nothing to them"):
        temper_and_run(model, "graying(where=tokens, eps=0.5)")
