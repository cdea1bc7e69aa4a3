"""Keys that all queries share are gathered, and plain attention goes to what is left: fewer keys, less work.

Shapes never depend on what is drawn. The last key that is drawn is kept with some probability only, so a mask hides it
where it is not; with a mask torch has no fast kernel, so there, and for short rows, our own attends. A row whose
allowed keys would all be dropped keeps them all. Where padding makes that possible, the places of the drawn keys are
given to the allowed ones, which are few enough to fit.

A gather's own gradient adds into place, on a GPU in no fixed order. Here it is a gather too, by the inverse order.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.kernels import keys as key_kernels
from attemper.kernels.attention.arguments import plain, takes
from attemper.ops.call import Call, refuse_documents
from attemper.ops.choice import is_short
from attemper.ops.outside_softmax import is_outside, perturbed_heads, perturbed_keys, refuse_keys
from attemper.ops.perturbation import DrawnKeys, draw


def refuse(call: Call) -> str | None:
    """Why gathered keys cannot serve this call, or None."""
    return refuse_documents(call) or _refuse_methods(call) or _refuse_masks(call) or refuse_keys(call)


def _refuse_methods(call: Call) -> str | None:
    counts = [method.shared_count(call.k.shape[2]) for method in call.methods]
    if not any(counts):
        return (
            "gathers keys that all queries share, as in DropKey(0.3, share='heads'), and no method of this call does so"
        )
    others = [m for m, count in zip(call.methods, counts, strict=True) if count is None]
    inside = [type(m).__name__ for m in others if not is_outside(m)]
    if inside:
        return f"torch's kernels cannot do what {', '.join(inside)} does inside of softmax"
    if len(call.methods) - len(others) > 1:
        return f"gathers the keys of one method, and this call has {len(call.methods) - len(others)}"
    return None


def _refuse_masks(call: Call) -> str | None:
    if call.is_causal:
        return "a row of causal attention may lose all of its keys and then needs some that were not gathered"
    if call.attn_mask is None:
        return None
    if call.differs_between_queries:
        return "a row that a mask leaves without drawn keys needs keys of its own, and one set is gathered for all rows"
    keys = call.k.shape[2]
    counts = [method.shared_count(keys) for method in call.methods]
    count = next(count for count in counts if count is not None)
    if keys - count + 1 > count:
        return (
            f"with a mask at least half of the keys must be drawn, {count} of {keys} are: a row that loses all of its "
            "keys would need more"
        )
    return None


def attention(call: Call) -> Tensor:
    """Attention to the drawn keys alone, by torch's kernels or by ours without methods. Returns (B, H, Nq, e_v)."""
    batch, heads, _, keys = call.shape
    drawn = draw(call.methods, call.source, call.q)
    k = perturbed_keys(call, drawn)
    method, stream = next((method, stream) for method, stream in drawn if method.shared_count(keys))
    keyset = method.draw_keys(batch, heads, keys, stream)
    order, rank, mask = _keys_and_mask(call, keyset)
    k, v = (_take(x, order, rank, keyset.count) for x in (k, call.v))
    hidden = mask is not None and mask.dtype == torch.bool
    if (hidden or (mask is None and is_short(call))) and takes(call):
        if call.attn_mask is None and keyset.kept is not None:
            mask = keyset.kept[:, :, -1:, None].to(torch.uint8)  # inductor of torch 2.11 cannot view it so
        out = plain(call.q, k, v, mask, call.scale)
    else:
        grouped = heads != k.shape[1]
        out = F.scaled_dot_product_attention(call.q, k, v, mask, scale=call.scale, enable_gqa=grouped)
    return perturbed_heads(out, drawn)


def _keys_and_mask(call: Call, drawn: DrawnKeys) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """All keys, the gathered ones first, (B, H or 1, Nk), the inverse of that order where it is known, and the mask
    over the gathered ones, (B, H or 1, Nq or 1, count).
    """
    order, kept = drawn.order, drawn.kept
    mask = call.attn_mask
    if mask is None:
        return order, drawn.rank, None if kept is None else kept[:, :, None]
    if kept is None:
        kept = torch.ones_like(order[..., : drawn.count], dtype=torch.bool)
    batch, _, _, keys = call.shape
    mask = mask[(None,) * (4 - mask.dim())].expand(batch, -1, -1, keys)
    sets = max(mask.shape[1], order.shape[1])
    order, kept = order.expand(batch, sets, keys), kept.expand(batch, sets, drawn.count)
    if call.real_keys is not None:
        allowed = call.real_keys.squeeze(2).expand(batch, sets, keys).gather(-1, order)
        lost = ~(allowed[..., : drawn.count] & kept).any(-1, keepdim=True)
        order = order.gather(-1, (lost & ~allowed).to(torch.uint8).argsort(dim=-1, stable=True))
        kept = kept | lost
    index = order[:, :, None, : drawn.count].expand(-1, -1, mask.shape[2], -1)
    mask = mask.expand(-1, sets, -1, -1).gather(-1, index)
    kept = kept[:, :, None]
    if mask.dtype == torch.bool:
        return order, None, mask & kept
    return order, None, mask.to(call.q.dtype).masked_fill(~kept, -torch.inf)


def _take(x: Tensor, order: Tensor, rank: Tensor | None, count: int) -> Tensor:
    """The `count` keys or values that stand first in `order`, (B, H or H_kv, count, e)."""
    if key_kernels.serves(x):
        return key_kernels.take_keys(x, order, inverse(order) if rank is None else rank, count)
    kv_heads, sets = x.shape[1], order.shape[1]
    if sets > kv_heads:  # every query head of a group has a set of its own
        x = x[:, :, None].expand(-1, -1, sets // kv_heads, -1, -1)
        order = order.unflatten(1, (kv_heads, -1))
    index = order.expand(*x.shape[:-1])
    taken: Tensor = TakeFirst.apply(x, index, count)
    return taken.flatten(1, -3)


class TakeFirst(torch.autograd.Function):
    """x (…, N, e) at the first `count` of order (…, N), a permutation, along the second-last axis."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, count: int) -> Tensor:
        return _rows(x, order[..., :count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        _, order, ctx.count = inputs
        ctx.save_for_backward(order)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        # The keys that were not taken all read one row of zeros behind the others.
        return _rows(F.pad(dout, (0, 0, 0, 1)), inverse(order).clamp(max=ctx.count)), None, None


def inverse(order: Tensor) -> Tensor:
    """The place of every key in a permutation along the last axis."""
    place = torch.arange(order.shape[-1], device=order.device).expand(order.shape)
    return torch.zeros_like(order).scatter(-1, order, place)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))
