"""Float32 products by three in TF32: the bound that `kernels/common/products.py` states, and when they are made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attemper.kernels.common.products import SPLIT_ERROR, products

NUMBERS = st.floats(2.0**-20, 2.0**20, width=32)
SIGNS = st.sampled_from([-1.0, 1.0])


def cut(x: Tensor) -> Tensor:
    """A float32 in TF32, digits cut off: no way of rounding is worse."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def by_three(a: Tensor, b: Tensor) -> Tensor:
    """The three products, summed without an error of their own."""
    (h, g), (l, m) = (cut(a), cut(b)), (cut(a - cut(a)), cut(b - cut(b)))
    h, g, l, m = (x.double() for x in (h, g, l, m))
    return h @ g + h @ m + l @ g


@given(st.lists(st.tuples(NUMBERS, NUMBERS, SIGNS), min_size=1, max_size=20))
def test_the_error_of_a_sum_of_products_is_within_the_bound(pairs: list[tuple[float, float, float]]) -> None:
    a = torch.tensor([[x * sign for x, _, sign in pairs]])
    b = torch.tensor([[y] for _, y, _ in pairs])
    exact = a.double() @ b.double()
    assert (by_three(a, b) - exact).abs() <= SPLIT_ERROR * (a.abs().double() @ b.abs().double())


def test_one_product_alone_is_far_from_it() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    exact = a.double() @ b.double()
    errors = [(x - exact).norm() / exact.norm() for x in (by_three(a, b), cut(a).double() @ cut(b).double())]
    assert errors[0] < 1e-6 < 1e-4 < errors[1]


@pytest.mark.parametrize(("setting", "expected"), [("highest", "tf32x3"), ("high", "tf32"), ("medium", "tf32")])
def test_torchs_setting_decides(setting: str, expected: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        assert products(torch.float32) == expected
    finally:
        torch.set_float32_matmul_precision(before)
