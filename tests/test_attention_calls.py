"""Who serves a call of `attemper.attention`, and calls that nobody can serve."""

from __future__ import annotations

import importlib

import pytest
import torch

import attemper
from attemper import attention, implementations
from attemper.errors import ParameterError, UnsupportedError
from attemper.kernels.implementations import triton as triton_attention
from attemper.methods import DropAttention, DropKey
from attemper.ops.call import make_call
from attemper.ops.dispatch import IMPLEMENTATIONS
from families import FAMILIES, build, call
from test_attention import boolean_mask, qkv, randn

# Which implementation.


@pytest.mark.parametrize(
    ("arguments", "chosen", "refused"),
    [
        ({}, "sdpa", {}),
        ({"methods": [DropKey(0.1)]}, "reference", {"sdpa": "DropKey"}),
        ({"methods": DropAttention(0.1, rescale="normalize")}, "reference", {"sdpa": "DropAttention"}),
        ({"is_causal": True, "attn_mask": boolean_mask(7, 7)}, "reference", {"sdpa": "not both"}),
    ],
)
def test_implementations_says_who_serves_and_why_not(arguments, chosen, refused):
    verdicts = {verdict.name: verdict for verdict in implementations(*qkv(), **arguments)}
    assert set(verdicts) == {"sdpa", "tiled", "gather", "reference", "triton", "fa4"}
    assert [name for name, verdict in verdicts.items() if verdict.chosen] == [chosen]
    for name, verdict in verdicts.items():
        assert verdict.serves == (name not in {"tiled", "gather", "triton", "fa4", *refused})
        assert verdict.serves == (verdict.reason == "")
        assert refused.get(name, "") in verdict.reason


@pytest.mark.parametrize("impl", ["triton", "fa4"])
def test_an_implementation_that_cannot_run_here_is_refused_with_those_that_can(impl):
    with pytest.raises(UnsupportedError, match=rf"impl='{impl}' .* on cpu: .*These can: sdpa, reference"):
        attention(*qkv(), impl=impl)
    with pytest.raises(UnsupportedError, match=r"These can: reference"):
        attention(*qkv(), methods=[DropKey(0.1)], impl=impl)


def test_sdpa_by_name_refuses_methods_and_combined_masks():
    with pytest.raises(UnsupportedError, match=r"impl='sdpa'.*DropKey.*These can: reference"):
        attention(*qkv(), methods=[DropKey(0.0)], impl="sdpa")
    with pytest.raises(UnsupportedError, match=r"either attn_mask or is_causal"):
        attention(*qkv(), attn_mask=boolean_mask(7, 7), is_causal=True, impl="sdpa")


# Bad input.

