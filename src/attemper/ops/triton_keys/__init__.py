"""Keys before they meet the queries, in Triton: blurred along the sequence or an image, or drawn and gathered.

What torch would do in a few dozen small kernels, and through float32 copies, is one kernel here that reads the keys
once and writes them once. Triton is imported when a kernel first runs.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from attemper.ops.triton_keys.library import blur_keys, draw_order, take_keys

__all__ = ["blur_keys", "draw_order", "runs_on", "serves", "take_keys"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None


def serves(x: Tensor) -> bool:
    """Whether these kernels can take such keys; torch takes all others."""
    return x.dtype in DTYPES and x.dim() == 4 and x.shape[-1] <= WIDEST and runs_on(x)


def runs_on(x: Tensor) -> bool:
    """Whether kernels can run where a tensor lies."""
    if not INSTALLED:
        return False
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return False
    if x.device.type == "cpu":
        return INTERPRETED
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 0)
