"""Kernels that run in Triton's interpreter, as torch's counter of operations sees them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import attemper

B, H, N, E = 1, 2, 17, 16
PAIRS = 2 * B * H * N * N


@pytest.mark.parametrize(("recipe", "more"), [("dropkey(0.3)", 0), ("hardmask(0.5, k=3)", PAIRS * E)])
def test_attention_by_kernels_is_counted(recipe: str, more: int) -> None:
    q, k, v = (torch.randn(B, H, N, E, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as forward:
        out = attemper.attention(q, k, v, methods=attemper.parse(recipe), seed=0, impl="triton")
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == PAIRS * 2 * E + more
    assert backward.get_total_flops() == PAIRS * 5 * E
