"""Softmax of given logits with everything that methods do to it, in one kernel each way.

For models that write attention out: they have the logits in memory anyway, with all masks in, and keep the weights.
What torch would do in a dozen passes over them is one here. Triton is imported when a kernel first runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attemper.kernels.common.devices import DTYPES, runs_on
from attemper.kernels.softmax.operators import perturbed_softmax
from attemper.ops.perturbation import Perturbation

__all__ = ["gives", "perturbed_softmax", "serves"]

WIDEST = 8192
"""Keys of a row, which one program holds."""
MOST = 32
"""The largest logits of a row are found one by one."""


def gives(dtype: torch.dtype) -> bool:
    """Whether they can give weights in a dtype."""
    return dtype in DTYPES


def serves(logits: Tensor, methods: Sequence[Perturbation]) -> bool:
    """Whether the kernels can take such logits, (B, H, Nq, Nk), and methods; the reference takes all others.

    Of methods that drop by words of the stream, and of those that drop the largest logits, they take one each; and
    weights are dropped last.
    """
    keys = logits.shape[3]
    if logits.dtype not in DTYPES or logits.numel() == 0 or keys > WIDEST or not runs_on(logits):
        return False
    drops, largest, behind = 0, 0, False
    for method in sorted(methods, key=lambda method: method.order):
        if set(method.stages) <= {"keys", "heads"}:
            continue
        if (drop := method.word_drop) is not None:
            drops += 1
            behind = drop.what != "keys"
        elif (hit := method.largest_drop(keys)) is not None and hit.count <= MOST and not behind:
            largest += 1
        else:
            return False
    return drops <= 1 and largest <= 1 and drops + largest > 0
