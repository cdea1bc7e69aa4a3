"""The kernels behind `passing.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def passed_kernel(
    x_ptr, bias_ptr, more_ptr, scale_ptr, out_ptr, sums_ptr, rows, cols, factor,
    BIAS: tl.constexpr, ADD: tl.constexpr, SUMS: tl.constexpr, PER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """scale · factor · (X − b), and what is added to it (ADD), rounded once. Grid: rows × columns, in blocks.

    SUMS: and the sums of the columns over PER rows, of what is added (1), or of the first, taken away (2).
    """
    block = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = columns < cols
    scale = tl.load(scale_ptr) * factor
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((BM, BN), tl.float32)
    for first in tl.range(0, PER, BM):
        at = block * PER + first + tl.arange(0, BM)
        there = (at < rows)[:, None] & inside[None, :]
        x = tl.load(x_ptr + at[:, None] * cols + columns[None, :], mask=there, other=0.0).to(tl.float32)
        if BIAS:
            x = x - bias[None, :]
        x = x * scale
        if SUMS == 2:
            sums -= tl.where(there, x, 0.0)
        if ADD:
            more = tl.load(more_ptr + at[:, None] * cols + columns[None, :], mask=there, other=0.0).to(tl.float32)
            x += more
            if SUMS == 1:
                sums += more
        tl.store(out_ptr + at[:, None] * cols + columns[None, :], x.to(out_ptr.dtype.element_ty), mask=there)
    if SUMS > 0:
        tl.store(sums_ptr + block * cols + columns, tl.sum(sums, 0), mask=inside)


@triton.jit
def column_sums(x_ptr, rows, cols, columns, there, BM: tl.constexpr, BN: tl.constexpr):
    """The sums of some columns of X (rows, cols) in float32. there: which of them to read."""
    total = tl.zeros((BM, BN), tl.float32)
    for first in tl.range(0, rows, BM):
        at = first + tl.arange(0, BM)
        total += tl.load(x_ptr + at[:, None] * cols + columns[None, :], mask=(at < rows)[:, None] & there, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def columns_kernel(x_ptr, out_ptr, rows, cols, BM: tl.constexpr, BN: tl.constexpr):
    """The sums of the columns of X. Grid: blocks of columns."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = columns < cols
    total = column_sums(x_ptr, rows, cols, columns, inside[None, :], BM, BN)
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def bias_kernel(
    factors_ptr, values_ptr, logits_ptr, grad_ptr, blocks, third, of_values, of_logits,
    VALUES: tl.constexpr, LOGITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """−factor · sums, in the order of Q, K and V; zeros where there is no penalty. Grid: blocks of the bias."""
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    grad = tl.zeros((BN,), tl.float32)
    if VALUES:
        there = (at >= 2 * third) & (at < 3 * third)
        rows = tl.where((tl.program_id(0) + 1) * BN > 2 * third, blocks, 0)
        total = column_sums(values_ptr, rows, third, at - 2 * third, there[None, :], BM, BN)
        grad -= tl.load(factors_ptr) * of_values * total
    if LOGITS:
        sums = tl.load(logits_ptr + at, mask=at < 2 * third, other=0.0)
        grad -= tl.load(factors_ptr + (1 if VALUES else 0)) * of_logits * sums
    tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=at < 3 * third)
