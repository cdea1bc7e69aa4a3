"""Softmax of logits that a model made itself, with what methods do to it: by one kernel, or by the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attemper.ops import fused
from attemper.ops.perturbation import Perturbation, draw
from attemper.ops.reference import perturbed_softmax
from attemper.ops.stream import Source


def softmax_with(
    logits: Tensor, methods: Sequence[Perturbation], source: Source | None, dtype: torch.dtype, plainly: bool = False
) -> Tensor:
    """Weights in this dtype of logits (B, H, Nq, Nk) that hold their masks already.

    plainly: by the reference, whatever kernels could do.
    """
    if not plainly and fused.softmax.serves(logits, methods) and fused.softmax.gives(dtype):
        return fused.softmax.perturbed_softmax(logits, draw(methods, source, logits), dtype)
    work = logits.to(torch.promote_types(dtype, torch.float32))
    return perturbed_softmax(work, methods, source).to(dtype)
