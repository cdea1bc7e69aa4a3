"""The trial run at `apply`: what the first training pass would refuse is refused there, and nothing else is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import AttemperError, ConflictError, UnmetError
from attemper.tempering import applying
from attemper.tempering.subclassing import is_tempered
from attemper.tempering.trial import made_up_inputs, passed, without_weights
from families import FAMILIES, build, call

RECIPES = (
    "dropkey(0.3)", "hardmask(0.3, k=2)", "blur(1.0)", "explicit(q=1, v=1, ff=1)", "cb", "graying(dct, where=tokens)",
    "skipless(both)", "droppath(0.2)", "layerdrop(0.2)", "ffdropout(0.2)", "dropconnect(0.2)", "drophead(0.2)",
)  # fmt: skip
UNKNOWN = {"hf-detr"}
"""Families for which no input is made up: they need values, or sizes that they do not tell."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_input_is_made_up_for_nearly_every_family(family):
    model = build(family).train()
    attemper.apply(model, "dropkey(0.1)")
    twin = without_weights(model)
    assert all(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    ran = False
    for args, kwargs in made_up_inputs(twin):
        try:
            twin(*args, **kwargs)
        except Exception:
            continue
        ran = True
        break
    assert ran == (family.name not in UNKNOWN)


def outcome(family, recipe, monkeypatch, trial):
    """What apply and the first training pass say: the kind of error, or None."""
    with monkeypatch.context() as patch:
        if not trial:
            patch.setattr(applying, "try_out", lambda model, impl: None)
        model = build(family).train()
        try:
            attemper.apply(model, recipe)
        except AttemperError as error:
            assert not any(is_tempered(module) for module in model.modules()), "a refusal leaves the model as it was"
            return type(error)
        try:
            call(model, family.inputs())
        except AttemperError as error:
            return type(error)
    return None


def pairs():
    """Every family with every recipe; `make test` takes one recipe each, and all of them on one family."""
    for row, family in enumerate(FAMILIES):
        for column, recipe in enumerate(RECIPES):
            quick = column == row % len(RECIPES) or family.name == "timm-vit"
            yield pytest.param(family, recipe, marks=[] if quick else pytest.mark.slow, id=f"{family.name}-{recipe}")


@pytest.mark.parametrize(("model", "text"), pairs())
def test_a_trial_refuses_what_the_first_pass_refuses_and_nothing_else(model, text, monkeypatch):
    family, recipe = model, text
    assert outcome(family, recipe, monkeypatch, True) is outcome(family, recipe, monkeypatch, False)


class Outside(nn.Module):
    """Mixes its branches with the stream instead of adding them, and prints."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)])
        self.calls = []

    def forward(self, x):
        self.calls.append(x.shape)
        print("forward")  # noqa: T201
        for layer in self.layers:
            x = torch.lerp(x, layer(x, x, x)[0], 0.5)
        return x


def test_what_the_first_pass_would_refuse_is_refused_at_apply_and_leaves_no_trace(capsys):
    model = Outside().train()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(4)
    state = torch.get_rng_state()
    with pytest.raises(UnmetError, match=r"droppath cannot act in 'layers\.0'") as error:
        attemper.apply(model, "droppath(0.1)")
    assert "trial run" in error.value.__notes__[0]
    assert not any(is_tempered(module) for module in model.modules())
    assert model.calls == []
    assert capsys.readouterr().out == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_causal_model_refuses_what_mixes_tokens_at_apply():
    causal = next(family for family in FAMILIES if family.name == "nn-decoder")
    model = build(causal)
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(vocab_size=9, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    with pytest.raises(ConflictError, match="causal"):
        attemper.apply(model, "graying(dct, where=tokens)")


def test_hooks_of_the_user_see_nothing_of_a_trial():
    model = Outside().train()
    seen = []
    model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    model.register_forward_pre_hook(lambda *_: seen.append(2))
    attemper.apply(model, "dropkey(0.1)")
    assert seen == []
    model(torch.randn(2, 3, 8))
    assert seen == [2, 1]


def test_a_model_that_cannot_be_copied_or_run_is_applied_to_without_a_trial():
    class Odd(Outside):
        def forward(self, x):
            return super().forward(x * float(x.sum() > -1e9))  # needs values

        def __deepcopy__(self, memo):
            raise RuntimeError("not me")

    model = Odd().train()
    attemper.apply(model, "dropkey(0.1)")
    model(torch.randn(2, 3, 8))


def test_parts_that_only_another_input_would_run_are_left_to_the_first_pass():
    class Both(Outside):
        """Reads a second sequence if there is one."""

        def __init__(self):
            super().__init__()
            self.second = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)])

        def forward(self, x, other=None):
            if other is not None:
                for layer in self.second:
                    x = x + layer(x, other, other)[0]
            return super().forward(x)

    model = Both().train()
    attemper.apply(model, "dropkey(0.1)")
    model(torch.randn(2, 3, 8), torch.randn(2, 4, 8))
    model = Both().train()
    attemper.apply(model, "dropkey(0.1)")
    with pytest.raises(UnmetError, match=r"'second\.0'"):
        model(torch.randn(2, 3, 8))


def test_parameters_that_a_made_up_input_is_too_small_for_are_not_refused():
    model = Outside().train()
    attemper.apply(model, "hardmask(0.2, k=20)")
    model(torch.randn(2, 30, 8))


def test_an_implementation_that_wants_a_gpu_is_not_refused_by_a_trial():
    attemper.apply(Outside().train(), "dropkey(0.1)", impl="triton")


def test_the_same_recipe_on_the_same_model_is_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr("attemper.tempering.trial.without_weights", lambda model: tried.append(model))
    passed.clear()
    for _ in range(3):
        attemper.apply(Outside().train(), "dropkey(0.1)")
    assert len(tried) == 3, "what was not tried is not remembered"
    monkeypatch.undo()
    attemper.apply(Outside().train(), "dropkey(0.1)")
    monkeypatch.setattr("attemper.tempering.trial.without_weights", lambda model: tried.append(model))
    attemper.apply(Outside().train(), "dropkey(0.1)")
    attemper.apply(Outside().train(), "dropkey(0.2)")
    assert len(tried) == 4
