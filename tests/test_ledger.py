"""Penalties and comparisons that cannot be forgotten: what a pass adds lives as long as its output."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attemper
from attemper.errors import PenaltyError, UnsupportedError
from penalised import RECIPE, Block, criterion, expected, tempered_model, terms, tokens


# ----------------------------------------------------------------------------------------------- as long as the output
def test_the_passes_whose_outputs_live_are_summed():
    model, tempered = tempered_model()
    first, second = model(tokens(0)), model(tokens(1))  # noqa: F841
    assert tempered.penalty().item() == pytest.approx(expected(0, 1), rel=1e-5)
    assert tempered.penalty().item() == 0.0


def test_a_loss_keeps_what_its_outputs_added():
    model, tempered = tempered_model()
    loss = criterion(model(tokens(0))) + criterion(model(tokens(1)))
    gc.collect()
    assert (loss + tempered.penalty() - loss).item() == pytest.approx(expected(0, 1), rel=1e-5)


def test_passes_whose_outputs_were_dropped_are_read_right_behind_them():
    model, tempered = tempered_model()
    model(tokens(0))
    model(tokens(1))
    assert tempered.penalty().item() == pytest.approx(expected(0, 1), rel=1e-5)


def test_a_stray_pass_counts_for_nobody():
    model, tempered = tempered_model()
    for seed in range(5):
        model(tokens(seed))
    out = model(tokens(7))  # noqa: F841
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tempered.penalty().item() == pytest.approx(expected(7), rel=1e-5)


def test_a_penalty_says_which_passes_it_leaves_out():
    model, tempered = tempered_model()
    for seed in range(5):
        model(tokens(seed))
    with pytest.warns(UserWarning, match=r"leaves out passes whose outputs are gone \(3\)"):
        assert tempered.penalty().item() == pytest.approx(expected(3, 4), rel=1e-5)
    out = model(tokens(0))  # noqa: F841
    model(tokens(1))
    with pytest.warns(UserWarning, match=r"outputs are gone \(1\)"):
        assert tempered.penalty().item() == pytest.approx(expected(0), rel=1e-5)


@pytest.mark.parametrize("kept", [True, False])
def test_a_loss_counts_its_own_passes_alone(kept):
    model, tempered = tempered_model()
    stray = [model(tokens(seed)) for seed in range(3)]
    if not kept:
        del stray
    out = []
    loss = tempered.loss(lambda: out.append(model(tokens(7))) or out[0], criterion)
    assert (loss - criterion(out[0])).item() == pytest.approx(expected(7), rel=1e-5)


def test_a_loss_of_an_output_that_was_there_before_takes_its_penalties():
    model, tempered = tempered_model()
    out = model(tokens(3))
    loss = tempered.loss(lambda: out, criterion)
    assert (loss - criterion(out)).item() == pytest.approx(expected(3), rel=1e-5)


def test_stray_passes_hold_no_memory():
    model, tempered = tempered_model()
    values = []
    for seed in range(20):
        model(tokens(seed))
        values.append(weakref.ref(terms(tempered)[-1].value))
    gc.collect()
    assert sum(value() is not None for value in values) <= 2


def test_an_output_that_lives_keeps_its_terms_and_frees_them_when_it_goes():
    model, tempered = tempered_model()
    out = model(tokens())
    value = weakref.ref(terms(tempered)[0].value)
    for seed in range(1, 5):
        model(tokens(seed))
    gc.collect()
    assert value() is not None
    del out
    model(tokens())
    model(tokens())
    gc.collect()
    assert value() is None


@pytest.mark.parametrize("steps", [20])
@pytest.mark.parametrize("where", ["forward", "criterion", "backward"])
def test_a_step_that_fails_leaves_nothing_behind(where, steps):
    model, tempered = tempered_model()

    def fail(*_):
        raise MemoryError(where)

    def step(of):
        loss = tempered.loss(lambda: model(tokens()), of)
        loss.register_hook(fail)
        loss.backward()

    for _ in range(steps):
        handle = model.head.register_forward_pre_hook(fail) if where == "forward" else None
        with pytest.raises(MemoryError):
            step(fail if where == "criterion" else criterion)
        if handle is not None:
            handle.remove()
    assert terms(tempered) == []
    out = model(tokens())
    assert (tempered.loss(lambda: out, criterion) - criterion(out)).item() == pytest.approx(expected(0), rel=1e-5)


def test_a_backward_pass_that_fails_is_no_training_step():
    model, tempered = tempered_model()
    out = model(tokens())
    penalty = tempered.penalty()
    loss = criterion(out * 1)

    def fail(*_):
        raise MemoryError

    model.head.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        (loss + penalty).backward()
    model(tokens())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["stray", "kept", "fails", "no_grad", "eval", "disabled", "step", "loss"]), max_size=12)
)
def test_whatever_happened_before_the_next_loss_is_right(events):
    """Any order of passes that are dropped, kept, fail, are not for training, or are steps done right."""
    model, tempered = tempered_model()
    kept = []
    for seed, event in enumerate(events):
        x = tokens(seed + 20)
        if event == "stray":
            model(x)
        elif event == "kept":
            kept.append(model(x))
        elif event == "fails":
            with pytest.raises(RuntimeError):
                model(x[..., :3])
        elif event == "no_grad":
            with torch.no_grad():
                criterion(model(x))
        elif event == "eval":
            criterion(model.eval()(x)).backward()
            model.train()
        elif event == "disabled":
            with tempered.disabled():
                criterion(model(x)).backward()
        elif event == "step":
            kept.clear()
            tempered.control.ledger.forget()
            (criterion(model(x)) + tempered.penalty()).backward()
        else:
            tempered.loss(lambda: model(x), criterion).backward()  # noqa: B023
    model.zero_grad()
    loss = tempered.loss(lambda: model(tokens(1)), criterion)
    loss.backward()
    fresh, handle = tempered_model()
    reference = criterion(out := fresh(tokens(1))) + handle.penalty()
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    for given_, wanted in zip(model.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(given_.grad, wanted.grad, atol=1e-6, rtol=1e-4)
    assert out.requires_grad


# ------------------------------------------------------------------------------------------------- nothing is forgotten
OUTPUTS = {
    "tensor": (lambda logits: logits, lambda out: out),
    "tuple": (lambda logits: (logits, "more"), lambda out: out[0]),
    "dict": (lambda logits: {"a": None, "logits": logits}, lambda out: out["logits"]),
    "nested": (lambda logits: {"a": [(logits,)]}, lambda out: out["a"][0][0]),
    "object": (lambda logits: Output(logits), lambda out: out.logits),
    "second": (lambda logits: (logits.detach(), logits * 2), lambda out: out[1]),
}


class Output:
    def __init__(self, logits):
        self.logits = logits


@pytest.mark.parametrize("kind", OUTPUTS)
def test_an_ordinary_step_without_the_penalties_is_an_error_in_the_next_pass(kind):
    wrap, unwrap = OUTPUTS[kind]
    model, tempered = tempered_model(wrap=wrap)
    criterion(unwrap(model(tokens()))).backward()
    with pytest.raises(PenaltyError, match=r"without the penalties of explicit.*tempered\.loss.*auto_penalty=True"):
        model(tokens())
    tempered.loss(lambda: unwrap(model(tokens())), criterion).backward()
    tempered.loss(lambda: unwrap(model(tokens())), criterion).backward()


def test_a_penalty_that_was_read_but_not_added_is_forgotten():
    model, tempered = tempered_model()
    out = model(tokens())
    assert tempered.penalty().item() > 0
    criterion(out).backward()
    with pytest.raises(PenaltyError, match="without the penalties"):
        model(tokens())


def test_penalties_that_are_added_to_another_backward_pass_are_not_forgotten():
    model, tempered = tempered_model()
    for _ in range(2):
        criterion(model(tokens())).backward(retain_graph=True)
        tempered.penalty().backward()
    out = model(tokens())
    penalty = tempered.penalty()
    torch.autograd.grad(criterion(out), list(model.parameters()), retain_graph=True, allow_unused=True)
    torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)
    model(tokens())


@pytest.mark.parametrize("method", ["consistency(1.0)", "rdrop(0.5)"])
def test_a_comparison_that_is_trained_without_its_loss_is_an_error_in_the_next_pass(method):
    model, tempered = tempered_model("dropkey(0.3) + " + method)
    model(tokens())
    tempered.loss(lambda: model(tokens()), criterion).backward()
    criterion(model(tokens())).backward()
    with pytest.raises(PenaltyError, match=r"without comparing passes.*tempered\.loss"):
        model(tokens())
    tempered.loss(lambda: model(tokens()), criterion).backward()
    model(tokens())


def test_a_comparison_of_strength_zero_asks_for_nothing():
    model, _ = tempered_model("dropkey(0.3) + rdrop(0)")
    for _ in range(3):
        criterion(model(tokens())).backward()


def test_a_part_of_the_model_that_is_trained_by_itself_is_not_forgotten_either():
    model, tempered = tempered_model()
    out = model.forward_features(tokens())
    assert len(terms(tempered)) == 8
    (criterion(out) + tempered.penalty()).backward()
    criterion(model.forward_features(tokens())).backward()
    with pytest.raises(PenaltyError, match="without the penalties"):
        model.forward_features(tokens())


def test_passes_that_are_not_for_training_may_go_backward():
    model, tempered = tempered_model()
    for _ in range(3):
        with tempered.disabled():
            criterion(model(tokens().requires_grad_())).backward()
        criterion(model.eval()(tokens().requires_grad_())).backward()
        model.train()
    model(tokens())


def test_an_output_may_be_changed_in_place():
    model, tempered = tempered_model()
    out = model(tokens())
    out += 1
    out[:, 0] = 0
    (criterion(out) + tempered.penalty()).backward()


class Headless(nn.Module):
    """Its output is the very tensor that a penalty is taken of, and every state on the way comes with it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x):
        block = self.blocks[0]
        x = x + block.attn(x, x, x, need_weights=False)[0]
        hidden = block.fc1(x)
        return block.fc2(hidden.relu()), (x, hidden)


