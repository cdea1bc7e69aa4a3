"""A tempered model runs on the meta device, where tensors have shapes and no values."""

from __future__ import annotations

import pytest
import torch

import attemper
from attemper.errors import NoSiteError
from families import FAMILIES, build

FAMILY = {family.name: family for family in FAMILIES}
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("timm-swin", "timm-pvtv2", "hf-bert", "hf-vit", "nn-encoder")
]
RECIPES = [
    "dropkey(0.3)", "dropattention(0.3)", "hardmask(0.5, k=2)", "blur", "drophead(0.3)", "dropconnect(0.3)",
    "ffdropout(0.3)", "droppath(0.3)", "layerdrop(0.3)", "skipless", "cb", "cb(cb_s, branch=both)", "arora(v=1)",
    "explicit(q=1, k=1, v=1, av=1, ff=1)", "explicit(conv=1)", "dropkey(0.3) + dropattention(0.3) + blur",
    "graying(where=tokens, eps=0.5)", "graying(svd, eps=0.5)", "dropkey(0.3, share=queries)",
]  # fmt: skip


def on_meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def shapes(model, inputs):
    # Transformers itself reads the values of masks.
    named = {name: on_meta(value) for name, value in inputs.items() if name != "args" and "mask" not in name}
    out = model(*map(on_meta, inputs.get("args", ())), **named)
    parts = [out] if isinstance(out, torch.Tensor) else out.values() if isinstance(out, dict) else out
    return [part.shape for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("name", ["timm-vit", *SLOW])
def test_every_recipe_gives_the_shapes_of_the_plain_model(name):
    family = FAMILY[name]
    with torch.device("meta"):
        plain = build(family)
    tried = 0
    for recipe in RECIPES:
        model = build(family)
        try:
            tempered = attemper.apply(model, recipe, targets=family.targets)
        except NoSiteError:
            continue
        tried += 1
        model.to("meta")
        for training in (True, False):
            expected = shapes(plain.train(training), family.inputs())
            assert shapes(model.train(training), family.inputs()) == expected, (recipe, training)
        if recipe.startswith("explicit"):
            shapes(model.train(), family.inputs())
            assert tempered.penalty().is_meta
    assert tried >= len(RECIPES) - 4


def test_a_model_that_was_built_there():
    family = FAMILY["timm-vit"]
    with torch.device("meta"):
        model = build(family)
    attemper.apply(model.train(), "dropkey(0.3) + cb(cb_s) + droppath(0.2) + explicit(v=1)")
    shapes(model, family.inputs())
    assert all(parameter.is_meta for parameter in model.parameters())
