"""The kernels behind `logits.py` and `outputs.py`. Of logits, one program has one head of one sample."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tokens(x_ptr, x_n, first, n, columns, bias, BIAS: tl.constexpr, E: tl.constexpr, BN: tl.constexpr):
    """A tile of tokens without their bias; zeros beyond the last one. The difference is rounded once."""
    tokens = first + tl.arange(0, BN)
    inside = (tokens < n)[:, None] & (columns < E)[None, :]
    x = tl.load(x_ptr + tokens[:, None] * x_n + columns[None, :], mask=inside, other=0.0)
    if BIAS:
        x = tl.where(inside, x.to(tl.float32) - bias[None, :], 0.0).to(x.dtype)
    return x


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
    x_ptr, x_n, n, columns, bias,
    BIAS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """XᵀX of one head."""
    gram = tl.zeros((BE, BE), tl.float32)
    for first in tl.range(0, n, BN):
        x = load_tokens(x_ptr, x_n, first, n, columns, bias, BIAS, E, BN)
        gram = tl.dot(tl.trans(x), x, gram, input_precision=PRECISION)
    return gram


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, q_bias_ptr, k_bias_ptr, out_ptr, q_b, q_n, k_b, k_n, heads, nq, nk,
    Q_BIAS: tl.constexpr, K_BIAS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """⟨QᵀQ, KᵀK⟩ = ‖QKᵀ‖². Grid: sample × head, heads fastest."""
    pid = tl.program_id(0)
    b = (pid // heads).to(tl.int64)
    h = pid % heads
    columns = tl.arange(0, BE)
    q_bias = load_bias(q_bias_ptr, h, columns, Q_BIAS, E)
    k_bias = load_bias(k_bias_ptr, h, columns, K_BIAS, E)
    of_q = gram_of(q_ptr + b * q_b + h * E, q_n, nq, columns, q_bias, Q_BIAS, E, BE, BN, PRECISION)
    of_k = gram_of(k_ptr + b * k_b + h * E, k_n, nk, columns, k_bias, K_BIAS, E, BE, BN, PRECISION)
    tl.store(out_ptr + pid, tl.sum(of_q * of_k))


@triton.jit
def grams_kernel(
    q_ptr, k_ptr, q_bias_ptr, k_bias_ptr, out_ptr, grams_ptr, sums_ptr, shifts_ptr, x_b, x_n, heads, n,
    BIAS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `forward_kernel` gives, and what backward would need of it: see `logits.squares_and_grams`.

    Q and K lie side by side. Grid: sample × head, heads fastest, from the last to the first: attention's forward pass
    came before, and what it read last is in the cache.
    """
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (pid // heads).to(tl.int64)
    h = pid % heads
    columns = tl.arange(0, BE)
    q_ptr += b * x_b + h * E
    k_ptr += b * x_b + h * E
    of_q = tl.zeros((BE, BE), tl.float32)
    of_k = tl.zeros((BE, BE), tl.float32)
    sum_q = tl.zeros((BE, 16), tl.float32)  # a product with ones: tiles need not pass through registers
    sum_k = tl.zeros((BE, 16), tl.float32)
    ones = tl.full((BN, 16), 1.0, q_ptr.dtype.element_ty)
    for start in tl.range(0, n, BN):
        q = load_tokens(q_ptr, x_n, start, n, columns, 0, False, E, BN)
        k = load_tokens(k_ptr, x_n, start, n, columns, 0, False, E, BN)
        of_q = tl.dot(tl.trans(q), q, of_q, input_precision=PRECISION)
        of_k = tl.dot(tl.trans(k), k, of_k, input_precision=PRECISION)
        sum_q = tl.dot(tl.trans(q), ones, sum_q, input_precision=PRECISION)
        sum_k = tl.dot(tl.trans(k), ones, sum_k, input_precision=PRECISION)
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
    x_ptr, x_bias_ptr, o_ptr, o_bias_ptr, dx_ptr, sums_ptr, x_n, o_n, dx_n, scale, h, nx, no,
    X_BIAS: tl.constexpr, O_BIAS: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, E: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX = scale · X · OᵀO of one side; SUMS: and the sums of its columns, which a bias needs.

    SCALED: divide OᵀO by its largest element before it is rounded, as float16 ends at 65504.
    """
    columns = tl.arange(0, BE)
    o_bias = load_bias(o_bias_ptr, h, columns, O_BIAS, E)
    gram = gram_of(o_ptr, o_n, no, columns, o_bias, O_BIAS, E, BE, BN, PRECISION)
    if SCALED:
        unit = tl.maximum(tl.max(tl.abs(gram)), 1e-30)
        gram = gram / unit
        scale = scale * unit
    factor = gram.to(x_ptr.dtype.element_ty)
    x_bias = load_bias(x_bias_ptr, h, columns, X_BIAS, E)
    sums = tl.zeros((BE,), tl.float32)
    for first in tl.range(0, nx, BN):
        x = load_tokens(x_ptr, x_n, first, nx, columns, x_bias, X_BIAS, E, BN)
        dx = tl.dot(x, factor, input_precision=PRECISION) * scale
        if SUMS:
            sums += tl.sum(dx, 0)
        tokens = first + tl.arange(0, BN)
        inside = (tokens < nx)[:, None] & (columns < E)[None, :]
        tl.store(dx_ptr + tokens[:, None] * dx_n + columns[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if SUMS:
        tl.store(sums_ptr + columns, sums, mask=columns < E)


@triton.jit
def backward_kernel(
    grad_ptr, q_ptr, k_ptr, q_bias_ptr, k_bias_ptr, dq_ptr, dk_ptr, sums_ptr,
    grad_b, grad_h, q_b, q_n, k_b, k_n, dq_b, dq_n, dk_b, dk_n, heads, nq, nk,
    Q_BIAS: tl.constexpr, K_BIAS: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, E: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ = 2g · Q · KᵀK and dK = 2g · K · QᵀQ. Grid: sample × head × side, sides fastest: they read the same.

    Grams are made again: to keep them would take memory in every layer until its backward pass.
    """
    pid = tl.program_id(0) // 2
    b = (pid // heads).to(tl.int64)
    h = pid % heads
    q_ptr += b * q_b + h * E
    k_ptr += b * k_b + h * E
    sums_ptr += (2 * b * heads + h) * E
    scale = 2.0 * tl.load(grad_ptr + b * grad_b + h * grad_h)
    if tl.program_id(0) % 2 == 0:
        gradient_of(
            q_ptr, q_bias_ptr, k_ptr, k_bias_ptr, dq_ptr + b * dq_b + h * E, sums_ptr, q_n, k_n, dq_n, scale, h, nq, nk,
            Q_BIAS, K_BIAS, SUMS, SCALED, E, BE, BN, PRECISION,
        )  # fmt: skip
    else:
        gradient_of(
            k_ptr, k_bias_ptr, q_ptr, q_bias_ptr, dk_ptr + b * dk_b + h * E, sums_ptr + heads * E, k_n, q_n, dk_n,
            scale, h, nk, nq, K_BIAS, Q_BIAS, SUMS, SCALED, E, BE, BN, PRECISION,
        )  # fmt: skip


@triton.jit
def square_kernel(
    x_ptr, bias_ptr, sums_ptr, squares_ptr, x_n, rows, cols,
    BIAS: tl.constexpr, PER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The sums of the columns of X − b over PER rows, and of all their squares. Grid: rows × columns, in blocks.

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
        sums += x
        squares += x * x
    tl.store(sums_ptr + block * cols + columns, tl.sum(sums, 0), mask=inside)
    tl.store(squares_ptr + block * tl.num_programs(1) + tl.program_id(1), tl.sum(squares))


@triton.jit
def totals_kernel(
    sums_ptr, squares_ptr, total_ptr, square_ptr, rows, cols, count,
    BM: tl.constexpr, BN: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """The sums of the columns of `sums`, and of all of `squares`. Grid: blocks of columns, and one for the squares."""
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
        tl.store(square_ptr, tl.sum(square))


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
