"""The kernels behind `passing.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def passed_kernel(
    x_ptr, bias_ptr, more_ptr, scale_ptr, sums_ptr, out_ptr, dbias_ptr, x_n, more_n, rows, cols, factor,
    BIAS: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """scale · factor · (X − b), and what is added to it (ADD), rounded once; for b the same of −`sums`.

    Grid: rows × columns, in blocks; the first row of blocks writes what b gets.
    """
    block = tl.program_id(0).to(tl.int64)
    at = block * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = columns < cols
    there = (at < rows)[:, None] & inside[None, :]
    scale = tl.load(scale_ptr) * factor
    x = tl.load(x_ptr + at[:, None] * x_n + columns[None, :], mask=there, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        x = x - bias[None, :]
        if block == 0:
            sums = tl.load(sums_ptr + columns, mask=inside, other=0.0)
            tl.store(dbias_ptr + columns, (-scale * sums).to(dbias_ptr.dtype.element_ty), mask=inside)
    x = x * scale
    if ADD:
        more = tl.load(more_ptr + at[:, None] * more_n + columns[None, :], mask=there, other=0.0)
        x += more.to(tl.float32)
    tl.store(out_ptr + at[:, None] * cols + columns[None, :], x.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def bias_kernel(
    factors_ptr, sums_ptr, grad_ptr, third, VALUES: tl.constexpr, LOGITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """−factor · sums, in the order of Q, K and V; zeros where there is no penalty. Grid: blocks of the bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.zeros((BLOCK,), tl.float32)
    if VALUES:
        of_values = tl.load(sums_ptr + at - 2 * third, mask=(at >= 2 * third) & (at < 3 * third), other=0.0)
        grad -= tl.load(factors_ptr) * of_values
    if LOGITS:
        begin = third if VALUES else 0
        of_logits = tl.load(sums_ptr + begin + at, mask=at < 2 * third, other=0.0)
        grad -= tl.load(factors_ptr + (1 if VALUES else 0)) * of_logits
    tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=at < 3 * third)
