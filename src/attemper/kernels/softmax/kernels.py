"""Softmax with keys, weights and the largest logits dropped: whole rows on chip, forward and backward.

A program owns some rows of all samples, heads and queries, and has all of their keys in registers. Nothing is stored
but what backward cannot find out again: the weights as softmax gave them, where some are dropped behind it, and two
numbers of each row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.common.stream import table_row_words
from attemper.kernels.common.tiles import LOG2E, OUT_OF_REACH, behind, by_key, detached, share_kept

SPARED = tl.constexpr(-1.0)  # in place of a share: the row is left as it is


@triton.jit
def row_count(shape):
    """Rows of all samples and heads. A batch of 1 is a compile-time constant, which has no method `to`."""
    batch, heads, nq, _ = shape
    return tl.cast(batch, tl.int64) * heads * nq


@triton.jit
def places(pid, shape, ROWS: tl.constexpr, BN: tl.constexpr):
    """Sample, head and query of a program's rows, its keys, and which of (rows, keys) are there."""
    _, heads, nq, nk = shape
    rows = pid.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    keys = tl.arange(0, BN)
    inside = (rows < row_count(shape))[:, None] & (keys[None, :] < nk)
    head = rows // nq
    return rows, head // heads, head % heads, rows % nq, keys, inside


@triton.jit
def elements(x, b, h, queries, keys):
    """Where (rows, keys) of a tensor are; keys lie side by side. x: it, and its strides along the other axes."""
    ptr, stride_b, stride_h, stride_q = x
    return ptr + (b * stride_b + h * stride_h + queries * stride_q)[:, None] + keys[None, :]


@triton.jit
def kept_by(table, b, h, queries, keys, nk):
    """Boolean (rows, keys): what the stream of a table keeps."""
    words = table_row_words(table, nk, b, h, queries)
    columns = tl.load(table + keys, mask=keys < nk, other=1)
    return words[:, None] * columns[None, :] >= tl.load(table + nk + 1)


@triton.jit
def lowest_of_largest(x, allowed, k_largest, ROWS: tl.constexpr):
    """The k-th largest allowed logit of every row; the least, where there are fewer; +inf where there is none."""
    rest = tl.where(allowed, x, -float("inf"))
    low = tl.full((ROWS,), float("inf"), tl.float32)
    found = tl.zeros((ROWS,), tl.int32)
    for _ in range(k_largest):
        best = tl.max(rest, 1)
        more = (found < k_largest) & (best > -float("inf"))
        same = rest == best[:, None]
        low = tl.where(more, best, low)
        found += tl.where(more, tl.sum(same.to(tl.int32), 1), 0)
        rest = tl.where(same, -float("inf"), rest)
    return low


@triton.jit
def without(x, allowed, keep):
    """Logits and what is allowed without the keys that are not kept, but for rows that would lose all allowed ones."""
    lost = tl.sum((allowed & keep).to(tl.int32), 1) == 0
    keep = keep | lost[:, None]
    return tl.where(keep, x, -float("inf")), allowed & keep


