"""Attention under any set of perturbations, written to be read: the specification of every other implementation.

It stores the (Nq × Nk) logits. Half precision is computed in float32 and rounded once, at the end.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from attemper.ops.call import Call, reachable, without_future
from attemper.ops.merging import log_sum_exp
from attemper.ops.perturbation import Drawn, Perturbation, draw
from attemper.ops.precision import without_autocast
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import NOWHERE, Offsets, Source


def refuse(call: Call) -> str | None:
    """Nothing: the reference serves every call."""
    return None


def attention(call: Call) -> Tensor:
    """softmax(scale · QKᵀ + mask) V with every method of the call applied. Returns (B, H, Nq, e_v)."""
    if call.documents is not None:
        # No compiler knows the lengths of documents. A decorator that says so would load the compiler with this module.
        attend = _document_by_document
        if torch.compiler.is_compiling():
            attend = torch.compiler.disable(attend)
        out: Tensor = attend(call)
        return out
    return _weighted_values(attention_weights(call), call)


def attention_and_lse(call: Call) -> tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of what softmax saw of each row, (B, H, Nq), in float32 or float64."""
    with without_autocast(call.q):
        drawn = draw(call.methods, call.source, call.q)
        logits, allowed = _perturb_logits(*_masked_logits(call, drawn), drawn, call.is_partial)
        return _weighted_values(_weigh(logits, allowed, drawn, True), call), log_sum_exp(logits, -1)


def _weighted_values(weights: Tensor, call: Call) -> Tensor:
    with without_autocast(call.q):
        return (weights @ _for_each_query_head(call.v.to(weights.dtype), call)).to(call.q.dtype)


def _document_by_document(call: Call) -> Tensor:
    """Attention of each document to itself, one after the other: document d is sample d."""
    assert call.documents is not None
    source = Source(draw_seed(call.q)) if call.source is None and call.methods else call.source
    offsets = zip(*(each.tolist() for each in call.documents), strict=True)
    (begin_q, begin_k), *ends = offsets
    outs = []
    for number, (end_q, end_k) in enumerate(ends):
        q, k, v = call.q[:, :, begin_q:end_q], call.k[:, :, begin_k:end_k], call.v[:, :, begin_k:end_k]
        if end_k > begin_k:
            at = None if source is None else source._replace(at=source.at._replace(sample=source.at.sample + number))
            outs.append(attention(dataclasses.replace(call, q=q, k=k, v=v, source=at, packed=None, documents=None)))
        else:  # no key: zeros, as in any row without keys
            outs.append(q.new_zeros(*q.shape[:3], v.shape[3]))
        begin_q, begin_k = end_q, end_k
    return torch.cat(outs, 2)


def attention_weights(call: Call) -> Tensor:
    """The weights alone: (B, H, Nq, Nk), in float32 or, for float64 inputs, float64."""
    with without_autocast(call.q):
        drawn = draw(call.methods, call.source, call.q)
        return perturb(*_masked_logits(call, drawn), drawn, call.is_partial)


def _masked_logits(call: Call, drawn: Drawn) -> tuple[Tensor, Tensor | None]:
    """Logits with masks in place, made of keys as methods change them, and the allowed keys (None: all)."""
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    q, k = call.q.to(dtype), _for_each_query_head(call.k.to(dtype), call)
    row_wise = any("keys" in method.stages for method in call.methods) and call.differs_between_queries
    if not row_wise:
        for method, stream in drawn:
            k = method.perturb_keys(k, call.real_keys, call.is_causal, stream)
    logits = (q * call.scale) @ k.transpose(-2, -1)
    if row_wise and call.attn_mask is not None:
        seen = call.attn_mask if call.attn_mask.dtype == torch.bool else reachable(call.attn_mask)
        for method, stream in drawn:
            logits = method.perturb_content(logits, seen, call.is_causal, stream)
    return apply_masks(logits, call.attn_mask, call.is_causal, call.at)


def _for_each_query_head(t: Tensor, call: Call) -> Tensor:
    """Keys or values repeated, so that every query head of a group has its own."""
    groups = call.q.shape[1] // t.shape[1]
    return t if groups == 1 else t.repeat_interleave(groups, 1)


def apply_masks(
    logits: Tensor, attn_mask: Tensor | None, is_causal: bool, at: Offsets = NOWHERE
) -> tuple[Tensor, Tensor | None]:
    """Logits with masks in place, and the keys that they leave allowed (None: all)."""
    if is_causal:
        attn_mask = without_future(attn_mask, logits.shape[-2], logits.shape[-1], at, logits.device)
    if attn_mask is None:
        return logits, None
    if attn_mask.dtype == torch.bool:
        return logits.masked_fill(~attn_mask, -torch.inf), attn_mask
    return logits + attn_mask, reachable(attn_mask)


def perturbed_softmax(logits: Tensor, methods: Sequence[Perturbation], source: Source | None = None) -> Tensor:
    """Softmax over keys with every method applied, for logits that hold their masks already."""
    return perturb(logits, reachable(logits), draw(methods, source, logits))


def perturb(logits: Tensor, allowed: Tensor | None, drawn: Drawn, partial: bool = False) -> Tensor:
    """Everything from logits to weights; a row without any allowed key comes out as zeros, not as NaN.

    partial: the rows are parts, and one that loses all of its keys here comes out as zeros, too.
    """
    may_be_empty = partial or allowed is not None
    logits, allowed = _perturb_logits(logits, allowed, drawn, partial)
    return _weigh(logits, allowed, drawn, may_be_empty)


def _perturb_logits(
    logits: Tensor, allowed: Tensor | None, drawn: Drawn, partial: bool
) -> tuple[Tensor, Tensor | None]:
    """What softmax sees, and the keys that are still allowed."""
    batch, heads, queries, keys = logits.shape
    for method, stream in drawn:
        if partial and (rate := method.independent_drop) is not None:
            logits = logits.masked_fill(~stream.keep((batch, heads, queries, keys), rate), -torch.inf)
        else:
            logits, allowed = method.perturb_logits(logits, allowed, stream)
    return logits, allowed


def _weigh(logits: Tensor, allowed: Tensor | None, drawn: Drawn, may_be_empty: bool) -> Tensor:
    """Softmax, and what methods do after it. may_be_empty: there may be rows without any key."""
    if may_be_empty:
        empty = (logits == -torch.inf).all(-1, keepdim=True)
        weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    else:
        weights = logits.softmax(-1)
    for method, stream in drawn:
        weights = method.perturb_weights(weights, allowed, stream)
    for method, stream in drawn:
        weights = method.perturb_heads(weights, stream)
    return weights
