"""The handle to a tempered model: what it tells, what it changes on the live model, and how it lets go."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper import Tempered
from attemper.errors import NoSiteError, ParameterError, UnknownMethodError, UnmetError
from attemper.methods import DropAttention, DropKey
from attemper.tempering import attention
from contracts import COMPOSED, SCHEDULED, assert_same, evaluate, fingerprint, original, tempered, train
from families import VIT, call, family, image, timm_model

VIT_FAMILY, HAND_WRITTEN, ENCODER = family("timm-vit"), family("hand-written"), family("nn-encoder")


def rates(handle: Tempered, method: str = "dropkey") -> list[float | None]:
    return [row.rate for row in handle.summary() if row.method == method]


# --------------------------------------------------------------------------------------------------------------- loss
def test_loss_is_the_tasks_own_and_the_penalty() -> None:
    model, handle = tempered(HAND_WRITTEN, SCHEDULED)
    wanted = train(model, HAND_WRITTEN).square().mean()
    torch.manual_seed(1)
    loss = handle.loss(lambda: call(model, HAND_WRITTEN.inputs()), lambda output: output.square().mean())
    assert_same(loss, wanted)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_penalty_is_zero_for_methods_that_act_in_the_forward_pass() -> None:
    _, handle = tempered(HAND_WRITTEN, SCHEDULED)
    penalty = handle.penalty()
    assert penalty.shape == ()
    assert penalty.item() == 0.0


# -------------------------------------------------------------------------------------------------------------- rates
def third(block: int, blocks: int) -> float:
    return 0.3 * (block + 1) / blocks


@pytest.mark.parametrize(
    ("method", "before", "after"),
    [
        (DropKey(0.3), [0.3, 0.3, 0.3], [0.6, 0.6, 0.6]),
        (DropKey(0.3, schedule="decreasing"), [0.3, 0.2, 0.1], [0.6, 0.4, 0.2]),
        (DropKey(0.3, schedule="increasing"), [0.1, 0.2, 0.3], [0.2, 0.4, 0.6]),
        (DropKey(0.3, schedule="decreasing", match="mean"), [0.45, 0.3, 0.15], [0.9, 0.6, 0.3]),
        (DropKey(schedule=(0.1, 0.0, 0.2)), [0.1, 0.0, 0.2], [0.3, 0.0, 0.6]),
        (DropKey(schedule=(0.1, 0.0, 0.2), match="mean"), [0.1, 0.0, 0.2], [0.6, 0.0, 1.2]),
        (DropKey(schedule=third), [0.1, 0.2, 0.3], [0.2, 0.4, 0.6]),
        (DropKey(schedule=(0.0, 0.0, 0.0)), [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    ],
    ids=str,
)
def test_set_rate_keeps_the_shape_of_every_schedule(method: DropKey, before: list[float], after: list[float]) -> None:
    model = original(HAND_WRITTEN)
    handle = attemper.apply(model, method)
    assert rates(handle) == pytest.approx(before)
    if max(after) < 1:
        handle.set_rate(0.6)
        assert rates(handle) == pytest.approx(after)
    else:
        with pytest.raises(ParameterError):
            handle.set_rate(0.6)
        assert rates(handle) == pytest.approx(before)
    handle.set_rate(0)
    assert rates(handle) == [0.0, 0.0, 0.0]
    assert_same(train(model, HAND_WRITTEN), train(original(HAND_WRITTEN), HAND_WRITTEN))


def test_a_new_rate_acts_like_one_given_at_once() -> None:
    model, handle = tempered(HAND_WRITTEN, "dropkey(0.1, schedule=decreasing)")
    handle.set_rate(0.6)
    wanted, _ = tempered(HAND_WRITTEN, "dropkey(0.6, schedule=decreasing)")
    assert_same(train(model, HAND_WRITTEN), train(wanted, HAND_WRITTEN))
    assert handle.methods == (DropKey(0.6, schedule="decreasing"),)


def test_set_rate_of_one_method_leaves_the_others() -> None:
    _, handle = tempered(HAND_WRITTEN, COMPOSED)
    handle.set_rate(0.5, "dropattention")
    assert rates(handle) == [0.2] * 3
    assert rates(handle, "dropattention") == [0.5] * 3


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, float("nan"), "0.1", None, True])
def test_a_rate_that_is_none_leaves_everything_as_it_was(rate: Any) -> None:
    model, handle = tempered(HAND_WRITTEN, COMPOSED)
    before, methods, output = handle.summary(), handle.methods, train(model, HAND_WRITTEN)
    with pytest.raises(ParameterError, match=r"rate must be a number in \[0, 1\)"):
        handle.set_rate(rate)
    assert handle.summary() == before
    assert handle.methods == methods
    assert_same(train(model, HAND_WRITTEN), output)


def test_a_rate_that_a_later_block_cannot_take_leaves_every_block_as_it_was() -> None:
    model = original(HAND_WRITTEN)
    handle = attemper.apply(model, DropKey(0.2, schedule="increasing", match="mean"))
    before = handle.summary()
    with pytest.raises(ParameterError, match="below 1"):
        handle.set_rate(0.9)
    assert handle.summary() == before


def test_set_rate_of_an_unknown_method_suggests_one() -> None:
    _, handle = tempered(HAND_WRITTEN, SCHEDULED)
    with pytest.raises(UnknownMethodError, match="Did you mean 'dropkey'"):
        handle.set_rate(0.1, "dropkye")
    with pytest.raises(UnknownMethodError, match="dropattention"):
        handle.set_rate(0.1, "dropattention")


def test_set_rate_says_so_where_it_would_do_nothing() -> None:
    _, handle = tempered(HAND_WRITTEN, "blur")
    with pytest.raises(UnknownMethodError, match=r"no method in 'blur\(.*' has a rate"):
        handle.set_rate(0.0)
    handle.remove()
    with pytest.raises(NoSiteError, match="not tempered any more"):
        handle.set_rate(0.0)


def test_rate_zero_never_enters_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(attention.AttentionInterceptor):
        def __enter__(self) -> Any:
            raise AssertionError("a mode was entered")

    monkeypatch.setattr(attention, "AttentionInterceptor", Closed)
    model, handle = tempered(HAND_WRITTEN, "dropkey(0) + dropattention(0, schedule=decreasing)")
    assert_same(train(model, HAND_WRITTEN), train(original(HAND_WRITTEN), HAND_WRITTEN))
    evaluate(model, HAND_WRITTEN)
    handle.set_rate(0.1)
    with pytest.raises(AssertionError, match="a mode was entered"):
        train(model, HAND_WRITTEN)
    evaluate(model, HAND_WRITTEN)


# ----------------------------------------------------------------------------------------------- disabled, stochastic
def test_disabled_is_the_original_model_in_training_mode_too() -> None:
    model, handle = tempered(HAND_WRITTEN, COMPOSED)
    plain = train(original(HAND_WRITTEN), HAND_WRITTEN)
    before = train(model, HAND_WRITTEN)
    with handle.disabled():
        assert_same(train(model, HAND_WRITTEN), plain)
    assert_same(train(model, HAND_WRITTEN), before)
    with contextlib.suppress(KeyboardInterrupt), handle.disabled():
        raise KeyboardInterrupt
    assert_same(train(model, HAND_WRITTEN), before)


def test_stochastic_acts_in_eval_mode_and_only_inside() -> None:
    model, handle = tempered(HAND_WRITTEN, COMPOSED)
    before, wanted = evaluate(model, HAND_WRITTEN), train(model, HAND_WRITTEN)
    with handle.stochastic():
        torch.manual_seed(1)
        assert_same(evaluate(model, HAND_WRITTEN), wanted)
        with handle.disabled():
            assert_same(evaluate(model, HAND_WRITTEN), before)
        assert not torch.equal(evaluate(model, HAND_WRITTEN), before)
    assert not model.training
    assert_same(evaluate(model, HAND_WRITTEN), before)


def test_stochastic_and_disabled_let_sites_on_a_copy_alone() -> None:
    model, handle = tempered(HAND_WRITTEN, COMPOSED)
    twin = copy.deepcopy(model)
    with handle.disabled():
        assert not torch.equal(train(twin, HAND_WRITTEN), train(model, HAND_WRITTEN))


@pytest.mark.parametrize("name", ["hand-written", "timm-vit", "nn-encoder", "timm-swin", "timm-volo", "nn-mha"])
def test_average_is_the_mean_of_stochastic_passes_in_eval_mode(name: str) -> None:
    model, handle = tempered(family(name), COMPOSED)
    fast = torch.backends.mha.get_fastpath_enabled()
    state = copy.deepcopy(model.state_dict())
    before = evaluate(model, family(name))
    torch.manual_seed(3)
    got = handle.average(lambda: evaluate(model, family(name), seed=None), 4)
    torch.manual_seed(3)
    with handle.stochastic():
        passes = [evaluate(model, family(name), seed=None) for _ in range(4)]
    assert_same(got, torch.stack(passes).mean(0), rtol=1e-5, atol=1e-6)
    assert not torch.equal(passes[0], passes[1])
    assert not torch.equal(passes[0], before)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert_same(evaluate(model, family(name)), before)
    assert_same(dict(model.state_dict()), dict(state))  # no batch norm counted anything


def test_average_switches_on_nothing_but_the_methods() -> None:
    model = nn.Sequential(original(HAND_WRITTEN), nn.Dropout(0.9), nn.BatchNorm1d(5))
    handle = attemper.apply(model, "dropkey(0)", targets="0.stack.*")
    x = torch.randn(2, 10, 48)
    with pytest.warns(UserWarning, match="all passes of average"):
        assert_same(handle.average(lambda: model.eval()(x), 1), model(x))


@pytest.mark.parametrize("passes", [0, -1, 1.5, True, "2"])
def test_average_needs_a_number_of_passes(passes: Any) -> None:
    model, handle = tempered(HAND_WRITTEN, SCHEDULED)
    with pytest.raises(ParameterError, match="at least 1"):
        handle.average(lambda: evaluate(model, HAND_WRITTEN), passes)


# ----------------------------------------------------------------------------------------------------- remove, finding
def test_removing_twice_is_harmless() -> None:
    model = original(HAND_WRITTEN)
    before = fingerprint(model)
    handle = attemper.apply(model, SCHEDULED)
    handle.remove()
    handle.remove()
    assert fingerprint(model) == before
    assert handle.summary() == []
    assert "not tempered" in str(handle)
    attemper.apply(model, COMPOSED)


def test_removing_from_a_copy_leaves_the_original_tempered() -> None:
    model, handle = tempered(HAND_WRITTEN, SCHEDULED)
    output, twin = train(model, HAND_WRITTEN), copy.deepcopy(model)
    Tempered.of(twin).remove()
    assert_same(train(twin, HAND_WRITTEN), train(original(HAND_WRITTEN), HAND_WRITTEN))
    assert_same(train(model, HAND_WRITTEN), output)
    assert len(handle.summary()) == 3


def test_a_class_that_another_library_put_on_top_stays_and_what_is_below_sleeps() -> None:
    plain, (model, handle) = original(ENCODER), tempered(ENCODER, SCHEDULED)
    for each in (plain, model):
        nn.utils.parametrizations.weight_norm(each.layers[0].self_attn, "in_proj_weight")
    assert not torch.equal(train(model, ENCODER), train(plain, ENCODER))
    handle.remove()
    assert "Parametrized" in type(model.layers[0].self_attn).__name__
    assert_same(train(model, ENCODER), train(plain, ENCODER))
    again = attemper.apply(model, SCHEDULED)
    assert len(again.summary()) == 3
    assert not torch.equal(train(model, ENCODER), train(plain, ENCODER))
    again.remove()
    assert_same(train(model, ENCODER), train(plain, ENCODER))


def unpickled(model: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))
    return loaded


@pytest.mark.parametrize("made", [copy.deepcopy, unpickled])
def test_the_handle_of_a_copy_is_found(made: Any) -> None:
    model, handle = tempered(VIT_FAMILY, COMPOSED)
    handle.set_rate(0.4, "dropkey")
    twin = made(model)
    found = Tempered.of(twin)
    assert found.model is twin
    assert found.methods == handle.methods
    assert found.summary() == handle.summary()
    assert str(found) == str(handle)
    found.set_rate(0)
    assert rates(handle) == [0.4] * 3


def test_the_handle_of_an_untempered_model_is_an_error() -> None:
    with pytest.raises(NoSiteError, match="not tempered"):
        Tempered.of(original(HAND_WRITTEN))


def test_what_was_left_alone_is_still_known_to_a_copys_handle() -> None:
    model, handle = tempered(family("timm-volo"), SCHEDULED)
    assert list(handle.left_alone) == ["network.0.0.attn"]
    assert Tempered.of(pickle.loads(pickle.dumps(model))).left_alone == handle.left_alone
    assert "left alone: network.0.0.attn" in str(handle)


def test_the_empty_recipe_changes_nothing() -> None:
    model = original(HAND_WRITTEN)
    before = fingerprint(model)
    handle = attemper.apply(model, "none")
    assert fingerprint(model) == before
    assert handle.summary() == []
    assert handle.penalty() == 0


# -------------------------------------------------------------------------------------------------------- what it says
def test_the_table_names_every_site_and_rate() -> None:
    _, handle = tempered(VIT_FAMILY, "dropkey(0.3, schedule=decreasing) + dropattention(0.25)")
    text = str(handle)
    lines = text.splitlines()
    assert lines[0] == "VisionTransformer tempered with dropkey(0.3, schedule=decreasing) + dropattention(0.25)"
    for row in handle.summary():
        (line,) = [line for line in lines if f" {row.site} " in line]
        words = line.split()
        assert words == [str(row.block), row.site, "Attention", f"{0.3 * (3 - row.block) / 3:.4g}", "0.25"]
    assert repr(handle) == "<Tempered VisionTransformer: dropkey(0.3, schedule=decreasing) + dropattention(0.25)>"


def test_a_row_tells_the_method_as_it_acts_there() -> None:
    model = original(VIT_FAMILY)
    handle = attemper.apply(model, "dropkey(0.3, schedule=decreasing, structure=cross)", targets="blocks.2")
    (row,) = handle.summary()
    assert (row.site, row.module, row.block, row.method) == ("blocks.2.attn", "Attention", 2, "dropkey")
    assert row.rate == pytest.approx(0.1)
    assert attemper.parse(row.recipe)[0] == DropKey(row.rate, structure="cross", grid=(4, 4), prefix=1)


@pytest.mark.parametrize("schedule", [third, (0.1, 0.2, 0.3)], ids=["function", "list"])
def test_the_table_can_be_read_whatever_the_schedule(schedule: Any) -> None:
    handle = attemper.apply(original(HAND_WRITTEN), DropKey(schedule=schedule))
    assert "stack.2" in str(handle)
    handle.set_rate(0.6)
    assert "0.6" in str(handle)
    assert "dropkey" in repr(handle)


def test_applying_to_a_bare_attention_module() -> None:
    model = nn.MultiheadAttention(8, 2)
    handle = attemper.apply(model, "dropkey(0.3, schedule=decreasing)")
    assert "(root)" in str(handle)
    assert rates(handle) == [0.3]
    handle.remove()
    assert type(model) is nn.MultiheadAttention


@pytest.mark.parametrize("recipe", [DropKey(0.2), [DropKey(0.2)], (DropKey(0.2), DropAttention(0.1)), "dropkey(0.2)"])
def test_a_recipe_is_text_or_methods(recipe: Any) -> None:
    assert rates(attemper.apply(original(HAND_WRITTEN), recipe)) == [0.2] * 3


# ------------------------------------------------------------------------------------------- what cannot be reached
class Elsewhere(nn.Module):
    """Attention without softmax: nothing that could be tempered."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ x.transpose(-2, -1)) @ x


