"""The encoder of the papers for sequences: its sizes, its class token, and every method on it or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import AttemperError, NoSiteError, ParameterError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import InputShape, SequenceShape

SHAPE = SequenceShape(tokens=6, features=5, classes=3)
SMALL = "encoder(width=16, heads=2)"
ALWAYS = {"cb", "skipless", "graying"}
"""Parts of the architecture, which act in eval mode as well."""

RECIPES = {
    "consistency": "dropkey(0.3) + consistency",
    "rdrop": "dropkey(0.3) + rdrop",
    "explicit": "explicit(q=1e-3, k=1e-3, v=1e-3, ff=1e-3)",
    "arora": "arora(q=1e-3, k=1e-3, v=1e-3, ff=1e-3)",
    "graying": "graying(where=tokens)",
    "drophead": "drophead(0.5)",
    "layerdrop": "layerdrop(0.9)",
}
"""What a method needs beside its name; the others go without."""


def run_in_eval(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(x)


@pytest.mark.parametrize("method", [method.name for method in attemper.list_methods()])
def test_every_method_acts_on_the_encoder_in_training_and_leaves_eval_alone(method: str) -> None:
    model, x = build_model(SMALL, SHAPE), torch.randn(4, 6, 5)
    before = run_in_eval(model, x)
    plain = model.train()(x).detach()
    tempered = attemper.apply(model, RECIPES.get(method, method))
    outs: list[torch.Tensor] = []

    def criterion(out: torch.Tensor) -> torch.Tensor:
        outs.append(out.detach())
        return out.square().mean()

    loss = tempered.loss(lambda: model.train()(x), criterion)
    loss.backward()
    assert method in str(tempered)
    assert not torch.equal(outs[0], plain) or loss.item() != plain.square().mean().item()
    assert torch.equal(run_in_eval(model, x), before) == (method not in ALWAYS)
    tempered.remove()
    assert torch.equal(run_in_eval(model, x), before)


def test_graying_of_patches_is_refused_with_a_reason_since_there_are_none() -> None:
    with pytest.raises(NoSiteError, match="patch embedding"):
        attemper.apply(build_model(SMALL, SHAPE), "graying")


@pytest.mark.parametrize("token", ["first", "last"])
def test_the_class_token_stands_where_it_was_asked_for(token: str) -> None:
    model, x = build_model(f"encoder(width=16, heads=2, token={token})", SHAPE), torch.randn(4, 6, 5)
    seen: list[torch.Tensor] = []
    model.blocks.register_forward_pre_hook(lambda _, args: seen.append(args[0] - model.positions))
    with torch.no_grad():
        model.token.fill_(7.0)
    model.train()(x)
    where = 0 if token == "first" else 6
    assert seen[0].shape == (4, 7, 16)
    assert torch.allclose(seen[0][:, where], torch.tensor(7.0), atol=1e-5)


@pytest.mark.parametrize("text", ["encoder", "encoder(norm_first=false)", "encoder(activation=relu, mlp=64)"])
def test_eval_mode_gives_what_training_mode_gives_since_there_is_no_dropout(text: str) -> None:
    model, x = build_model(text, SHAPE), torch.randn(4, 6, 5)
    assert torch.allclose(run_in_eval(model, x), model.train()(x), atol=1e-5)


def test_blocks_start_from_different_weights() -> None:
    first, second = build_model(SMALL, SHAPE).blocks.layers
    assert not torch.equal(first.linear1.weight, second.linear1.weight)


def test_the_thumos_model_has_the_sizes_of_the_paper() -> None:
    model = build_model("encoder-thumos", SequenceShape(tokens=64, features=3072, classes=22))
    layers = model.blocks.layers
    assert len(layers) == 2
    assert (model.embed.in_features, model.embed.out_features) == (3072, 1024)
    assert (layers[0].self_attn.num_heads, layers[0].linear1.out_features) == (8, 1024)
    assert model.positions.shape == (1, 65, 1024)
    assert model.where == -1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("encoder(width=50)", "width is 50 and heads is 8"),
        ("encoder(token=middle)", "token is 'middle'; it must be 'first' or 'last'"),
        ("encoder(activation=tanh)", "activation is 'tanh'"),
        ("encoder(dropout=0.1)", "no option 'dropout'"),
        ("vit-cifar", "does not take inputs of 6 tokens × 5 features.*encoder"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_model(text, SHAPE)


def test_images_are_refused_by_the_encoder() -> None:
    with pytest.raises(AttemperError, match="encoder' does not take inputs of 3 × 32 × 32"):
        build_model("encoder", InputShape(channels=3, height=32, width=32, classes=10))
