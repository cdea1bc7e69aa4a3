"""Blocks and skips: dropped, removed or changed as the formula says, however a block is written, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.errors import NoSiteError, UnmetError
from attemper.methods.kinds import Tokens
from attemper.ops.stream import Stream
from plain_blocks import TOKENS, WIDTH, Attention, Block, Mlp, model_of, tokens


# ------------------------------------------------------------------------------------------------------------- blocks
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


@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)", "skipless", "graying(where=tokens, eps=0.5)"])
def test_a_list_cannot_be_skipped(recipe: str) -> None:
    with pytest.raises(NoSiteError, match=r"cannot act on block 'layers\.0', a ModuleList"):
        attemper.apply(Outside(), recipe)


class Parts(nn.Module):
    """Attention and MLPs listed apart: each is a block of its own, and neither adds anything."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.mlps = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = attention(x) + x
            x = mlp(x) + x
        return x


@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)", "skipless"])
def test_a_sum_outside_of_the_block_is_not_taken_for_granted(recipe: str) -> None:
    model = Parts().train()
    attemper.apply(model, recipe)
    with pytest.raises(UnmetError, match=r"'attentions\.0'"):
        model(tokens())


class FeedForwardOutside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm1(x))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForwardOutside() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x + layer.mlp(x)
        return x


def test_half_a_block_is_not_dropped_for_a_whole_one() -> None:
    model = Loop().train()
    attemper.apply(model, "layerdrop(0.5)")
    with pytest.raises(UnmetError, match="does not add its feed-forward network"):
        model(tokens())


class Widening(Block):
    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(super().forward(x))


def test_a_block_that_changes_the_shape_is_named_or_left_in_part() -> None:
    model = nn.Sequential(Block(), Widening()).train()
    attemper.apply(model, "layerdrop(0.5)")
    with pytest.raises(UnmetError, match=r"layerdrop cannot skip '1': this Widening gives another shape"):
        model(tokens())
    attemper.Tempered.of(model).remove()
    attemper.apply(model, "layerdrop(0.5)", partial=True)
    assert model(tokens()).shape == (2, TOKENS, 2 * WIDTH)
    alone = nn.Sequential(Widening()).train()
    attemper.apply(alone, "layerdrop(0.5)", partial=True)
    with pytest.raises(UnmetError, match="layerdrop had no effect"):
        alone(tokens())


# ------------------------------------------------------------------------------------------- blocks in other ways
class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        return x + self.attn(h) + self.mlp(h)


class Combined(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        attention, mlp = self.attn(h), self.mlp(h)
        return attention + mlp + x


class Together(Block):
    """Both branches are computed before either is added."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        attention, mlp = self.attn(h), self.mlp(h)
        x = mlp + x
        return x + attention


class MlpFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm2(x))
        return x + self.attn(self.norm1(x))


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.position = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(1, TOKENS, WIDTH))
        self.cpe = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        x = x + self.cpe(x)
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.gamma * self.mlp(self.norm2(x))


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(self.mlp(x) + x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.add_(self.attn(self.norm1(x)))
        x += self.mlp(self.norm2(x))
        return x


class Overwriting(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.attn(self.norm1(x))
        x += self.mlp(self.norm2(x))
        return x


def by_hand(block: Block, x: Tensor) -> Tensor:
    """The block without the skip round attention."""
    if isinstance(block, Parallel):
        h = block.norm1(x)
        return block.attn(h) + block.mlp(h)
    if isinstance(block, Together):
        return block.attn(block.norm1(x))
    if isinstance(block, MlpFirst):
        return block.attn(block.norm1(x + block.mlp(block.norm2(x))))
    if isinstance(block, Scaled):
        x = x + block.position
        x = x + block.cpe(x)
        x = block.gamma * block.attn(block.norm1(x))
        return x + block.gamma * block.mlp(block.norm2(x))
    if isinstance(block, PostNorm):
        x = block.norm1(block.attn(x))
        return block.norm2(x + block.mlp(x))
    x = block.attn(block.norm1(x))
    return x + block.mlp(block.norm2(x))


WAYS = [Block, Parallel, Together, MlpFirst, Scaled, PostNorm, InPlace, Overwriting]


@pytest.mark.parametrize("way", WAYS)
def test_the_skip_round_attention_is_found_by_what_it_goes_round(way: type[Block]) -> None:
    model = model_of(way)
    expected = tokens()
    for block in model:
        expected = by_hand(block, expected)
    attemper.apply(model, "skipless")
    torch.testing.assert_close(model(tokens()), expected)
    torch.testing.assert_close(model.eval()(tokens()), expected)


@pytest.mark.parametrize("way", [*WAYS, Combined])
def test_a_dropped_block_gives_what_it_got(way: type[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of(way), tokens()
    attemper.apply(model, "layerdrop(0.5)")
    monkeypatch.setattr(Stream, "keep", lambda self, shape, p: torch.zeros(tuple(shape), dtype=torch.bool))
    for _ in range(2):  # the second time, nothing is watched
        assert torch.equal(model(x.clone()), x)


@pytest.mark.parametrize("recipe", ["skipless", "skipless(mlp)", "droppath(0.5)"])
def test_one_sum_of_both_branches_is_refused(recipe: str) -> None:
    model = model_of(Combined)
    attemper.apply(model, recipe)
    with pytest.raises(UnmetError, match="adds attention and the MLP in one sum"):
        model(tokens())


@pytest.mark.parametrize("recipe", ["{} + layerdrop(0.5)", "layerdrop(0.5) + {}"])
def test_a_dropped_block_keeps_what_was_done_before_it(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both, bare = model_of(Block), model_of(Block)
    attemper.apply(both, recipe.format("graying(where=tokens, eps=0.5)"))
    attemper.apply(bare, recipe.format("skipless(both)"))
    monkeypatch.setattr(Stream, "keep", lambda self, shape, p: torch.zeros(tuple(shape), dtype=torch.bool))
    expected = attemper.methods.TokenGraying(where="tokens", eps=0.5).map_tokens(tokens(), Tokens(None), None)
    torch.testing.assert_close(both(tokens()), expected)
    assert torch.equal(bare(tokens()), tokens())


def test_an_addition_with_a_factor_is_not_taken_for_a_plain_one() -> None:
    class Weighted(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.add(x, self.attn(self.norm1(x)), alpha=0.5)
            return x + self.mlp(self.norm2(x))

    for recipe in ("skipless", "droppath(0.5)", "layerdrop(0.5)"):
        model = model_of(Weighted)
        attemper.apply(model, recipe)
        with pytest.raises(UnmetError, match="'0'"):
            model(tokens())


def test_a_skip_that_no_block_has_is_refused_at_once() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp_tokens, self.mlp_channels = Mlp(), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.mlp_tokens(x)
            return x + self.mlp_channels(x)

    with pytest.raises(NoSiteError, match="skipless"):
        attemper.apply(model_of(Mixer), "skipless")
    model = model_of(Mixer)
    expected = tokens()
    for block in model:
        expected = block.mlp_channels(block.mlp_tokens(expected))
    attemper.apply(model, "skipless(mlp)")
    torch.testing.assert_close(model(tokens()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)"])
def test_compiled_blocks_are_checked_while_they_are_traced(recipe: str) -> None:
    model = model_of(Block)
    attemper.apply(model, recipe)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(3)
    given = compiled(tokens())
    torch.manual_seed(3)
    torch.testing.assert_close(given, model(tokens()))
    outside = Parts().train()
    attemper.apply(outside, recipe)
    with pytest.raises(Exception, match="attentions"):
        torch.compile(outside, backend="aot_eager")(tokens())
