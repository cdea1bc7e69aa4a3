"""Penalties on a GPU, in bfloat16: close to what float64 gives on the same numbers."""

from __future__ import annotations

import pytest
import torch

from attemper.methods.explicit import product_square

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("width", [64, 384])
def test_squares_of_logits_from_products_of_bfloat16(width: int) -> None:
    sides = [torch.randn(4, 2, 197, width, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        left, right = (side.to(dtype).requires_grad_() for side in sides)
        total = product_square(left, right)
        results.append((total.double(), *(grad.double() for grad in torch.autograd.grad(total, (left, right)))))
    for given, expected in zip(*results, strict=True):
        assert (given - expected).norm() <= 5e-3 * expected.norm()
