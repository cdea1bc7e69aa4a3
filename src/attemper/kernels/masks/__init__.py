"""Masks of the random stream, single numbers of it, and what it drops of tokens and branches, in one kernel each.

With torch they take some hundreds of small operations, most of them launches, for which a training loop at a small
batch waits longer than for the whole branch that is dropped. Triton is imported when a kernel first runs.
"""

from torch import Tensor

from attemper.kernels.common.devices import runs_on
from attemper.kernels.common.eager import is_plain
from attemper.kernels.masks.dropped import (
    BranchDrop,
    TokenDrop,
    adds,
    dropped_branch,
    dropped_sum,
    dropped_tokens,
    drops,
)
from attemper.kernels.masks.launches import keep, uniform

__all__ = [
    "BranchDrop", "TokenDrop", "adds", "dropped_branch", "dropped_sum", "dropped_tokens", "drops", "keep", "serves",
    "uniform",
]  # fmt: skip


def serves(seed: Tensor) -> bool:
    """Whether masks of this seed can be made by kernels: nobody watches, whom a direct launch would escape.

    Compilers are left alone, since they make one kernel of all those operations by themselves.
    """
    return seed.is_cuda and is_plain(seed) and runs_on(seed)
