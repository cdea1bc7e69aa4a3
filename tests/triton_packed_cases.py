"""Q, K and V from one projection, in Triton's interpreter; run by `test_triton.py` with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from torch import Tensor, nn

from attemper.kernels.attention.packed import parts
from attemper.kernels.attention.prepare import drop_table
from attemper.ops.stream import Stream
from triton_steps import step_of

PACKED, SEPARATE = "attemper::packed_attention", "attemper::fused_attention"


class Adapted(nn.Linear):
    """A projection to whose output something is added, as adapters do: of the same layout, but with its own memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x.repeat(1, 1, 3)


class Halved(nn.Linear):
    """A projection whose queries are halved in place, and so where the keys and values lie, too."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out[..., : x.shape[-1]] *= 0.5
        return out


def model_with(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=2, num_classes=3,
        qk_norm=kind == "norms",
    )  # fmt: skip
    if kind in ("adapted", "in place"):
        for module in model.modules():
            if isinstance(module, Attention):
                module.qkv.__class__ = Adapted if kind == "adapted" else Halved
    return model.train()


def step(kind: str, recipe: str, impl: Any, compiled: bool = False) -> tuple[Counter[str], list[Tensor]]:
    """One training step: which operators ran, the output and all gradients."""
    return step_of(model_with(kind), recipe, impl, compiled)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("plain", "dropkey(0.3)"),
        ("plain", "hardmask(0.3) + dropkey(0.2) + explicit(av=0.1)"),
        ("norms", "dropkey(0.3)"),
        ("adapted", "dropkey(0.3)"),
        ("in place", "dropkey(0.3)"),
    ],
)
def test_gradients_of_one_projection_come_in_one_piece(kind: str, recipe: str, compiled: bool) -> None:
    torch.compiler.reset()
    calls, ours = step(kind, recipe, "triton", compiled)
    packed = kind in ("plain", "in place")
    assert (calls[PACKED], calls[SEPARATE]) == ((2, 0) if packed else (0, 2))
    assert calls[PACKED + "_backward"] == calls[PACKED]
    _, expected = step(kind, recipe, "reference")
    for given, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=2e-4, atol=2e-5)


def test_blurred_keys_are_no_part_of_the_projection() -> None:
    calls, ours = step("plain", "blur", "triton")
    assert (calls[PACKED], calls[SEPARATE]) == (0, 2)
    _, expected = step("plain", "blur", "reference")
    for given, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dropped", [False, True])
def test_in_one_piece_or_three_the_bits_are_the_same(dropped: bool) -> None:
    qkv = torch.randn(2, 37, 3 * 2 * 16, requires_grad=True)
    table = drop_table(Stream(torch.tensor(5)), 0, 37) if dropped else None
    dout = torch.randn(2, 2, 37, 16)
    one = torch.ops.attemper.packed_attention(qkv, 2, None, table, 0.25, False)[0]
    three = torch.ops.attemper.fused_attention(*parts(qkv, 2), None, table, 0.25, False)[0]
    assert torch.equal(one, three)
    assert torch.equal(*(torch.autograd.grad(out, qkv, dout)[0] for out in (one, three)))


def test_opcheck_of_the_operator() -> None:
    qkv = torch.randn(1, 17, 3 * 2 * 16, requires_grad=True)
    table = drop_table(Stream(torch.tensor(5)), 0, 17)
    torch.library.opcheck(torch.ops.attemper.packed_attention, (qkv, 2, None, table, 0.25, False))
