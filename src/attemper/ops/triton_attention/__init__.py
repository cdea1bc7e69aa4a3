"""Fused attention in Triton, with keys dropped inside: linear memory, the masks of `attemper.keep_mask`.

It serves a call without methods, or with one method that does nothing but drop keys independently. Triton is imported
when a kernel first runs.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from attemper.ops.call import Call
from attemper.ops.seed import draw_seed
from attemper.ops.stream import live_threshold
from attemper.ops.triton_attention.library import drop_table, fused_attention

__all__ = ["attention", "refuse"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (8, 128)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None


def refuse(call: Call) -> str | None:
    """Why these kernels cannot serve this call, or None."""
    return _refuse_device(call) or _refuse_methods(call) or _refuse_tensors(call)


def _refuse_device(call: Call) -> str | None:
    if not INSTALLED:
        return "Triton is not installed"
    if call.q.device.type == "cpu" and INTERPRETED:
        return None
    if call.q.device.type != "cuda":
        return f"needs a CUDA device, and the tensors are on {call.q.device.type}"
    if torch.version.hip is not None:
        return "tried on NVIDIA GPUs only, and this torch is built for ROCm"
    if torch.cuda.get_device_capability(call.q.device) < (8, 0):
        return "needs a GPU of compute capability 8.0 (Ampere) or later"
    return None


def _refuse_methods(call: Call) -> str | None:
    if len(call.methods) > 1:
        names = ", ".join(type(method).__name__ for method in call.methods)
        return f"takes one method at most, and this call has {len(call.methods)}: {names}"
    for method in call.methods:
        if method.independent_drop is None:
            return f"knows only methods that drop every key independently, such as DropKey(0.1), not {method}"
    return None


def _refuse_tensors(call: Call) -> str | None:
    if call.q.dtype not in DTYPES:
        return f"computes in float16, bfloat16 and float32, not in {call.q.dtype}"
    for width in (call.q.shape[-1], call.v.shape[-1]):
        if width % 8 or not WIDTHS[0] <= width <= WIDTHS[1]:
            return f"needs head widths that are multiples of 8 from {WIDTHS[0]} to {WIDTHS[1]}, not {width}"
    if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
        return f"takes boolean masks only, not an additive one ({call.attn_mask.dtype})"
    return None


def attention(call: Call) -> Tensor:
    """softmax(scale · QKᵀ + mask, keys dropped) V, (B, H, Nq, e_v).

    Under autocast it computes in autocast's dtype, as torch's own kernels do.
    """
    q, k, v, device = call.q, call.k, call.v, call.q.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    mask = call.attn_mask
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    table = None
    for method in call.methods:
        rate = method.independent_drop
        assert rate is not None
        seed = draw_seed(call.q) if call.seed is None else call.seed
        table = drop_table(seed, live_threshold(rate, device), k.shape[2])
    return fused_attention(q, k, v, mask, table, call.scale, call.is_causal)
