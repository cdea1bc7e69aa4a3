"""Torch's own fused kernels, for calls whose methods stay outside of softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.ops.call import Call
from attemper.ops.seed import draw_seed
from attemper.ops.stream import Stream

__all__ = ["attention", "refuse"]


def refuse(call: Call) -> str | None:
    """Why the stock kernels cannot serve this call, or None."""
    inside = [type(m).__name__ for m in call.methods if not set(m.stages) <= {"keys", "heads"}]
    if inside:
        return f"torch's kernels cannot do what {', '.join(inside)} does inside of softmax"
    if call.is_causal and call.attn_mask is not None:
        return "torch's kernels take either attn_mask or is_causal, not both"
    blurs = any("keys" in m.stages for m in call.methods)
    if blurs and call.differs_between_queries:
        return "a boolean mask that differs between queries cannot be taken into account in the keys"
    return None


def attention(call: Call) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on keys that the methods changed."""
    mask, k = call.attn_mask, call.k
    if mask is not None and mask.dim() < 2:  # torch wants at least (queries, keys)
        mask = mask.expand(call.shape[2:])
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(call.q.dtype)
    drawn = []
    if call.methods:
        seed = draw_seed(call.q) if call.seed is None else call.seed
        drawn = [(method, Stream(seed, lane)) for lane, method in enumerate(call.methods)]
    for method, stream in drawn:
        k = method.perturb_keys(k, call.real_keys, call.is_causal, stream)
    grouped = call.q.shape[1] != call.k.shape[1]
    out = F.scaled_dot_product_attention(
        call.q, k, call.v, mask, is_causal=call.is_causal, scale=call.scale, enable_gqa=grouped
    )
    for method, stream in drawn:
        out = method.perturb_heads(out, stream)
    return out
