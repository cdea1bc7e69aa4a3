"""Which operations make attention out of matrices, and the axes that their operands have."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


def is_attention_softmax(input: Any, dim: int | None = None, *_: Any, **__: Any) -> bool:
    """Whether a softmax is over the keys of 4-D logits."""
    return isinstance(input, Tensor) and input.dim() == 4 and dim in (-1, 3)


def are_four_axes(input: Any, other: Any, *_: Any, **__: Any) -> bool:
    """Whether both factors of a product have a batch and a head axis."""
    return bool(input.dim() == 4 and other.dim() == 4)


def three_axes(x: Tensor) -> Tensor:
    """(B, N, d) from what went into a projection: one token per sample, a sequence, or a feature map."""
    if x.dim() == 2:
        return x[:, None]
    return x.flatten(1, -2) if x.dim() > 3 else x


def four_axes(t: Tensor) -> Tensor:
    """(batch, heads, N, e) from fewer axes or more; leading ones beyond two go into the batch."""
    if t.dim() == 2:
        return t[None, None]
    return t[:, None] if t.dim() == 3 else t.flatten(0, -4)
