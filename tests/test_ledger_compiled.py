"""Penalties and comparisons of compiled and checkpointed models are not forgotten either."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attemper.errors import PenaltyError
from penalised import criterion, expected, tempered_model, terms, tokens


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", **options)


def test_compiled_passes_add_up_and_are_taken_once():
    model, tempered = tempered_model(blocks=1)
    fast = compiled(model, fullgraph=True)
    for _ in range(2):
        out = fast(tokens(0)), fast(tokens(1))
        penalty = tempered.penalty()
        assert penalty.item() == pytest.approx(expected(0, 1, blocks=1), rel=1e-5)
        (criterion(out[0]) + criterion(out[1]) + penalty).backward()


@pytest.mark.slow
def test_a_loss_of_a_compiled_model_counts_its_own_pass():
    model, tempered = tempered_model(blocks=1)
    fast = compiled(model, fullgraph=True)
    for _ in range(3):
        stray = fast(tokens(1))  # noqa: F841
        loss = tempered.loss(lambda: fast(tokens(2)), criterion)
        loss.backward()
        assert (loss - criterion(model.eval()(tokens(2)))).item() == pytest.approx(expected(2, blocks=1), rel=1e-4)
        model.train()


def test_a_compiled_step_without_the_penalties_is_an_error_in_the_next_pass():
    model, _ = tempered_model(blocks=1)
    fast = compiled(model)
    criterion(fast(tokens())).backward()
    with pytest.raises(PenaltyError, match=r"tempered\.loss.*auto_penalty=True"):
        fast(tokens())


@pytest.mark.slow
def test_a_compiled_comparison_without_its_loss_is_an_error_in_the_next_pass():
    model, tempered = tempered_model("dropkey(0.3) + rdrop(0.5)", blocks=1)
    fast = compiled(model)
    for _ in range(2):
        tempered.loss(lambda: fast(tokens()), criterion).backward()
    criterion(fast(tokens())).backward()
    with pytest.raises(PenaltyError, match="without comparing passes"):
        fast(tokens())


@pytest.mark.slow
def test_compiled_stray_passes_are_not_held_for_ever_and_compile_nothing_anew():
    model, tempered = tempered_model(blocks=1)
    fast = compiled(model, fullgraph=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    values = []
    for seed in range(20):
        fast(tokens(seed))
        values.append(weakref.ref(terms(tempered)[-1].value))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 4
    gc.collect()
    assert sum(value() is not None for value in values) <= 3
    out = []
    loss = tempered.loss(lambda: out.append(fast(tokens(7))) or out[0], criterion)
    assert (loss - criterion(out[0])).item() == pytest.approx(expected(7, blocks=1), rel=1e-5)


def test_blocks_that_are_compiled_one_by_one_belong_to_the_pass_of_the_model():
    torch._dynamo.reset()
    model, tempered = tempered_model()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    out = model(tokens())
    assert tempered.penalty().item() == pytest.approx(expected(0), rel=1e-5)
    del out
    criterion(model(tokens())).backward()
    with pytest.raises(PenaltyError):
        model(tokens())


def test_a_checkpointed_model_is_not_forgotten():
    model, tempered = tempered_model()
    model.forward_features = lambda x: checkpoint(model.blocks[1], model.blocks[0](x), use_reentrant=False)
    tempered.loss(lambda: model(tokens()), criterion).backward()
    criterion(model(tokens())).backward()
    with pytest.raises(PenaltyError):
        model(tokens())
