"""The kernels behind `logits.py` and `outputs.py`: squares for penalties, and their gradients.

‖QKᵀ‖² = ⟨QᵀQ, KᵀK⟩, so one program owns a head of a sample, reads Q and K once in tiles of BN tokens, and keeps their
(e, e) Gram matrices on chip. Logits are never made.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.common.groups import Rows


@triton.jit
def load_tokens(x, first, n, columns, bias, BIAS: tl.constexpr, E: tl.constexpr, BN: tl.constexpr):
    """A tile of tokens without their bias; zeros beyond the last one. The difference is rounded once."""
    tokens = first + tl.arange(0, BN)
    inside = (tokens < n)[:, None] & (columns < E)[None, :]
    tile = tl.load(x.ptr + tokens[:, None] * x.stride + columns[None, :], mask=inside, other=0.0)
    if BIAS:
        tile = tl.where(inside, tile.to(tl.float32) - bias[None, :], 0.0).to(tile.dtype)
    return tile


@triton.jit
def head_of(x, b, h, E: tl.constexpr):
    """`Rows` of a sample and head. x: a tensor (B, N, H · e), and its strides along samples and tokens."""
    ptr, stride_b, stride_n = x
    return Rows(ptr + (b * stride_b + h * E), stride_n)


@triton.jit
def load_bias(bias_ptr, h, columns, BIAS: tl.constexpr, E: tl.constexpr):
    """One head's bias in float32; zeros, which nobody reads, where there is none."""
    if BIAS:
        bias = tl.load(bias_ptr + h * E + columns, mask=columns < E, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros(columns.shape, tl.float32)
    return bias


@triton.jit
def gram_of(
    x, n, columns, bias,
    BIAS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """XᵀX of one head's `Rows`."""
    gram = tl.zeros((BE, BE), tl.float32)
    for first in tl.range(0, n, BN):
        tile = load_tokens(x, first, n, columns, bias, BIAS, E, BN)
        gram = tl.dot(tl.trans(tile), tile, gram, input_precision=PRECISION)
    return gram


@triton.jit
def forward_kernel(
    q, k,  # a tensor, its strides along samples and tokens
    biases,  # of Q and of K
    out_ptr,  # a number per head
    sizes,  # heads, queries, keys
    Q_BIAS: tl.constexpr, K_BIAS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """⟨QᵀQ, KᵀK⟩ = ‖QKᵀ‖². Grid: sample × head, heads fastest."""
    q_bias_ptr, k_bias_ptr = biases
    heads, nq, nk = sizes
    pid = tl.program_id(0)
    b = (pid // heads).to(tl.int64)
    h = pid % heads
    columns = tl.arange(0, BE)
    q_bias = load_bias(q_bias_ptr, h, columns, Q_BIAS, E)
    k_bias = load_bias(k_bias_ptr, h, columns, K_BIAS, E)
    of_q = gram_of(head_of(q, b, h, E), nq, columns, q_bias, Q_BIAS, E, BE, BN, PRECISION)
    of_k = gram_of(head_of(k, b, h, E), nk, columns, k_bias, K_BIAS, E, BE, BN, PRECISION)
    tl.store(out_ptr + pid, tl.sum(of_q * of_k))


@triton.jit
def grams_kernel(
    qk,  # Q and K, which lie side by side, and their strides along samples and tokens
    biases,  # of Q and of K
    results,  # squares, Gram matrices, sums, shifts
    sizes,  # heads, tokens
    BIAS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `forward_kernel` gives, and what backward would need of it: see `logits.squares_and_grams`.

    Grid: sample × head, heads fastest, from the last to the first: attention's forward pass came before, and what it
    read last is in the cache.
    """
    q_bias_ptr, k_bias_ptr = biases
    q_ptr, k_ptr, stride_b, stride_n = qk
    out_ptr, grams_ptr, sums_ptr, shifts_ptr = results
    heads, n = sizes
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (pid // heads).to(tl.int64)
    h = pid % heads
    columns = tl.arange(0, BE)
    q_rows = head_of((q_ptr, stride_b, stride_n), b, h, E)
    k_rows = head_of((k_ptr, stride_b, stride_n), b, h, E)
    of_q = tl.zeros((BE, BE), tl.float32)
    of_k = tl.zeros((BE, BE), tl.float32)
    sum_q = tl.zeros((BE, 16), tl.float32)  # a product with ones: tiles need not pass through registers
    sum_k = tl.zeros((BE, 16), tl.float32)
    ones = tl.full((BN, 16), 1.0, q_rows.ptr.dtype.element_ty)
    for start in tl.range(0, n, BN):
        q_tile = load_tokens(q_rows, start, n, columns, 0, False, E, BN)
        k_tile = load_tokens(k_rows, start, n, columns, 0, False, E, BN)
        of_q = tl.dot(tl.trans(q_tile), q_tile, of_q, input_precision=PRECISION)
        of_k = tl.dot(tl.trans(k_tile), k_tile, of_k, input_precision=PRECISION)
        sum_q = tl.dot(tl.trans(q_tile), ones, sum_q, input_precision=PRECISION)
        sum_k = tl.dot(tl.trans(k_tile), ones, sum_k, input_precision=PRECISION)
    sum_q = tl.sum(sum_q, 1) / 16
    sum_k = tl.sum(sum_k, 1) / 16
    q_bias = load_bias(q_bias_ptr, h, columns, BIAS, E)
    k_bias = load_bias(k_bias_ptr, h, columns, BIAS, E)
    if BIAS:
        of_q, sum_q = biased_away(of_q, sum_q, q_bias, n)
        of_k, sum_k = biased_away(of_k, sum_k, k_bias, n)
    tl.store(out_ptr + pid, tl.sum(of_q * of_k))
    at = grams_ptr + pid.to(tl.int64) * 2 * E * E + columns[:, None] * E + columns[None, :]
    inside = (columns < E)[:, None] & (columns < E)[None, :]
    # From here on as backward will see them: what it multiplies and what it subtracts then cancel, however large b is.
    of_k = of_k.to(at.dtype.element_ty)
    of_q = of_q.to(at.dtype.element_ty)
    tl.store(at, of_k, mask=inside)
    tl.store(at + E * E, of_q, mask=inside)
    first = (2 * b * heads + h) * E + columns
    second = first + heads * E
    tl.store(sums_ptr + first, tl.sum(of_k.to(tl.float32) * sum_q[:, None], 0), mask=columns < E)
    tl.store(sums_ptr + second, tl.sum(of_q.to(tl.float32) * sum_k[:, None], 0), mask=columns < E)
    if BIAS:
        tl.store(shifts_ptr + first, tl.sum(of_k.to(tl.float32) * q_bias[:, None], 0), mask=columns < E)
        tl.store(shifts_ptr + second, tl.sum(of_q.to(tl.float32) * k_bias[:, None], 0), mask=columns < E)


@triton.jit
def biased_away(gram, total, bias, n):
    """XᵀX and the sum of tokens of X − b, from those of X, in float32."""
    cross = total[:, None] * bias[None, :] + bias[:, None] * total[None, :]
    return gram - cross + n * bias[:, None] * bias[None, :], total - n * bias


@triton.jit
def gradient_of(
    x, nx, x_bias_ptr,  # `Rows` of this side, how many there are, its bias
    o, no, o_bias_ptr,  # those of the other side
    dx, sums_ptr, scale, h,
    X_BIAS: tl.constexpr, O_BIAS: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, E: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX = scale · X · OᵀO of one side; SUMS: and the sums of its columns, which a bias needs.

    SCALED: divide OᵀO by its largest element before it is rounded, as float16 ends at 65504.
    """
    columns = tl.arange(0, BE)
    o_bias = load_bias(o_bias_ptr, h, columns, O_BIAS, E)
    gram = gram_of(o, no, columns, o_bias, O_BIAS, E, BE, BN, PRECISION)
    if SCALED:
        unit = tl.maximum(tl.max(tl.abs(gram)), 1e-30)
        gram = gram / unit
        scale = scale * unit
    factor = gram.to(x.ptr.dtype.element_ty)
    x_bias = load_bias(x_bias_ptr, h, columns, X_BIAS, E)
    sums = tl.zeros((BE,), tl.float32)
    for first in tl.range(0, nx, BN):
        x_tile = load_tokens(x, first, nx, columns, x_bias, X_BIAS, E, BN)
        dx_tile = tl.dot(x_tile, factor, input_precision=PRECISION) * scale
        if SUMS:
            sums += tl.sum(dx_tile, 0)
        tokens = first + tl.arange(0, BN)
        inside = (tokens < nx)[:, None] & (columns < E)[None, :]
        at = dx.ptr + tokens[:, None] * dx.stride + columns[None, :]
        tl.store(at, dx_tile.to(dx.ptr.dtype.element_ty), mask=inside)
    if SUMS:
        tl.store(sums_ptr + columns, sums, mask=columns < E)


@triton.jit
def backward_kernel(
    grad,  # of the squares, strides along samples and heads
    q, k, dq, dk,  # a tensor, its strides along samples and tokens
    biases,  # of Q and of K
    sums_ptr,  # (B, 2, H · e), for the sums of columns of dQ and dK
    sizes,  # heads, queries, keys
    Q_BIAS: tl.constexpr, K_BIAS: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, E: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ = 2g · Q · KᵀK and dK = 2g · K · QᵀQ. One program owns one of both, of one head.

    Grams are made again: to keep them would take memory in every layer until its backward pass.
    Grid: sample × head × side, sides fastest: they read the same.
    """
    grad_ptr, grad_b, grad_h = grad
    q_bias_ptr, k_bias_ptr = biases
    heads, nq, nk = sizes
    pid = tl.program_id(0) // 2
    b = (pid // heads).to(tl.int64)
    h = pid % heads
    q_rows = head_of(q, b, h, E)
    k_rows = head_of(k, b, h, E)
    sums_ptr += (2 * b * heads + h) * E
    scale = 2.0 * tl.load(grad_ptr + b * grad_b + h * grad_h)
    if tl.program_id(0) % 2 == 0:
        gradient_of(
            q_rows, nq, q_bias_ptr, k_rows, nk, k_bias_ptr, head_of(dq, b, h, E), sums_ptr, scale, h,
            Q_BIAS, K_BIAS, SUMS, SCALED, E, BE, BN, PRECISION,
        )  # fmt: skip
    else:
        gradient_of(
            k_rows, nk, k_bias_ptr, q_rows, nq, q_bias_ptr, head_of(dk, b, h, E), sums_ptr + heads * E, scale, h,
            K_BIAS, Q_BIAS, SUMS, SCALED, E, BE, BN, PRECISION,
        )  # fmt: skip


@triton.jit
def square_kernel(
    x_ptr, bias_ptr, sums_ptr, squares_ptr, x_n, rows, cols, factor,
    BIAS: tl.constexpr, SUMS: tl.constexpr, PER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """factor · ‖X − b‖² of PER rows; SUMS: and the sums of the columns of X − b. Grid: rows × columns, in blocks.

    From the last block to the first, as in `grams_kernel`.
    """
    block = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = columns < cols
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM, BN), tl.float32)
    for first in tl.range(0, PER, BM):
        at = block * PER + first + tl.arange(0, BM)
        there = (at < rows)[:, None] & inside[None, :]
        x = tl.load(x_ptr + at[:, None] * x_n + columns[None, :], mask=there, other=0.0).to(tl.float32)
        if BIAS:
            x = tl.where(there, x - bias[None, :], 0.0)
        if SUMS:
            sums += x
        squares += x * x
    if SUMS:
        tl.store(sums_ptr + block * cols + columns, tl.sum(sums, 0), mask=inside)
    tl.store(squares_ptr + block * tl.num_programs(1) + tl.program_id(1), tl.sum(squares) * factor)


@triton.jit
def totals_kernel(
    sums_ptr, squares_ptr, total_ptr, square_ptr, rows, cols, count, factor,
    BM: tl.constexpr, BN: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """The sums of the columns of `sums`, and factor times that of all of `squares`.

    Grid: blocks of columns, and one for the squares.
    """
    block = tl.program_id(0)
    if block < tl.num_programs(0) - 1:
        columns = block * BN + tl.arange(0, BN)
        total = tl.zeros((BM, BN), tl.float32)
        for first in tl.range(0, rows, BM):
            at = first + tl.arange(0, BM)
            there = (at < rows)[:, None] & (columns < cols)[None, :]
            total += tl.load(sums_ptr + at[:, None] * cols + columns[None, :], mask=there, other=0.0)
        tl.store(total_ptr + columns, tl.sum(total, 0), mask=columns < cols)
    else:
        square = tl.zeros((LONG,), tl.float32)
        for first in tl.range(0, count, LONG):
            at = first + tl.arange(0, LONG)
            square += tl.load(squares_ptr + at, mask=at < count, other=0.0)
        tl.store(square_ptr, tl.sum(square) * factor)


@triton.jit
def difference_kernel(
    x_ptr, bias_ptr, scale_ptr, out_ptr, x_n, rows, cols, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """scale · (X − b), rounded once. Grid: rows × columns, in blocks."""
    at = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = columns < cols
    there = (at < rows)[:, None] & inside[None, :]
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at[:, None] * x_n + columns[None, :], mask=there, other=0.0).to(tl.float32)
    x = (x - bias[None, :]) * tl.load(scale_ptr)
    tl.store(out_ptr + at[:, None] * cols + columns[None, :], x.to(out_ptr.dtype.element_ty), mask=there)
