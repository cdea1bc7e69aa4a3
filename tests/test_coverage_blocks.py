"""Blocks and skips: dropped, removed or changed as the formula says, however a block is written, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.errors import NoSiteError, UnmetError
from attemper.methods.kinds import Tokens
from attemper.ops.stream import Stream
from plain_blocks import WIDTH, Block, Mlp, model_of, tokens
from test_sums_outside import Outside


# ------------------------------------------------------------------------------- blocks that do more than add branches
class Widening(Block):
    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(super().forward(x))


class Pooled(Block):
    """A shortcut that pools and projects; half the tokens come out."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        short = self.shortcut(self.norm1(x))[:, ::2]
        x = short + self.attn(self.norm1(x))[:, ::2]
        return x + self.mlp(self.norm2(x))


class Convolved(Block):
    """Something else than a branch between the two sums."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.local(x + self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class ClassOnly(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :1] + self.attn(self.norm1(x))[:, :1]
        return x + self.mlp(self.norm2(x))


def shortcut(block: Block, x: Tensor) -> Tensor:
    """What a block gives without its branches."""
    if isinstance(block, Widening):
        return block.merge(x)
    if isinstance(block, Pooled):
        return block.shortcut(block.norm1(x))[:, ::2]
    return block.local(x) if isinstance(block, Convolved) else x[:, :1]


@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)"])
@pytest.mark.parametrize("way", [Widening, Pooled, Convolved, ClassOnly])
def test_without_its_branches_a_block_keeps_what_else_it_does(
    way: type[Block], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_of(way, depth=1), tokens()
    attemper.apply(model, recipe)
    whole = model_of(way, depth=1)(x)
    monkeypatch.setattr(Stream, "keep", lambda self, shape, p: torch.zeros(tuple(shape), dtype=torch.bool))
    for _ in range(2):
        torch.testing.assert_close(model(x), shortcut(model[0], x))
    kept = attemper.apply(model_of(way, depth=1), "layerdrop(0.5)").model
    monkeypatch.setattr(Stream, "keep", lambda self, shape, p: torch.ones(tuple(shape), dtype=torch.bool))
    for _ in range(2):
        torch.testing.assert_close(kept(x), whole)


class NotAdded(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm1(x)) + 0 * self.norm2(x) if self.mlp is None else self.mlp(x)


class Local(Block):
    """Attention, and something beside it in the same branch."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm1(x)) + self.local(x) + x
        return x + self.mlp(self.norm2(x))


class Gated(Block):
    """A gate that mixes stream and branch is no sum."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.lerp(x, self.attn(self.norm1(x)), 0.5)
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)", "skipless", "skipless(both)"])
@pytest.mark.parametrize("way", [NotAdded, Local, Gated])
def test_what_is_no_residual_sum_is_refused(way: type[Block], recipe: str) -> None:
    model = model_of(way)
    attemper.apply(model, recipe)
    with pytest.raises(UnmetError, match="'0'"):
        model(tokens())


def test_a_block_that_cannot_be_skipped_is_named_or_left_in_part() -> None:
    model = nn.Sequential(Block(), Gated()).train()
    attemper.apply(model, "layerdrop(0.5)")
    with pytest.raises(UnmetError, match=r"layerdrop cannot skip '1': this Gated"):
        model(tokens())
    attemper.Tempered.of(model).remove()
    attemper.apply(model, "layerdrop(0.5)", partial=True)
    assert model(tokens()).shape == tokens().shape
    alone = nn.Sequential(Gated()).train()
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
        self.gamma, self.position = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(1, 5, WIDTH))
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
    if isinstance(block, Parallel | Together):
        h = block.norm1(x)
        return block.attn(h) + block.mlp(h)
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


class ParallelInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        attention, mlp = self.attn(h), self.mlp(h)
        out = x.clone()
        out += attention
        return out.add_(mlp)


@pytest.mark.parametrize("recipe", ["skipless", "skipless(mlp)", "skipless(both)"])
@pytest.mark.parametrize("way", [Combined, Parallel, Together, ParallelInPlace])
def test_parallel_branches_share_one_skip_however_they_are_added(way: type[Block], recipe: str) -> None:
    model, expected = model_of(way), tokens()
    for block in model:
        h = block.norm1(expected)
        expected = block.attn(h) + block.mlp(h)
    attemper.apply(model, recipe)
    torch.testing.assert_close(model(tokens()), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(tokens()), expected)


def test_branches_that_share_a_sum_are_dropped_together() -> None:
    model, x = model_of(Combined, depth=1), tokens()
    attemper.apply(model, "droppath(0.5)")
    h = model[0].norm1(x)
    branch = model[0].attn(h) + model[0].mlp(h)
    for seed in range(6):
        torch.manual_seed(seed)
        for given, own, added in zip(model(x), x, branch, strict=True):
            assert torch.allclose(given, own) or torch.allclose(given, own + 2 * added, atol=1e-5)


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
@pytest.mark.parametrize("kind", [Block, Pooled, Outside])
def test_compiled_sums_are_those_of_eager_code(kind: type[nn.Module], recipe: str) -> None:
    torch._dynamo.reset()  # its limit of compiled variants is for all models of one class
    model = model_of(kind, 1)
    attemper.apply(model, recipe)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        torch.manual_seed(seed)
        given = compiled(tokens())
        torch.manual_seed(seed)
        torch.testing.assert_close(given, model(tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)"])
def test_compiled_blocks_are_checked_while_they_are_traced(recipe: str) -> None:
    model = model_of(Gated)
    attemper.apply(model, recipe)
    with pytest.raises(Exception, match="Gated"):
        torch.compile(model, backend="aot_eager")(tokens())