def test_a_term_that_is_computed_from_the_output_does_not_keep_it_alive():
    model = Headless().train()
    tempered = attemper.apply(model, RECIPE)
    values = []
    for seed in range(10):
        model(tokens(seed))
        values.append(weakref.ref(terms(tempered)[-1].value))
    gc.collect()
    assert sum(value() is not None for value in values) <= 2
    _, (_, hidden) = model(tokens())
    hidden.sum().backward()
    with pytest.raises(PenaltyError):
        model(tokens())


# ------------------------------------------------------------------------------------------- threads and replicas
def test_threads_have_ledgers_of_their_own():
    model, tempered = tempered_model("explicit(v=0.2, ff=0.4)")
    wanted = {seed: expected(seed, recipe="explicit(v=0.2, ff=0.4)") for seed in range(4)}
    wrong, barrier = [], threading.Barrier(4)

    def train(seed):
        barrier.wait()
        for _ in range(15):
            out = []
            loss = tempered.loss(lambda out=out: out.append(model(tokens(seed))) or out[0], criterion)
            if (loss - criterion(out[0])).item() != pytest.approx(wanted[seed], rel=1e-4):
                wrong.append(seed)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_do_not_see_each_others_padding():
    """Two batches with padding in two threads: each block's mean leaves out the padding of its own batch."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    attemper.apply(model, "cb")
    masks = [torch.arange(5).expand(2, 5) >= length for length in (2, 4)]
    wanted = [model(tokens(), src_key_padding_mask=mask) for mask in masks]
    wrong, barrier = [], threading.Barrier(2)

    def run(index):
        barrier.wait()
        for _ in range(30):
            if not torch.equal(model(tokens(), src_key_padding_mask=masks[index]), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_replicas_of_data_parallel_are_refused():
    model, _ = tempered_model()
    replica = model._replicate_for_data_parallel()
    with pytest.raises(UnsupportedError, match=r"DataParallel.*DistributedDataParallel"):
        replica(tokens())
    plain, _ = tempered_model("dropkey(0.1)")
    plain._replicate_for_data_parallel()(tokens())
