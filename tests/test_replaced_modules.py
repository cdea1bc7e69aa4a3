"""Modules that are put in the place of tempered ones take nothing away from a recipe without a word."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import UnmetError
from plain_blocks import Attention, Block, Mlp, model_of, tokens

PARTS = {
    "attn": ("dropkey(0.5)", "explicit(v=1)", "drophead(0.5)"),
    "mlp": ("ffdropout(0.5)", "cb", "explicit(ff=1)", "dropkey(0.2) + ffdropout(0.5)"),
    "block": ("droppath(0.5)", "layerdrop(0.5)", "skipless", "dropkey(0.5)", "ffdropout(0.5)"),
}
CASES = [(part, recipe) for part, recipes in PARTS.items() for recipe in recipes]


def replace(model: nn.Sequential, part: str) -> None:
    if part == "block":
        model[1] = Block()
    else:
        setattr(model[1], part, Attention() if part == "attn" else Mlp())


def step(model: nn.Module, tempered: attemper.Tempered) -> None:
    tempered.loss(lambda: model(tokens()), lambda out: out.square().mean()).backward()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(("part", "recipe"), CASES)
def test_a_module_that_was_replaced_is_an_error_in_the_next_pass(part, recipe, before):
    model = model_of(Block)
    tempered = attemper.apply(model, recipe)
    for _ in range(before):
        step(model, tempered)
    replace(model, part)
    with pytest.raises(UnmetError, match="replaced since"):
        step(model, tempered)


@pytest.mark.parametrize("recipe", ["dropkey(0.5)", "ffdropout(0.5)", "droppath(0.5) + explicit(v=1)"])
def test_what_is_no_replacement_is_none(recipe):
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = model_of(Block), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(x))

    model = Head()
    tempered = attemper.apply(model, recipe)
    step(model, tempered)
    model.head = nn.Linear(16, 3)  # nothing acts on it
    step(model, tempered)
    for other in (copy.deepcopy(model), model.double().float()):
        step(other, attemper.Tempered.of(other))
    model.blocks[0].__class__ = type(model.blocks[0])
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
    step(model, tempered)


def test_copies_and_pickles_watch_their_own_modules():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    tempered = attemper.apply(model, "dropkey(0.5) + ffdropout(0.2)")
    step(model, tempered)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        handle = attemper.Tempered.of(other)
        step(other, handle)
        other.layers[0] = copy.deepcopy(layer)
        with pytest.raises(UnmetError, match="replaced since"):
            step(other, handle)
    step(model, tempered)
