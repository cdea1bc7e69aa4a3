"""What `torch.nn.functional.multi_head_attention_forward` does before and after attention itself.

That function hides its attention call from torch-function modes, so interception has to stand in for it. A call that is
only observed, for penalties, goes through the same operations on the same layouts as torch's and gives the same bits.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class MultiheadArguments:
    """The arguments of `multi_head_attention_forward`, by its own names and in its own order."""

    query: Tensor
    key: Tensor
    value: Tensor
    embed_dim_to_check: int
    num_heads: int
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool
    dropout_p: float
    out_proj_weight: Tensor
    out_proj_bias: Tensor | None
    training: bool = True
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    use_separate_proj_weight: bool = False
    q_proj_weight: Tensor | None = None
    k_proj_weight: Tensor | None = None
    v_proj_weight: Tensor | None = None
    static_k: Tensor | None = None
    static_v: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False

    @property
    def batched(self) -> bool:
        return self.query.dim() == 3


def split_heads(
    call: MultiheadArguments, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Projected Q, K, V as (B, H, N, e), and one mask for `attemper.attention` (None: everything is allowed)."""
    if call.bias_k is not None and call.bias_v is not None:
        k = torch.cat([k, call.bias_k.expand(1, k.shape[1], -1)])
        v = torch.cat([v, call.bias_v.expand(1, v.shape[1], -1)])
    q, k, v = (_split(t, call.num_heads) for t in (q, k, v))
    if call.static_k is not None:
        k = call.static_k.view(q.shape[0], call.num_heads, -1, q.shape[-1])
    if call.static_v is not None:
        v = call.static_v.view(q.shape[0], call.num_heads, -1, q.shape[-1])
    if call.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return q, k, v, _merged_mask(call, (q.shape[0], call.num_heads, q.shape[2], k.shape[2]), q.dtype)


def attention_as_torch(
    call: MultiheadArguments, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Attention (B, H, Nq, e) and, where they are asked for, its weights, by the same operations as torch's function.

    For a call that is only observed: every product has the operands and the memory layout that torch gives it, so that
    the result is the same to the last bit on any machine. mask: None where `call.is_causal` stands for it.
    """
    dropout_p = call.dropout_p if call.training else 0.0
    if mask is not None and mask.dtype == torch.bool:
        mask = _additive(~mask, q.dtype)
    if not call.need_weights:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=mask is None and call.is_causal), None
    scaled, keys = (q * math.sqrt(1.0 / q.shape[-1])).flatten(0, 1), k.flatten(0, 1).transpose(-2, -1)
    if mask is None:
        logits = torch.bmm(scaled, keys)
    else:
        logits = torch.baddbmm(mask.expand(*q.shape[:3], k.shape[2]).flatten(0, 1), scaled, keys)
    weights = F.dropout(logits.softmax(-1), dropout_p) if dropout_p else logits.softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).unflatten(0, q.shape[:2]), weights.unflatten(0, q.shape[:2])


def project(call: MultiheadArguments, as_torch: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V behind their projections, (tokens, batch, width) each.

    as_torch: copy those that one product gave into tensors of their own, as torch does; later products may round
        differently on views. Without, the copy is saved.
    """
    query, key, value = call.query, call.key, call.value
    same_kv, same_qk = key is value, query is key
    if not call.batched:
        query, key, value = query[:, None], key[:, None], value[:, None]
    bias = call.in_proj_bias
    if call.use_separate_proj_weight:
        weights = call.q_proj_weight, call.k_proj_weight, call.v_proj_weight
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))  # type: ignore[arg-type]
        return q, k, v
    weight, width = call.in_proj_weight, query.shape[-1]
    assert weight is not None
    if same_kv and same_qk:
        q, k, v = _parts(F.linear(query, weight, bias), 3, as_torch)
        return q, k, v
    b_q, b_kv = (None, None) if bias is None else bias.split([width, 2 * width])
    w_q, w_kv = weight.split([width, 2 * width])
    q = F.linear(query, w_q, b_q)
    if same_kv:
        k, v = _parts(F.linear(key, w_kv, b_kv), 2, as_torch)
        return q, k, v
    b_k, b_v = (None, None) if b_kv is None else b_kv.chunk(2)
    w_k, w_v = w_kv.chunk(2)
    return q, F.linear(key, w_k, b_k), F.linear(value, w_v, b_v)


def _parts(packed: Tensor, count: int, copied: bool) -> tuple[Tensor, ...]:
    if copied:
        return tuple(packed.unflatten(-1, (count, -1)).movedim(-2, 0).contiguous())
    return packed.chunk(count, -1)


def _split(t: Tensor, heads: int) -> Tensor:
    """(N, B, d) → (B, H, N, e)."""
    tokens, batch, width = t.shape
    return t.reshape(tokens, batch, heads, width // heads).permute(1, 2, 0, 3)


def _merged_mask(call: MultiheadArguments, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor | None:
    """attn_mask and key_padding_mask as one. True means "may attend" here; in torch's function, the opposite."""
    batch, heads, queries, keys = shape
    attn_mask, padding = call.attn_mask, call.key_padding_mask
    if attn_mask is not None:
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.view(batch, heads, queries, -1)
        attn_mask = _pad_keys(attn_mask, keys)
    if padding is not None:
        padding = _pad_keys(padding if call.batched else padding[None], keys).view(batch, 1, 1, keys)
    masks = [mask for mask in (attn_mask, padding) if mask is not None]
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        forbidden = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return ~forbidden
    additive = [_additive(mask, dtype) for mask in masks]
    return additive[0] if len(additive) == 1 else additive[0] + additive[1]


def _pad_keys(mask: Tensor, keys: int) -> Tensor:
    """Allow the keys that bias_k and add_zero_attn put at the end."""
    missing = keys - mask.shape[-1]
    return F.pad(mask, (0, missing)) if missing else mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


def merge_heads(call: MultiheadArguments, out: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(B, H, N, e) → the output projection's (N, B, d), and the weights in the shape that was asked for."""
    batch, _, tokens, _ = out.shape
    joined = out.permute(2, 0, 1, 3).reshape(tokens * batch, -1)
    projected = F.linear(joined, call.out_proj_weight, call.out_proj_bias).view(tokens, batch, -1)
    if weights is not None and call.average_attn_weights:
        weights = weights.mean(1)
    if call.batched:
        return projected, weights
    return projected.squeeze(1), None if weights is None else weights.squeeze(0)
