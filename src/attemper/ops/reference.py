"""Attention under any set of perturbations, written to be read: the specification of every other implementation.

It stores the (Nq × Nk) logits. Half precision is computed in float32 and rounded once, at the end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attemper.ops.call import Call, reachable
from attemper.ops.perturbation import Drawn, Perturbation, draw
from attemper.ops.precision import without_autocast


def refuse(call: Call) -> str | None:
    """Nothing: the reference serves every call."""
    return None


def attention(call: Call) -> Tensor:
    """softmax(scale · QKᵀ + mask) V with every method of the call applied. Returns (B, H, Nq, e_v)."""
    weights = attention_weights(call)
    with without_autocast(call.q):
        return (weights @ _for_each_query_head(call.v.to(weights.dtype), call)).to(call.q.dtype)


def attention_weights(call: Call) -> Tensor:
    """The weights alone: (B, H, Nq, Nk), in float32 or, for float64 inputs, float64."""
    with without_autocast(call.q):
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        q, k = call.q.to(dtype), _for_each_query_head(call.k.to(dtype), call)
        drawn = draw(call.methods, call.seed, call.q)
        row_wise = any("keys" in method.stages for method in call.methods) and call.differs_between_queries
        if not row_wise:
            for method, stream in drawn:
                k = method.perturb_keys(k, call.real_keys, call.is_causal, stream)
        logits = (q * call.scale) @ k.transpose(-2, -1)
        if row_wise and call.attn_mask is not None:
            seen = call.attn_mask if call.attn_mask.dtype == torch.bool else reachable(call.attn_mask)
            for method, stream in drawn:
                logits = method.perturb_content(logits, seen, call.is_causal, stream)
        logits, allowed = apply_masks(logits, call.attn_mask, call.is_causal)
        return perturb(logits, allowed, drawn)


def _for_each_query_head(t: Tensor, call: Call) -> Tensor:
    """Keys or values repeated, so that every query head of a group has its own."""
    groups = call.q.shape[1] // t.shape[1]
    return t if groups == 1 else t.repeat_interleave(groups, 1)


def apply_masks(logits: Tensor, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor | None]:
    """Logits with masks in place, and the keys that they leave allowed (None: all)."""
    if is_causal:
        causal = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        if attn_mask is None:
            attn_mask = causal
        elif attn_mask.dtype == torch.bool:
            attn_mask = attn_mask & causal
        else:
            attn_mask = attn_mask.masked_fill(~causal, -torch.inf)
    if attn_mask is None:
        return logits, None
    if attn_mask.dtype == torch.bool:
        return logits.masked_fill(~attn_mask, -torch.inf), attn_mask
    return logits + attn_mask, reachable(attn_mask)


def perturbed_softmax(logits: Tensor, methods: Sequence[Perturbation], seed: Tensor | None = None) -> Tensor:
    """Softmax over keys with every method applied, for logits that hold their masks already."""
    return perturb(logits, reachable(logits), draw(methods, seed, logits))


def perturb(logits: Tensor, allowed: Tensor | None, drawn: Drawn) -> Tensor:
    """Everything from logits to weights; a row without any allowed key comes out as zeros, not as NaN."""
    masked = allowed is not None
    for method, stream in drawn:
        logits, allowed = method.perturb_logits(logits, allowed, stream)
    if masked:
        empty = (logits == -torch.inf).all(-1, keepdim=True)
        weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    else:
        weights = logits.softmax(-1)
    for method, stream in drawn:
        weights = method.perturb_weights(weights, allowed, stream)
    for method, stream in drawn:
        weights = method.perturb_heads(weights, stream)
    return weights
