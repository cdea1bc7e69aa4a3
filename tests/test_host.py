"""What the host does on the way of a GPU, up to the launch of kernels: nothing that follows it loses sight of tensors.

In loops whose lengths change with every batch nothing is kept for ever, and soon nothing is compiled any more.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import attemper
import host
from attemper.kernels.common import direct, plans
from attemper.tempering.subclassing import is_tempered, state_of
from test_repeated_sums import Net

RECIPE = "dropkey(0.2) + droppath(0.2) + ffdropout(0.1) + explicit(v=1e-3, ff=1e-3)"
FOLLOWED = (
    "droppath(0.2) + dropkey(0.2)",
    "layerdrop(0.2) + blur",
    "skipless(mlp) + hardmask(0.2)",
    "droppath(0.2) + explicit(v=1e-3)",
    "droppath(0.2) + explicit(q=1e-3, ff=1e-3)",
)


class Wide(Net):
    """The same blocks, with heads that kernels take."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn = Attention()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 48), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, 16))


def loop(lengths: Callable[[], int], recipe: str = RECIPE) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and a training step at the next length."""
    torch.manual_seed(0)
    model = Wide().train()
    tempered = attemper.apply(model, recipe)

    def step() -> None:
        x = torch.randn(2, lengths(), 8)
        tempered.loss(lambda: model(x), lambda out: out.square().mean()).backward()

    with host.zeros_for_empty():
        for _ in range(3):
            step()
    return model, step


def held() -> int:
    """The most that any memory of launches holds."""
    return max(len(known) for known in (direct._known, *direct._memories))


def held_by(model: nn.Module) -> int:
    """The most decisions that an attention holds."""
    actions = [action for m in model.modules() if is_tempered(m) for action in state_of(m).actions]
    return max(len(action.decisions.known) for action in actions if hasattr(action, "decisions"))


@pytest.mark.parametrize("recipe", FOLLOWED)
def test_residual_sums_are_followed_past_kernels_that_are_no_operators(recipe: str) -> None:
    with host.as_on_gpu() as launches:
        _, step = loop(lambda: 5, recipe)
        before = launches.count
        step()
        assert launches.count - before >= 2 * 2  # of two attentions, forward and backward


def test_ever_new_lengths_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MOST", 9)
    monkeypatch.setattr("attemper.tempering.repeated.MOST", 9)
    monkeypatch.setattr(plans, "_seen", {})
    lengths = iter(range(2, 60))
    with host.as_on_gpu():
        model, step = loop(lambda: next(lengths))
        for _ in range(40):
            step()
        assert held() <= 9
        assert held_by(model) <= 9
        assert all(len(shapes) <= plans.STATIC_SHAPES for shapes in plans._seen.values())


@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_lengths_that_change_soon_compile_nothing(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_seen", {})
    draw = random.Random(1)
    with host.as_on_gpu() as launches:
        _, step = loop(lambda: draw.randint(2, 300))
        for _ in range(steps // 2):
            step()
        before = launches.searches
        for _ in range(steps // 2):
            step()
        kernels = len({key[0] for key in direct._known})
        assert launches.searches - before <= kernels  # of a kind that was not met yet, such as a length that 16 divides