def test_a_module_that_computes_attention_in_another_way_is_an_error_in_training() -> None:
    model = nn.Sequential(Elsewhere())
    attemper.apply(model, "dropkey(0.1)", targets="0")
    x = torch.randn(2, 4, 4)
    model.eval()(x)
    with pytest.raises(UnmetError, match=r"'0' \(Elsewhere\).*no effect"):
        model.train()(x)


def test_an_error_inside_a_tempered_module_leaves_no_mode_behind() -> None:
    model, _ = tempered(HAND_WRITTEN, SCHEDULED)
    with pytest.raises(RuntimeError):
        model.train()(torch.randn(2, 10, 3))
    assert torch.overrides._get_current_function_mode_stack() == []
    q = torch.randn(1, 1, 5, 4)
    assert_same(F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q))


def test_only_attention_inside_the_tempered_modules_is_touched() -> None:
    model = original(VIT_FAMILY)
    attemper.apply(model, "dropkey(0.5)", targets="blocks.2")
    inputs = image()()["args"][0]
    features: list[Tensor] = []
    model.blocks[1].register_forward_hook(lambda *arguments: features.append(arguments[2]))
    first, second = model.train()(inputs), model(inputs)
    assert_same(features[0], features[1])
    assert not torch.equal(first, second)


def test_a_structure_follows_the_size_of_the_images() -> None:
    model = timm_model("vit_tiny_patch16_224", **VIT, dynamic_img_size=True)()
    attemper.apply(model, "dropkey(0.3, structure=block)")
    model.train()(image()()["args"][0])
    model(image(24)()["args"][0])
    with pytest.raises(
        ParameterError, match=r"'blocks\.0\.attn': a block of width w=3 is larger than the grid of 2 × 2"
    ):
        model(image(16)()["args"][0])
    model.eval()(image(16)()["args"][0])
