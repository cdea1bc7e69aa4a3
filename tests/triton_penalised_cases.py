"""Penalties whose gradients the attention kernels add, in Triton's interpreter; run by `test_triton.py`."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from torch import Tensor, nn

import attemper
from attemper.kernels.attention.packed import parts
from attemper.kernels.attention.penalised import with_squares
from attemper.kernels.implementations import triton as triton_attention
from attemper.methods import DropKey
from attemper.ops.call import make_call
from attemper.ops.stream import Source
from attemper.tempering.attention import AttentionAction
from attemper.tempering.subclassing import is_tempered, state_of
from triton_steps import step_of

PENALISED = "attemper::penalised_attention"
SEPARATE = "attemper::fused_attention"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


def written_out(
    qkv: Tensor, bias: Tensor | None, heads: int, keep: Tensor, causal: bool, weights: dict[str, float], dout: Tensor
) -> Tensor:
    """Attention and penalties of float64, every logit in memory: a scalar to differentiate."""
    q, k, v = parts(qkv, heads)
    logits = (q @ k.mT) / q.shape[-1] ** 0.5
    if causal:
        keep = keep & torch.ones_like(keep).tril()
    out = logits.masked_fill(~keep, -torch.inf).softmax(-1) @ v
    q, k, v = parts(qkv if bias is None else qkv - bias, heads)
    squares = {"v": v.square().sum(), "qk": (q @ k.mT).square().sum()}
    return (out * dout).sum() + sum(weight * squares[name] for name, weight in weights.items())


V, QK = {"v": 0.3}, {"qk": 0.02}


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("tokens", "width", "dropped", "causal", "weights", "dtype"),
    [
        (1, 16, False, False, V | QK, torch.float32),
        (17, 16, True, False, V, torch.float32),
        (17, 16, True, False, V, torch.float16),  # the interpreter cannot multiply bfloat16
        (17, 16, True, False, QK, torch.float32),
        (65, 32, True, False, V | QK, torch.float32),
        (100, 40, False, True, V | QK, torch.float32),
        (133, 64, True, False, V | QK, torch.float32),
    ],
)
def test_gradients_are_those_of_the_formulas(
    tokens: int, width: int, dropped: bool, causal: bool, weights: dict[str, float], biased: bool, dtype: torch.dtype
) -> None:
    heads = 2
    qkv = torch.randn(2, tokens, 3 * heads * width).to(dtype)
    bias = torch.randn(3 * heads * width) if biased else None
    dout = torch.randn(2, heads, tokens, width)
    given = [x.requires_grad_() for x in (qkv, bias) if x is not None]
    exact = [x.detach().double().requires_grad_() for x in given]
    methods = (DropKey(0.3),) if dropped else ()
    call = make_call(*parts(qkv, heads), None, causal, None, methods, Source(torch.tensor(7)), qkv)
    assert triton_attention.squares(call, weights) == tuple(weights)
    factors = dict.fromkeys(weights, 1.0) if causal else dict.fromkeys(weights, 2.0)
    out, squares = triton_attention.attention_and_squares(call, bias, factors)
    total = (out * dout).sum() + sum(weight / factors[name] * squares[name].sum() for name, weight in weights.items())
    keep = torch.ones(2, heads, tokens, tokens, dtype=torch.bool)
    if dropped:
        keep = attemper.keep_mask(7, (2, heads, tokens, tokens), 0.3)
        keep = keep | ~keep.any(-1, keepdim=True)
    expected = written_out(exact[0], exact[1] if biased else None, heads, keep, causal, weights, dout.double())
    assert total.item() == pytest.approx(expected.item(), rel=TOLERANCE[dtype], abs=0.5)
    for one, other in zip(torch.autograd.grad(total, given), torch.autograd.grad(expected, exact), strict=True):
        assert (one.double() - other).norm() <= TOLERANCE[dtype] * other.norm()


class Copied(nn.Linear):
    """A projection whose output is copied before attention sees it, so that Q, K and V are no part of it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clone()