@triton.jit
def forward_kernel(
    logits, weights,  # a tensor, its strides along samples, heads and queries
    before_ptr,  # weights as softmax gave them, where some are dropped behind it
    rows_ptr,  # of each row, what is left of its weights, and above what its largest logits lie
    drop_ptr, hard_ptr,  # tables of what is dropped, and of hard masking
    shape,  # samples, heads, queries, keys
    k_largest,
    ROWS: tl.constexpr, BN: tl.constexpr, DROP: tl.constexpr, FIRST: tl.constexpr, HARD: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """One program owns ROWS rows. FIRST: keys are dropped before hard masking. SHARED: all heads mask alike."""
    nk = shape[3]
    rows, b, h, queries, keys, inside = places(tl.program_id(0), shape, ROWS, BN)
    x = tl.load(elements(logits, b, h, queries, keys), mask=inside, other=-float("inf")).to(tl.float32)
    allowed = (x > (tl.max(x, 1) - OUT_OF_REACH)[:, None]) & (x > -float("inf"))
    keep = allowed
    if DROP > 0:
        keep = kept_by(drop_ptr, b, h, queries * 0 if by_key(DROP) else queries, keys, nk)
    if DROP > 0 and not behind(DROP) and FIRST:
        x, allowed = without(x, allowed, keep)
    low = tl.zeros((ROWS,), tl.float32)
    if HARD != "none":
        low = lowest_of_largest(x, allowed, k_largest, ROWS)
        hit = allowed & (x >= low[:, None]) & ~kept_by(hard_ptr, b, h * 0 if SHARED else h, queries, keys, nk)
        if HARD == "zero":
            x = tl.where(hit, 0.0, x)
        else:
            x, allowed = without(x, allowed, ~hit)
    if DROP > 0 and not behind(DROP) and not FIRST:
        x, allowed = without(x, allowed, keep)

    top = tl.max(x, 1)
    p = tl.exp2((x - tl.where(top == -float("inf"), 0.0, top)[:, None]) * LOG2E)
    total = tl.sum(p, 1)
    p = p / tl.where(total == 0.0, 1.0, total)[:, None]
    share = tl.full((ROWS,), 1.0, tl.float32)
    if behind(DROP):
        tl.store(before_ptr + rows[:, None] * nk + keys[None, :], p.to(before_ptr.dtype.element_ty), mask=inside)
        lost = tl.sum((allowed & keep).to(tl.int32), 1) == 0
        dropped = tl.where(keep, p, 0.0)
        if detached(DROP):
            share = tl.sum(dropped, 1)
            lost = lost | (share == 0.0)
        else:
            share = share * share_kept(tl.load(drop_ptr + nk + 1))
        p = tl.where(lost[:, None], p, dropped / tl.where(lost, 1.0, share)[:, None])
        share = tl.where(lost, SPARED, share)
    tl.store(elements(weights, b, h, queries, keys), p.to(weights[0].dtype.element_ty), mask=inside)
    if behind(DROP) or HARD == "zero":
        there = rows < row_count(shape)
        tl.store(rows_ptr + 2 * rows, share, mask=there)
        tl.store(rows_ptr + 2 * rows + 1, low, mask=there)


@triton.jit
def backward_kernel(
    dout, dlogits, weights, logits,  # a tensor, its strides along samples, heads and queries
    before_ptr, rows_ptr, drop_ptr, hard_ptr, shape,  # as above
    ROWS: tl.constexpr, BN: tl.constexpr, DROP: tl.constexpr, HARD: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The gradient of logits; one program owns ROWS rows. Logits are read where hard masking set some to zero."""
    nk = shape[3]
    rows, b, h, queries, keys, inside = places(tl.program_id(0), shape, ROWS, BN)
    dp = tl.load(elements(dout, b, h, queries, keys), mask=inside, other=0.0).to(tl.float32)
    if behind(DROP):
        p = tl.load(before_ptr + rows[:, None] * nk + keys[None, :], mask=inside, other=0.0).to(tl.float32)
        share = tl.load(rows_ptr + 2 * rows, mask=rows < row_count(shape), other=1.0)
        lost = share == SPARED
        keep = kept_by(drop_ptr, b, h, queries * 0 if by_key(DROP) else queries, keys, nk)
        dp = tl.where(keep | lost[:, None], dp, 0.0) / tl.where(lost, 1.0, share)[:, None]
    else:
        p = tl.load(elements(weights, b, h, queries, keys), mask=inside, other=0.0).to(tl.float32)
    ds = p * (dp - tl.sum(p * dp, 1)[:, None])
    if HARD == "zero":
        x = tl.load(elements(logits, b, h, queries, keys), mask=inside, other=-float("inf")).to(tl.float32)
        low = tl.load(rows_ptr + 2 * rows + 1, mask=rows < row_count(shape), other=0.0)
        hit = (x >= low[:, None]) & ~kept_by(hard_ptr, b, h * 0 if SHARED else h, queries, keys, nk)
        ds = tl.where(hit, 0.0, ds)  # a constant stands there
    tl.store(elements(dlogits, b, h, queries, keys), ds.to(dlogits[0].dtype.element_ty), mask=inside)
