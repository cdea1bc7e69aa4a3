"""Memory of an ordinary training loop stays flat, whatever the recipe."""

from __future__ import annotations

import gc
import pathlib

import pytest
import torch
from torch import nn

import attemper
from penalised import Block, criterion

RECIPES = [
    "dropkey(0.1)", "dropattention(0.1)", "hardmask(0.2, k=2)", "blur(0.5)", "dropkey(0.1) + consistency(1.0)",
    "dropkey(0.1) + rdrop(1.0)", "explicit(q=1e-3, k=1e-3, v=1e-3, av=1e-3, ff=1e-3)", "arora(v=1e-3)", "cb",
    "cb(cb_s)", "graying(dct, where=tokens)", "skipless(mlp)", "drophead(0.1)", "layerdrop(0.1)", "droppath(0.1)",
    "ffdropout(0.1)", "dropconnect(0.1)", "dropkey(0.1) + cb + explicit(v=1e-3, ff=1e-3) + rdrop(1.0)",
]  # fmt: skip
SHORT = {RECIPES[-1], "explicit(q=1e-3, k=1e-3, v=1e-3, av=1e-3, ff=1e-3)"}


class Wide(nn.Module):
    """A step of it keeps a megabyte for backward: a leak of one step in ten would show."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def resident():
    """Bytes of memory that this process holds."""
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


def grown(recipe, loop, steps):
    """How many bytes a loop takes more after `steps` steps than after a fifth of them."""
    torch.manual_seed(0)
    model = Wide().train()
    tempered = attemper.apply(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 16, 8)
    early = 0
    for step in range(steps):
        optimizer.zero_grad()
        if loop == "stray":
            model(x)
        else:
            by_hand = loop == "penalty"
            loss = criterion(model(x)) + tempered.penalty() if by_hand else tempered.loss(lambda: model(x), criterion)
            loss.backward()
            optimizer.step()
        if step == steps // 5:
            early = resident()
    return resident() - early


@pytest.mark.parametrize("recipe", [pytest.param(r, marks=[] if r in SHORT else pytest.mark.slow) for r in RECIPES])
def test_five_hundred_steps_take_no_more_than_a_hundred(recipe):
    steps = 100 if recipe in SHORT else 500
    assert grown(recipe, "loss", steps) < 20e6


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["loss", "penalty", "stray"])
@pytest.mark.parametrize("recipe", sorted(SHORT))
def test_five_hundred_steps_of_any_loop_are_flat(recipe, loop):
    if loop == "penalty" and "rdrop" in recipe:
        recipe = recipe.replace(" + rdrop(1.0)", "")
    assert grown(recipe, loop, 500) < 20e6