def step(kind: str, recipe: str, impl: Any, compiled: bool = False) -> tuple[Counter[str], list[Tensor]]:
    """One training step: which operators ran, the penalties, the output and all gradients."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=2, num_classes=3,
        qk_norm=kind == "norms", qkv_bias=kind != "no bias",
    ).train()  # fmt: skip
    for module in model.modules():
        if isinstance(module, Attention):
            if module.qkv.bias is not None:
                nn.init.normal_(module.qkv.bias)
            if kind == "copied":
                module.qkv.__class__ = Copied
    return step_of(model, recipe, impl, compiled)


@pytest.mark.parametrize(
    ("kind", "recipe", "penalised", "compiled"),
    [
        ("plain", "explicit(v=0.5, ff=0.1)", 2, False),
        ("plain", "explicit(q=0.5, ff=0.1)", 2, True),
        ("plain", "dropkey(0.3) + explicit(q=0.2, k=0.3, v=0.5, av=0.1)", 2, False),
        ("plain", "dropkey(0.3) + explicit(q=0.2, k=0.3, v=0.5, av=0.1)", 2, True),
        ("plain", "explicit(v=[0, 0.5])", 1, False),
        ("plain", "explicit(v=0.5, q=0.5, expectation=exact)", 2, False),
        ("plain", "explicit(q=0.5, heads=joint)", 0, False),
        ("plain", "dropconnect(0.3) + explicit(v=0.5)", 0, False),
        ("plain", "blur + explicit(v=0.5, k=0.5)", 0, False),
        ("no bias", "explicit(v=0.5, k=0.5)", 2, False),
        ("norms", "explicit(v=0.5, k=0.5)", 0, False),
        ("copied", "explicit(v=0.5, k=0.5)", 0, True),
    ],
)
def test_a_step_of_a_model_is_the_references(kind: str, recipe: str, penalised: int, compiled: bool) -> None:
    torch.compiler.reset()
    calls, ours = step(kind, recipe, "triton", compiled)
    assert calls[PENALISED] == calls[PENALISED + "_backward"] == penalised
    assert calls[SEPARATE] == (2 if kind in ("norms", "copied") or "blur" in recipe else 0)
    _, expected = step(kind, recipe, "reference")
    for given, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=2e-4, atol=1e-4)


def test_attention_is_the_same_bit_for_bit_whether_penalties_look_on_or_not() -> None:
    qkv, bias = torch.randn(2, 37, 3 * 2 * 16), torch.randn(3 * 2 * 16)
    others = (None, None, 0.25, False)
    looked, *_ = with_squares(qkv, bias, *parts(qkv, 2), 1.0, 1.0, *others)
    assert torch.equal(looked, torch.ops.attemper.packed_attention(qkv, 2, *others)[0])


def test_one_result_alone_can_be_differentiated() -> None:
    qkv = torch.randn(2, 37, 3 * 2 * 16, requires_grad=True)
    others = (None, None, 0.25, False)
    out, square = with_squares(qkv, None, *parts(qkv, 2), 1.0, 0.0, *others)
    (pulled,) = torch.autograd.grad(square.sum(), qkv, retain_graph=True)
    expected = torch.zeros_like(qkv)
    expected[..., 64:] = 2 * qkv[..., 64:].detach()
    torch.testing.assert_close(pulled, expected)
    (attended,) = torch.autograd.grad(out.sum(), qkv)
    alone = torch.ops.attemper.packed_attention(qkv, 2, *others)[0]
    assert torch.equal(attended, torch.autograd.grad(alone.sum(), qkv)[0])


def test_float16_takes_the_squares_of_logits_elsewhere() -> None:
    qkv = torch.randn(1, 5, 3 * 2 * 16).half()
    call = make_call(*parts(qkv, 2), None, False, None, (), None, qkv)
    assert triton_attention.squares(call, {"qk", "v"}) == ("v",)


def test_opcheck_of_the_operator() -> None:
    qkv = torch.randn(1, 17, 3 * 2 * 16, requires_grad=True)
    bias = torch.randn(3 * 2 * 16, requires_grad=True)
    for asked in ((True, False), (False, True), (True, True)):
        torch.library.opcheck(torch.ops.attemper.penalised_attention, (qkv, bias, 2, *asked, None, None, 0.25, False))


@pytest.mark.parametrize("recipe", ["explicit(v=0.5, ff=0.1)", "dropkey(0.3) + explicit(q=0.2, k=0.3, v=0.5)"])
@pytest.mark.parametrize("how", ["alone", "in eval and back", "without gradients", "masked"])
def test_a_known_call_with_penalties_is_what_a_call_is_that_is_met_first(recipe: str, how: str) -> None:
    """Loss and gradients of a model that has run before are those of one that has not, bit for bit."""
    results = []
    for known in (True, False):
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=32, num_heads=2, depth=1, num_classes=3
        ).train()  # fmt: skip
        tempered = attemper.apply(model, recipe, impl="triton")
        x, mask = torch.randn(2, 3, 16, 16), None

        def step(model: Any = model, tempered: Any = tempered, x: Tensor = x) -> list[Tensor]:
            torch.manual_seed(5)
            loss = tempered.loss(lambda: model(x), lambda out: out.square().sum())
            return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

        if known:
            step()
            step()
            assert all(action.plain for action in attention_actions(model))
            if how == "in eval and back":
                model.eval()(x)
                model.train()
            elif how == "without gradients":
                with torch.no_grad():
                    model(x)
        if how == "masked":
            mask = torch.zeros(5, 5).masked_fill(torch.arange(5) > 3, -torch.inf)
            model.forward_features = functools.partial(model.forward_features, attn_mask=mask)
        results.append(step())
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def attention_actions(model: nn.Module) -> list[AttentionAction]:
    found = [action for m in model.modules() if is_tempered(m) for action in state_of(m).actions]
    return [action for action in found if isinstance(action, AttentionAction)]
