"""What penalties on Q, K and V add to their gradients, where attention's own are about to be written.

The penalty ‖V − b‖² adds a factor times V − b to dV. The penalty ‖(Q − b)(K − b)ᵀ‖² on the logits adds a factor times
(Q − b)·KᵀK to dQ, and likewise to dK, with Gram matrices that were made in forward. To add either in a pass of its own
would mean to read and write the gradients of Q, K and V once more.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Penalties(NamedTuple):
    """Penalties on one sample and head.

    factors_ptr: a factor for each penalty, that on V first. bias_ptr: the bias of V. grams_ptr: KᵀK, then QᵀQ.
    shifts_ptr, stride: b_q·KᵀK, and `stride` further b_k·QᵀQ.
    of_values, of_logits: what the factors are multiplied with.
    """

    factors_ptr: Any
    bias_ptr: Any
    grams_ptr: Any
    shifts_ptr: Any
    stride: Any
    of_values: Any
    of_logits: Any


@triton.jit
def penalties_of(penalties, b, h, heads, E: tl.constexpr):
    """`Penalties` of a sample and head. penalties: factors, biases, Gram matrices and shifts of all, two numbers."""
    factors_ptr, bias_ptr, grams_ptr, shifts_ptr, of_values, of_logits = penalties
    grams_ptr += (b * heads + h) * 2 * E * E
    bias_ptr += (2 * heads + h) * E
    shifts_ptr += (2 * b * heads + h) * E
    return Penalties(factors_ptr, bias_ptr, grams_ptr, shifts_ptr, heads * E, of_values, of_logits)


@triton.jit
def add_value_penalty(dv, v, keys, nk, penalties, options, PENALTY: tl.constexpr, BIAS: tl.constexpr):
    """dV of a tile with what a penalty on V adds. V is read again: to keep it for so long would take registers.

    v: the `Rows` of V. PENALTY: on what there is one, "none", "values", "logits" or "both".
    BIAS: the projection has one, which is not penalised.
    """
    if PENALTY == "values" or PENALTY == "both":
        columns = tl.arange(0, options.BEV)
        inside = (keys[:, None] < nk) & (columns[None, :] < options.EV)
        # That the tile may leave the cache now also tells the compiler that it is not the load from before.
        at = v.ptr + keys[:, None] * v.stride + columns[None, :]
        tile = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if BIAS:
            tile -= tl.load(penalties.bias_ptr + columns, mask=columns < options.EV, other=0.0).to(tl.float32)[None, :]
        dv += tl.load(penalties.factors_ptr) * penalties.of_values * tile
    return dv


@triton.jit
def add_logit_penalty(grad, x, penalties, options, SIDE: tl.constexpr, PENALTY: tl.constexpr, BIAS: tl.constexpr):
    """dQ (SIDE 0) or dK (1) of a tile with what a penalty on the logits adds. x: the tile of Q or K, bias and all."""
    if PENALTY == "logits" or PENALTY == "both":
        columns = tl.arange(0, options.BE)
        at = penalties.grams_ptr + SIDE * options.E * options.E + columns[:, None] * options.E + columns[None, :]
        gram = tl.load(at, mask=(columns[:, None] < options.E) & (columns[None, :] < options.E), other=0.0)
        product = tl.dot(x, gram, input_precision=options.PRECISION)
        if BIAS:
            shifts_ptr = penalties.shifts_ptr + SIDE * penalties.stride
            product -= tl.load(shifts_ptr + columns, mask=columns < options.E, other=0.0)[None, :]
        grad += tl.load(penalties.factors_ptr + (PENALTY == "both")) * penalties.of_logits * product
    return grad
