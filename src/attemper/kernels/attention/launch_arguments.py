"""Masks, tables and penalties as launches of attention's kernels pass them, in groups (see `common/groups.py`)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def _broadcast_strides(t: Tensor) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))


def mask_arguments(mask: Tensor | None, tops: Tensor | None, like: Tensor) -> tuple[tuple[Any, ...], str]:
    """A mask as kernels take it, and its kind (`groups.Options`). like: what to point at where there is none.

    It comes as its elements, four strides (0 along axes that it is the same for), and in the same way its row tops.
    """
    if mask is None:
        return (like, 0, 0, 0, 0, like, 0, 0, 0), "none"
    elements, kind = mask, "bias"
    strides = _broadcast_strides(mask)
    if mask.dtype == torch.uint8:
        kind = "last"
    elif mask.dtype == torch.bool:
        elements, kind = mask.view(torch.uint8), "full" if strides[2] else "keys"
    if tops is None:
        return (elements, *strides, like, 0, 0, 0), kind
    return (elements, *strides, tops, *_broadcast_strides(tops)), kind


def table_arguments(
    table: Tensor | None, hard: Tensor | None, cuts: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What kernels read of `groups.Tables`. like: what to point at where there is none."""
    return like if table is None else table, like if hard is None else hard, like if cuts is None else cuts


@dataclass(frozen=True)
class PenaltyGradients:
    """What penalties add to the gradients of Q, K and V, where they have the same heads (see `penalty_gradients.py`).

    factors: float32, one for each penalty, that on V first.
    scales: what they are multiplied with, that on V first, then that on logits.
    bias: (3 · H · e), of Q, K and V; None: they have none.
    grams: (B, H, 2, e, e), KᵀK and QᵀQ of every head without biases, in the dtype of Q; None: logits have no penalty.
    shifts: (B, 2 · H · e) float32, b_q·KᵀK and b_k·QᵀQ; read where there are Gram matrices and a bias.
    values: whether V has one.
    """

    factors: Tensor
    bias: Tensor | None
    grams: Tensor | None
    shifts: Tensor
    values: bool
    scales: tuple[float, float] = (1.0, 1.0)


def penalty_gradient_arguments(given: PenaltyGradients | None, like: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Penalty gradients as kernels take them: four tensors, two numbers; and constants.

    like: what to point at without any.
    """
    if given is None:
        return (like, like, like, like, 1.0, 1.0), {"PENALTY": "none", "BIAS": False}
    logits = given.grams is not None
    kind = "both" if logits and given.values else "logits" if logits else "values"
    bias, grams = (like if t is None else t for t in (given.bias, given.grams))
    return (given.factors, bias, grams, given.shifts, *given.scales), {"PENALTY": kind, "BIAS": given.bias is not None}