Q, K, V = qkv(3, 5)
BAD = {
    "q of three axes": ((Q[0], K, V), {}, "four axes"),
    "v of five axes": ((Q, K, V[None]), {}, "four axes"),
    "widths of q and k": ((Q[..., :4], K, V), {}, r"same head width, got q \(2, 6, 3, 4\), k \(2, 6, 5, 8\)"),
    "tokens of k and v": ((Q, K, V[:, :, :4]), {}, "k and v must agree"),
    "heads of k and v": ((Q, K, V[:, :3]), {}, "k and v must agree"),
    "batches of k and v": ((Q, K, V[:1]), {}, "k and v must agree"),
    "batches of q and k": ((Q[:1], K, V), {}, "same batch size"),
    "heads no multiple": ((Q, K[:, :4], V[:, :4]), {}, "multiple"),
    "more key heads": ((Q[:, :3], K, V), {}, "multiple"),
    "no keys": ((Q, K[:, :, :0], V[:, :, :0]), {}, "at least one key"),
    "dtypes": ((Q, K.float(), V), {}, "one dtype, got torch.float64, torch.float32, torch.float64"),
    "integers": ((Q.int(), K.int(), V.int()), {}, "got torch.int32"),
    "devices": ((Q, K.to("meta"), V), {}, "one device, got cpu, meta, cpu"),
    "mask does not broadcast": ((Q, K, V), {"attn_mask": boolean_mask(5, 3)}, r"= \(2, 6, 3, 5\), got \(5, 3\)"),
    "mask of five axes": ((Q, K, V), {"attn_mask": boolean_mask(1, 2, 6, 3, 5)}, "must broadcast"),
    "mask of other heads": ((Q, K, V), {"attn_mask": randn(2, 3, 3, 5)}, "must broadcast"),
    "mask of integers": ((Q, K, V), {"attn_mask": torch.ones(3, 5, dtype=torch.int64)}, "got torch.int64"),
    "mask on another device": ((Q, K, V), {"attn_mask": randn(3, 5).to("meta")}, "device of q"),
    "method as text": ((Q, K, V), {"methods": ["dropkey"]}, "such as DropKey"),
    "method class": ((Q, K, V), {"methods": [DropKey]}, "such as DropKey"),
    "unknown impl": ((Q, K, V), {"impl": "tritn"}, "got 'tritn'. Did you mean 'triton'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    tensors, arguments, message = BAD[name]
    with pytest.raises(ParameterError, match=message):
        attention(*tensors, **arguments)
    if name != "unknown impl":
        with pytest.raises(ParameterError, match=message):
            implementations(*tensors, **arguments)


def test_a_seed_of_another_kind_is_refused():
    for seed in (torch.tensor([1]), torch.tensor(0.5)):
        with pytest.raises(ValueError, match="seed must be"):
            attention(Q, K, V, methods=[DropKey(0.1)], seed=seed)


# ------------------------------------------------------------------------------------ calls that are only looked at
attention_module = importlib.import_module("attemper.ops.dispatch")  # the package has a function of that name


@pytest.mark.parametrize(
    ("mask", "causal", "serves", "expected"),
    [
        (None, False, True, "triton"),
        (torch.ones(1, 1, 1, 5, dtype=torch.bool), False, True, "triton"),
        (torch.zeros(1, 1, 1, 5), False, True, "auto"),
        (None, True, True, "auto"),
        (None, False, False, "auto"),
    ],
)
def test_a_call_without_methods_goes_to_our_kernel_only_where_that_was_measured(
    mask, causal, serves, expected, monkeypatch
):
    monkeypatch.setattr(attention_module, "is_short", lambda call: True)
    monkeypatch.setattr(triton_attention, "refuse", lambda call: None if serves else "not here")
    q, k, v = qkv(5, 5)
    assert attention_module.fastest_unperturbed(make_call(q, k, v, mask, causal, None, (), None)) == expected


@pytest.mark.parametrize("recipe", ["cb", "explicit(v=1e-3)"])
@pytest.mark.parametrize(("impl", "training", "expected"), [
    ("auto", True, "fastest"), ("auto", False, "auto"), ("sdpa", True, "sdpa"),
])  # fmt: skip
def test_attention_that_is_only_looked_at_gets_the_fastest_kernel_in_training(
    recipe, impl, training, expected, monkeypatch
):
    asked = []
    real = attemper.tempering.interception.attend_and_square
    monkeypatch.setattr(attemper.tempering.interception, "fastest_unperturbed", lambda call, alone: "fastest")
    monkeypatch.setattr(attemper.tempering.interception, "chosen_name", lambda call, impl: "sdpa")
    monkeypatch.setattr(attemper.tempering.interception, "choose", lambda call, impl: IMPLEMENTATIONS["sdpa"])
    monkeypatch.setattr(
        attemper.tempering.interception,
        "attend_and_square",
        lambda call, impl, *rest: (asked.append(impl), real(call, "sdpa", *rest))[1],
    )
    family = next(family for family in FAMILIES if family.name == "timm-vit")
    model = build(family).train(training)
    attemper.apply(model, recipe, impl=impl)
    asked.clear()  # of a copy whose masks were read
    call(model, family.inputs())
    sees = training or recipe == "cb"  # penalties do not look in eval mode
    assert set(asked) == ({expected} if sees else set())
