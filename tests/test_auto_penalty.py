"""auto_penalty: penalties reach a loop that knows nothing of them, with the factor of its loss, or it raises."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.errors import PenaltyError
from penalised import Model, criterion, tokens

RECIPE = "explicit(v=0.3, ff=0.4)"


class Wrapped(nn.Module):
    """A model with an output of its own making."""

    def __init__(self, wrap):
        super().__init__()
        self.inner = Model()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(self.inner(x))


def pair(wrap=lambda logits: logits, recipe=RECIPE):
    """A model under auto_penalty, and the same one with its handle, for a loss by hand."""
    model = Wrapped(wrap).train()
    twin = copy.deepcopy(model)
    return model, attemper.apply(model, recipe, auto_penalty=True), twin, attemper.apply(twin, recipe)


def assert_same_gradients(model, twin):
    for given, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(given.grad, wanted.grad, atol=1e-7, rtol=1e-4)


LOSSES = {
    "scalar": (lambda logits: criterion(logits), lambda out: out),
    "logits and loss": (lambda logits: (logits, criterion(logits)), lambda out: out[1]),
    "loss and logits": (lambda logits: (criterion(logits), logits), lambda out: out[0]),
    "named": (lambda logits: {"logits": logits, "loss": criterion(logits)}, lambda out: out["loss"]),
    "several": (
        lambda logits: {"loss_box": logits.abs().mean(), "loss_class": criterion(logits)},
        lambda out: out["loss_box"] + out["loss_class"],
    ),
}


@pytest.mark.parametrize("factor", [1.0, 0.25, 1024.0])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_model_with_its_own_loss_gets_the_factor_of_the_loop(kind, factor):
    wrap, loss_of = LOSSES[kind]
    model, tempered, twin, handle = pair(wrap)
    for seed in range(4):
        (factor * loss_of(model(tokens(seed)))).backward()
        out = twin(tokens(seed))
        (factor * (loss_of(out) + handle.penalty())).backward()
    assert_same_gradients(model, twin)
    assert tempered.penalty().item() == 0.0


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_whichever_part_of_the_output_the_loss_is_computed_from_the_penalty_comes_once(used):
    model, tempered, twin, handle = pair(lambda logits: (logits * 1, logits.sin()))
    tempered.loss_scale = 1.0
    for seed in range(2):
        out = model(tokens(seed))
        sum(criterion(out[i]) for i in used).backward(retain_graph=True)
        other = twin(tokens(seed))
        (sum(criterion(other[i]) for i in used) + handle.penalty()).backward()
    assert_same_gradients(model, twin)


def test_two_passes_in_one_loss_bring_both_penalties():
    model, tempered, twin, handle = pair()
    with pytest.warns(UserWarning, match="the factor that the training loop gives it cannot be seen"):
        F.mse_loss(model(tokens(0)), model(tokens(1))).backward()
    (F.mse_loss(twin(tokens(0)), twin(tokens(1))) + handle.penalty()).backward()
    assert_same_gradients(model, twin)
    assert tempered.penalty().item() == 0.0


def test_a_factor_that_cannot_be_seen_is_said_once_and_not_if_it_is_known():
    model, tempered, *_ = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            criterion(model(tokens())).backward()
            optimizer.step()
    assert len(said) == 1
    assert "tempered.loss_scale" in str(said[0].message)
    model, tempered, *_ = pair()
    tempered.loss_scale = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        criterion(model(tokens())).backward()


@pytest.mark.filterwarnings("ignore:auto_penalty")
def test_accumulation_without_a_factor_is_an_error_and_with_one_it_is_right():
    model, tempered, twin, handle = pair()
    (criterion(model(tokens(0))) / 4).backward()
    with pytest.raises(PenaltyError, match=r"several backward passes are added up.*tempered\.loss_scale = 1/steps"):
        (criterion(model(tokens(1))) / 4).backward()
    model.zero_grad()
    tempered.loss_scale = 0.25
    for seed in range(4):
        (criterion(model(tokens(seed))) / 4).backward()
        (tempered_loss := handle.loss(lambda s=seed: twin(tokens(s)), criterion) / 4).backward()
    assert tempered_loss.requires_grad
    assert_same_gradients(model, twin)


@pytest.mark.filterwarnings("ignore:auto_penalty")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_ordinary_loops_are_not_taken_for_accumulation(optimizer, set_to_none):
    model, *_ = pair()
    optimizer = optimizer(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = criterion(model(tokens()))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        criterion(model(tokens(1)))  # a pass that goes nowhere


@pytest.mark.filterwarnings("ignore:auto_penalty")
def test_gradients_that_were_thrown_away_are_not_taken_for_accumulation():
    model, *_ = pair()
    for _ in range(3):
        criterion(model(tokens())).backward()
        model.zero_grad(set_to_none=False)


def test_float16_without_a_factor_is_an_error():
    model, tempered, *_ = pair()
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(PenaltyError, match=r"loss scaler.*tempered\.loss_scale = scaler\.get_scale"):
            model(tokens())
        tempered.loss_scale = 1.0
        model(tokens())


def test_a_loss_scaler_whose_scale_is_handed_over_is_undone_by_it():
    model, tempered, twin, handle = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    tempered.loss_scale = scaler.get_scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(criterion(model(tokens()))).backward()
    scaler.unscale_(optimizer)
    handle.loss(lambda: twin(tokens()), criterion).backward()
    assert_same_gradients(model, twin)


@pytest.mark.filterwarnings("ignore:auto_penalty")
def test_a_loss_from_an_output_that_carries_nothing_is_an_error_in_the_next_pass():
    """The model computes a loss itself, but the loop trains with another one, computed from the logits."""
    model, *_ = pair(lambda logits: {"loss": criterion(logits), "logits": logits})
    criterion(model(tokens())["logits"]).backward()
    with pytest.raises(PenaltyError, match=r"did not come along.*tempered\.loss"):
        model(tokens())


def test_a_compiled_model_carries_its_penalties():
    torch._dynamo.reset()
    wrap, loss_of = LOSSES["logits and loss"]
    model, _, twin, handle = pair(wrap)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        (loss_of(fast(tokens(seed))) / 2).backward()
        out = twin(tokens(seed))
        ((loss_of(out) + handle.penalty()) / 2).backward()
    assert_same_gradients(model, twin)
