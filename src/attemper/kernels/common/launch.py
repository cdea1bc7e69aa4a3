"""What every launch needs: arguments in groups (see `groups.py`), and the device."""

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from attemper.kernels.common.direct import launch

__all__ = ["DEVICES", "FLAG_ROWS", "LOG2E", "launch", "on_device", "precision", "strided", "token_major", "unit_stride"]
FLAG_ROWS = 16
LOG2E = math.log2(math.e)
HERE = contextlib.nullcontext()
DEVICES = ("CPU", "CUDA")  # the CPU only in Triton's interpreter


def on_device(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels are launched on the device of `t`."""
    return torch.cuda.device(t.device) if is_elsewhere(t) else HERE


def is_elsewhere(t: Tensor) -> bool:
    """Whether `t` is on another device than that on which kernels are launched now."""
    return t.is_cuda and torch._C._cuda_getDevice() != t.get_device()


def unit_stride(t: Tensor) -> Tensor:
    """`t`, copied only if the elements of a token do not lie side by side or its offsets need more than 32 bits."""
    far = t.shape[2] * t.stride(2) >= 2**31
    return t.contiguous() if (t.stride(3) != 1 and t.shape[3] > 1) or far else t


def token_major(like: Tensor, heads: int, tokens: int, width: int) -> Tensor:
    """An empty (B, heads, tokens, width) tensor where the heads of one token lie together, as projections want it."""
    return like.new_empty(like.shape[0], tokens, heads, width).transpose(1, 2)


def strided(t: Tensor) -> tuple[Any, ...]:
    """A tensor (B, H, N, e) as kernels take it: its elements, and its strides along samples, heads and tokens."""
    return (t, *t.stride()[:3])


def precision() -> str:
    """How float32 tiles are multiplied, by torch's global setting."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
