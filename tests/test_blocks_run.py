"""How blocks are run: parts that stay out of a pass, run elsewhere, or out of sight; what blocks give."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.errors import UnmetError
from attemper.ops.stream import Stream
from plain_blocks import Attention, Block, model_of, tokens


class Crossing(Block):
    """Attention over what an encoder gives, where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_attn = Attention()

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x))
        if context is not None:
            x = x + self.cross_attn(context)
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)", "skipless(both)"])
def test_an_attention_that_does_not_run_is_missed_by_nobody(recipe: str) -> None:
    model, plain = model_of(Crossing), model_of(Crossing)
    tempered = attemper.apply(model, recipe)
    if recipe == "skipless(both)":
        torch.testing.assert_close(
            model[0](tokens()), plain[0].mlp(plain[0].norm2(plain[0].attn(plain[0].norm1(tokens()))))
        )
    else:
        model(tokens())
    assert len({row.site for row in tempered.summary()}) == 2


class CrossedByTheModel(nn.Module):
    """The same, run and added by the model, outside of the block that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Crossing() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x + layer.cross_attn(x)
        return x


@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)", "skipless(both)"])
def test_an_attention_that_runs_outside_of_its_block_is_not_passed_over(recipe: str) -> None:
    model = CrossedByTheModel().train()
    attemper.apply(model, recipe)
    with pytest.raises(UnmetError, match=r"does not run 'layers\.0\.cross_attn' .* which the model runs outside"):
        model(tokens())


class OutOfSight(torch.autograd.Function):
    """What is computed in here no mode can see."""

    @staticmethod
    def forward(ctx, x: Tensor, attention: nn.Module) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad, None


class Pair(NamedTuple):
    tokens: Tensor
    more: int


class InATuple(Block):
    """A block whose output has names."""

    def forward(self, x: Tensor) -> Pair:
        return Pair(super().forward(x[0] if isinstance(x, Pair) else x), 1)


def test_a_block_that_gives_a_named_tuple_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(InATuple)
    attemper.apply(model, "layerdrop(0.5)")
    monkeypatch.setattr(Stream, "keep", lambda self, shape, p: torch.zeros(tuple(shape), dtype=torch.bool))
    for _ in range(2):
        out = model(tokens())
        assert isinstance(out, Pair)
        assert torch.equal(out.tokens, tokens())


class Reversed(torch.autograd.Function):
    """Reformer's way: the block runs without a graph, and backward computes the sums in its own way."""

    @staticmethod
    def forward(ctx, x: Tensor, block: nn.Module) -> Tensor:
        return block(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Reversed.apply(x, layer)
        return x


@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)", "skipless"])
def test_blocks_inside_of_an_autograd_function_are_refused_and_checkpoints_are_not(recipe: str) -> None:
    model = Reversible().train()
    attemper.apply(model, recipe)
    with pytest.raises(UnmetError, match="autograd function of the model's own"):
        model(tokens().requires_grad_())
    again = model_of(Block)
    attemper.apply(again, recipe)
    x = tokens().requires_grad_()
    checkpoint(again[0], x, use_reentrant=True).sum().backward()
    assert x.grad is not None


class Hidden(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.attn.forward = lambda x: OutOfSight.apply(x, self.attn)


@pytest.mark.parametrize("recipe", ["layerdrop(0.5)", "droppath(0.5)", "skipless(both)"])
def test_an_attention_that_runs_out_of_sight_is_refused(recipe: str) -> None:
    model = model_of(Hidden)
    attemper.apply(model, recipe)
    with pytest.raises(UnmetError, match=r"does not add its attention \('0\.attn'\)"):
        model(tokens())
