"""What penalties on Q, K and V add to their gradients, where attention's own are about to be written.

The penalty ‖V − b‖² adds a factor times V − b to dV. The penalty ‖(Q − b)(K − b)ᵀ‖² on the logits adds a factor times
(Q − b)·KᵀK to dQ, and likewise to dK, with Gram matrices that were made in forward. To add either in a pass of its own
would mean to read and write the gradients of Q, K and V once more.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def penalties_of_head(factors_ptr, bias_ptr, grams_ptr, shifts_ptr, b, h, heads, E: tl.constexpr):
    """A tuple for the functions below: factors; the bias of V, Gram matrices and shifts of a head; their distance."""
    grams_ptr += (b * heads + h) * 2 * E * E
    return factors_ptr, bias_ptr + (2 * heads + h) * E, grams_ptr, shifts_ptr + (2 * b * heads + h) * E, heads * E


@triton.jit
def add_value_penalty(
    dv, v_ptr, keys, v_n, nk, penalties, EV: tl.constexpr, BEV: tl.constexpr, PENALTY: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """dV of a tile with what a penalty on V adds. V is read again: to keep it for so long would take registers.

    PENALTY: on what there is one, "none", "values", "logits" or "both".
    BIAS: the projection has one, which is not penalised.
    """
    if PENALTY == "values" or PENALTY == "both":
        columns = tl.arange(0, BEV)
        inside = (keys[:, None] < nk) & (columns[None, :] < EV)
        # That the tile may leave the cache now also tells the compiler that it is not the load from before.
        at = v_ptr + keys[:, None] * v_n + columns[None, :]
        v = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if BIAS:
            v -= tl.load(penalties[1] + columns, mask=columns < EV, other=0.0).to(tl.float32)[None, :]
        dv += tl.load(penalties[0]) * v
    return dv


@triton.jit
def add_logit_penalty(
    grad, x, penalties, SIDE: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
    PENALTY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dQ (SIDE 0) or dK (1) of a tile with what a penalty on the logits adds. x: the tile of Q or K, bias and all."""
    if PENALTY == "logits" or PENALTY == "both":
        columns = tl.arange(0, BE)
        at = penalties[2] + SIDE * E * E + columns[:, None] * E + columns[None, :]
        gram = tl.load(at, mask=(columns[:, None] < E) & (columns[None, :] < E), other=0.0)
        product = tl.dot(x, gram, input_precision=PRECISION)
        if BIAS:
            product -= tl.load(penalties[3] + SIDE * penalties[4] + columns, mask=columns < E, other=0.0)[None, :]
        grad += tl.load(penalties[0] + (PENALTY == "both")) * product
    return grad
