"""Torch's own fused kernels, for calls whose methods stay outside of softmax."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.ops.call import Call, refuse_documents
from attemper.ops.outside_softmax import is_outside, perturbed_heads, perturbed_keys, refuse_keys
from attemper.ops.perturbation import draw


def refuse(call: Call) -> str | None:
    """Why the stock kernels cannot serve this call, or None."""
    inside = [type(m).__name__ for m in call.methods if not is_outside(m)]
    if inside:
        return f"torch's kernels cannot do what {', '.join(inside)} does inside of softmax"
    if call.is_causal and call.attn_mask is not None:
        return "torch's kernels take either attn_mask or is_causal, not both"
    return refuse_documents(call) or refuse_keys(call)


def attention(call: Call) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on keys that the methods changed."""
    mask, causal = call.mask_and_causal
    if mask is not None and mask.dim() < 2:  # torch wants at least (queries, keys)
        mask = mask.expand(call.shape[2:])
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(call.q.dtype)
    drawn = draw(call.methods, call.source, call.q)
    grouped = call.q.shape[1] != call.k.shape[1]
    out = F.scaled_dot_product_attention(
        call.q, perturbed_keys(call, drawn), call.v, mask, is_causal=causal, scale=call.scale, enable_gqa=grouped
    )
    return perturbed_heads(out, drawn)
