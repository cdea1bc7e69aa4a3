"""Models for boxes: what they give, which methods act in them, and that padding has no influence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.errors import ParameterError
from attemper.lab.models.registry import build_model
from attemper.lab.models.starting import start_from
from attemper.lab.tasks.boxes.drawing import where_queries_look
from attemper.lab.tasks.boxes.shape import BoxShape

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = BoxShape(size=48, classes=3, boxes=4)
BACKBONE = "detr.model.backbone.model."
MODELS = ("anchor-detr(width=32, depth=2, patch=8)", "detr(width=32, depth=2, heads=4, mlp=32, queries=6)")
RECIPES = (
    "none", "dropkey(0.3)", "dropkey(0.3, share=queries)", "dropkey(0.3, structure=cross)", "dropattention(0.3)",
    "hardmask(k=2)", "blur(w=3)", "cb", "cb(variant=cb_s)", "graying(where=tokens)", "drophead(0.4)", "droppath(0.3)",
    "ffdropout(0.3)", "dropconnect(0.3)", "skipless(skip=attention)", "layerdrop(0.3)", "explicit(v=0.1, ff=0.1)",
    "consistency + dropkey(0.3)",
)  # fmt: skip
QUICK = ("none", "dropkey(0.3)", "cb", "explicit(v=0.1, ff=0.1)")
"""With DETR; the others are slow there, and are tried with the small model."""


@pytest.mark.parametrize("model", MODELS)
def test_a_model_gives_scores_and_boxes_for_every_query_and_layer(model: str) -> None:
    built = build_model(model, SHAPE).train()
    inputs, _ = SHAPE.example(2)
    out = built(inputs)
    queries = out["logits"].shape[1]
    assert out["logits"].shape == (2, queries, 4)
    assert out["layers"].shape[2:] == (queries, 8)
    assert bool(((out["boxes"] >= 0) & (out["boxes"] <= 1)).all())
    torch.testing.assert_close(out["layers"][:, -1], torch.cat([out["logits"], out["boxes"]], -1))
    assert set(built.eval()(inputs)) == {"logits", "boxes"}
    assert all(p.requires_grad for p in built.parameters())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("anchor-detr(patch=7)", "patch is 7; it must be 4, 8, 16, 32 or 64"),
        ("anchor-detr(patch=32)", "a canvas of 48 × 48 cannot be cut"),
        ("anchor-detr(width=36, heads=4)", "it must be a multiple of 8"),
        ("detr(width=30)", "must be a multiple of the heads"),
        ("detr(backbone=resnet19)", "timm has no such model. Did you mean 'resnet"),
        ("detr(dropout=2)", "from 0 to below 1"),
        ("detr(backbone=regnety_002, frozen=true)", "activations in its batch norms"),
        ("vit-cifar", "These models do: anchor-detr, detr"),
    ],
)
def test_a_model_that_cannot_be_is_refused(model: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_model(model, SHAPE)


def test_detr_takes_a_trained_backbone_and_freezes_it_as_published() -> None:
    import timm

    trained = timm.create_model("resnet10t")
    for norm in trained.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(norm.running_mean)  # type: ignore[arg-type]
    small = "detr(backbone=resnet10t, width=32, depth=1, heads=4, mlp=32, queries=6"
    for text in (f"{small})", f"{small}, frozen=true)"):
        model = build_model(text, SHAPE)
        report = start_from(model, trained.state_dict(), source="a file", classes=3)
        given = dict(trained.named_parameters())
        ours = {
            name.removeprefix(BACKBONE): value for name, value in model.named_parameters() if name.startswith(BACKBONE)
        }
        assert len(report.loaded) > len(ours) > 10
        assert all(torch.equal(value, given[name]) for name, value in ours.items())
        assert model.eval()(SHAPE.example(1)[0])["logits"].shape == (1, 6, 4)
    assert not all(p.requires_grad for p in model.parameters())


def test_methods_on_the_image_grid_act_where_keys_lie_on_it() -> None:
    grid, queries = (build_model(model, SHAPE).train() for model in MODELS)
    inputs, _ = SHAPE.example(2)
    attemper.apply(grid, "dropkey(0.3, structure=block, w=1) + blur(grid=2d)")
    assert torch.isfinite(grid(inputs)["layers"]).all()
    with pytest.raises(ParameterError, match=r"none is known for 'detr\.model\.decoder\.layers\.0\.self_attn'"):
        attemper.apply(queries, "dropkey(0.3, structure=block, w=1)")
    attemper.apply(queries, "dropkey(0.3, structure=block, w=1)", targets=["*.encoder.*", "*.encoder_attn"])
    assert torch.isfinite(queries(inputs)["layers"]).all()


@pytest.mark.parametrize("model", MODELS)
def test_the_attention_that_is_drawn_is_the_one_that_looks_at_the_image(model: str) -> None:
    built = build_model(model, SHAPE).eval()
    inputs, _ = SHAPE.example(2)
    queries = torch.zeros(2, dtype=torch.int64)
    heat = where_queries_look(built, inputs, queries)
    assert heat is not None
    torch.testing.assert_close(heat.sum((1, 2)), torch.ones(2))
    assert float(heat[1, :, math.ceil(heat.shape[-1] * 3 / 4) :].sum()) == 0, "nobody looks at padding"
    assert where_queries_look(torch.nn.Identity(), inputs, queries) is None


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        pytest.param(model, recipe, marks=[pytest.mark.slow] * (model == MODELS[1] and recipe not in QUICK))
        for model in MODELS
        for recipe in RECIPES
        if not ("structure" in recipe and model == MODELS[1])  # the queries of DETR lie on no grid
    ],
)
def test_padding_has_no_influence(model: str, recipe: str) -> None:
    """Changing what is behind the mask changes nothing, in training too; changing what is before it does."""
    torch.manual_seed(0)
    built = build_model(model, SHAPE).train()
    tempered = attemper.apply(built, recipe)
    inputs, _ = SHAPE.example(2)

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        built.load_state_dict(state)  # batch norms count what they have seen
        packed: Tensor = built(x)["layers"]
        return packed.detach()

    state = {name: value.clone() for name, value in built.state_dict().items()}
    tempered.progress(0.0, 1)
    before = run(inputs)
    hidden, shown = inputs.clone(), inputs.clone()
    hidden[1, :3, :, 36:] = torch.randn(3, 48, 12)
    shown[1, :3, :, :12] = torch.randn(3, 48, 12)
    assert torch.equal(run(hidden), before)
    assert not torch.equal(run(shown)[1], before[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_places_that_are_padding_have_no_influence_behind_the_convolutions(recipe: str) -> None:
    """The attention itself leaves them out: their features may be anything."""
    torch.manual_seed(0)
    built: Any = build_model(MODELS[0], SHAPE).train()
    attemper.apply(built, recipe)
    tokens = torch.randn(2, 36, 32)
    hidden = torch.zeros(2, 36, dtype=torch.bool)
    hidden[1, 20:] = True

    def run(x: Tensor) -> Tensor:
        features.clear()
        features.append(x)
        torch.manual_seed(1)
        packed: Tensor = built(inputs)["layers"]
        return packed.detach()

    features: list[Tensor] = []
    inputs = torch.zeros(2, 4, 48, 48)
    inputs[:, 3] = (~hidden).float().view(2, 6, 6).repeat_interleave(8, 1).repeat_interleave(8, 2)
    handle = built.input_norm.register_forward_pre_hook(lambda module, args: (features[0],))
    before = run(tokens)
    changed = tokens.clone()
    changed[hidden] = torch.randn(int(hidden.sum()), 32)
    after = run(changed)
    handle.remove()
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    changed[1, 0] += 1.0
    assert not torch.allclose(before, run(changed), atol=1e-5)


def test_a_place_that_is_padding_answers_nothing() -> None:
    built = build_model(MODELS[0], SHAPE).eval()
    inputs, _ = SHAPE.example(2)
    found = {name: value.detach() for name, value in built(inputs).items()}
    sure = found["logits"].softmax(-1)[1, :, :-1].max(-1).values.view(6, 6)
    assert float(sure[:, 5].max()) < 1e-9
    assert float(sure[:, 0].min()) > 1e-9
