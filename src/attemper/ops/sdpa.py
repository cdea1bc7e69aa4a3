"""Torch's own fused kernels, for a call that no method perturbs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.ops.call import Call

__all__ = ["attention", "refuse"]


def refuse(call: Call) -> str | None:
    """Why the stock kernels cannot serve this call, or None."""
    if call.methods:
        return "torch's kernels know no methods; this call has " + ", ".join(type(m).__name__ for m in call.methods)
    if call.is_causal and call.attn_mask is not None:
        return "torch's kernels take either attn_mask or is_causal, not both"
    return None


def attention(call: Call) -> Tensor:
    """The same as `torch.nn.functional.scaled_dot_product_attention`."""
    mask = call.attn_mask
    if mask is not None and mask.dim() < 2:  # torch wants at least (queries, keys)
        mask = mask.expand(call.shape[2:])
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(call.q.dtype)
    return F.scaled_dot_product_attention(
        call.q,
        call.k,
        call.v,
        mask,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )
