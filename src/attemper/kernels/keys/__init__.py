"""Keys before they meet the queries, in Triton: blurred along the sequence or an image, or drawn and gathered.

What torch would do in a few dozen small kernels, and through float32 copies, is one kernel here that reads the keys
once and writes them once. Triton is imported when a kernel first runs.
"""

from torch import Tensor

from attemper.kernels.common.devices import DTYPES, runs_on
from attemper.kernels.keys.operators import blur_keys, draw_order, take_keys

__all__ = ["blur_keys", "draw_order", "runs_on", "serves", "take_keys"]

WIDEST = 256


def serves(x: Tensor) -> bool:
    """Whether these kernels can take such keys; torch takes all others."""
    return x.dtype in DTYPES and x.dim() == 4 and x.shape[-1] <= WIDEST and runs_on(x)
