"""Where Triton kernels can run."""

import functools
import importlib.util
import os

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None


def refuse_device(device: torch.device) -> str | None:
    """Why kernels cannot run on a device, or None."""
    if not INSTALLED:
        return "Triton is not installed"
    if device.type == "cpu" and INTERPRETED:
        return None
    if device.type != "cuda":
        return f"needs a CUDA device, and the tensors are on {device.type}"
    return _refuse_gpu(device) if torch.compiler.is_compiling() else _known_refusal(device)


def _refuse_gpu(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "tried on NVIDIA GPUs only, and this torch is built for ROCm"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 (Ampere) or later"
    return None


_known_refusal = functools.cache(_refuse_gpu)
"""Every function of a step asks."""


def runs_on(x: Tensor) -> bool:
    """Whether kernels can run where a tensor lies; not under torch.func's transforms, which cannot look into them."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return False
    return refuse_device(x.device) is None
