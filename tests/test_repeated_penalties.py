"""Penalties that a repeated attention call takes along: the same losses and gradients, and never left out."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.errors import UnmetError
from attemper.ops import sdpa
from attemper.ops.call import Call
from attemper.tempering.attention import AttentionAction
from attemper.tempering.repeated import RepeatedAttention
from test_repeated_calls import Net

Found = tuple[float, list[Tensor]]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """sdpa takes ‖V − b‖² along, as the fused kernels do on a GPU. The list: calls that did, by who asked them to."""
    found: list[str] = []

    def attend(call: Call, bias: Tensor | None, factors: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        assert set(factors) == {"v"}
        assert call.packed is not None
        values = call.packed[..., 32:] if bias is None else call.packed[..., 32:] - bias[32:]
        found.append("taken")
        return sdpa.attention(call), {"v": factors["v"] * values.square().sum()}

    monkeypatch.setattr(
        sdpa, "squares", lambda call, wanted: tuple(wanted & {"v"}) if call.packed is not None else (), raising=False
    )
    monkeypatch.setattr(sdpa, "attention_and_squares", attend, raising=False)
    original = RepeatedAttention.attend

    def repeated(self: RepeatedAttention, *args: object, **kwargs: object) -> Tensor:
        out = original(self, *args, **kwargs)  # type: ignore[arg-type]
        if self.full is None:
            found.append("repeated")
        return out

    monkeypatch.setattr(RepeatedAttention, "attend", repeated)
    return found


def made(recipe: str) -> tuple[Net, attemper.Tempered]:
    torch.manual_seed(0)
    model = Net().train()
    return model, attemper.apply(model, recipe, targets=["blocks.*.1"])


def step(model: nn.Module, handle: attemper.Tempered, x: Tensor) -> Found:
    """The loss with its penalties, and all gradients."""
    loss = handle.loss(lambda: model(x), lambda out: out.square().mean())
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def assert_same(ours: Found, plain: Found) -> None:
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    for a, b in zip(ours[1], plain[1], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("recipe", ["explicit(v=0.3)", "explicit(v=0.3) + arora(v=0.1)"])
def test_repeated_calls_enter_what_first_ones_do(
    recipe: str, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, first), (other, second) = made(recipe), made(recipe)
    for seed in range(4):
        x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(seed))
        ours = step(one, first, x)
        with monkeypatch.context() as patch:
            patch.setattr(AttentionAction, "may_repeat", lambda self: False)
            patch.setattr("attemper.tempering.interception.terms_of", lambda *_: None)
            assert_same(ours, step(other, second, x))
    assert taken.count("repeated") == (4 if recipe == "explicit(v=0.3)" else 0)  # Arora's term is no such square


def test_a_projection_that_runs_in_another_way_from_now_on_is_penalised_all_the_same(taken: list[str]) -> None:
    model, handle = made("explicit(v=0.3)")
    plain, other = made("explicit(v=0.3)")
    x = torch.randn(3, 7, 16)
    expected = step(plain, other, x)
    for _ in range(3):
        assert_same(step(model, handle, x), expected)
    assert taken.count("repeated") == 2
    for by_name in (True, False):
        for block in model.blocks:
            block[1].qkv.forward = functools.partial(linear_of, block[1].qkv, by_name)
        if by_name:
            assert_same(step(model, handle, x), expected)
        else:  # nobody sees it: never without the penalty, and never without a word
            with pytest.raises(UnmetError, match="was not seen"):
                step(model, handle, x)


def linear_of(layer: nn.Linear, by_name: bool, given: Tensor) -> Tensor:
    """A linear layer, by its function with named arguments or by a product."""
    if by_name:
        return nn.functional.linear(bias=layer.bias, weight=layer.weight, input=given)
    return given @ layer.weight.T.clone() + layer.bias


def test_penalties_that_are_off_for_a_while_are_not_mixed_up(taken: list[str]) -> None:
    model, handle = made("explicit(v=0.3)")
    x = torch.randn(3, 7, 16)
    for _ in range(3):
        penalised = step(model, handle, x)[0]
    with handle.disabled():
        disabled = step(model, handle, x)[0]
    assert disabled < penalised
    assert step(model, handle, x)[0] == pytest.approx(penalised, rel=1e-6)
