"""From a checked call of attention to what the kernels take: dtypes, masks, tables of drops, thresholds of rows."""

from typing import Any

import torch
from torch import Tensor

from attemper.kernels.attention import vmap  # noqa: F401, registers its rules
from attemper.kernels.attention.operators import fused_attention
from attemper.kernels.attention.prepare import drop_table, row_cuts, row_tops
from attemper.kernels.attention.seed_tables import seed_table
from attemper.kernels.common.devices import DTYPES, refuse_device
from attemper.kernels.common.dropping import KEYS, drop_code, seed_code
from attemper.kernels.common.eager import transformed
from attemper.ops.call import Call
from attemper.ops.outside_softmax import is_outside, perturbed_keys
from attemper.ops.perturbation import Drawn, draw
from attemper.ops.stream import live_threshold

WIDTHS = (8, 128)


def refuse_tensors(call: Call) -> str | None:
    """Why the kernels cannot take the tensors of a call, or None."""
    if 0 in call.shape:
        return "has nothing to compute: there are no samples, or no queries"
    if call.q.dtype not in DTYPES:
        return f"computes in float16, bfloat16 and float32, not in {call.q.dtype}"
    for width in (call.q.shape[-1], call.v.shape[-1]):
        if width % 8 or not WIDTHS[0] <= width <= WIDTHS[1]:
            return f"needs head widths that are multiples of 8 from {WIDTHS[0]} to {WIDTHS[1]}, not {width}"
    mask = call.attn_mask
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        if transformed():
            return "gives no gradient to an additive mask under torch.func, and this one requires it"
        if mask.shape[-2:] != call.shape[2:]:
            return "gives no gradient to an additive mask that all queries or all keys share, and this one requires it"
    return None


def prepared(call: Call) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...], Drawn]:
    """Q, K and V as kernels take them, their other arguments, and the methods that act outside."""
    drawn = draw(call.methods, call.source, call.q)
    outside = [(method, stream) for method, stream in drawn if is_outside(method)]
    q, k, v = in_autocasts_dtype(call.q, perturbed_keys(call, outside), call.v)
    device = q.device
    mask, causal = call.mask_and_causal
    mask, tops = _mask_and_tops(mask, call.shape[2], causal)
    table, cuts, hard, fill, code = None, None, None, "none", KEYS
    keys = k.shape[2]
    for method, stream in drawn:
        dropped, largest, seeds = method.word_drop, method.largest_drop(keys), method.seed_drop(keys)
        if seeds is not None:
            code, table = seed_code(seeds), seed_table(stream, live_threshold(seeds.rate, device), call.shape, seeds)
        elif dropped is not None:
            code = drop_code(dropped)
            table = drop_table(
                stream.for_all_queries() if dropped.by_key else stream, live_threshold(dropped.p, device), keys
            )
        elif largest is not None:
            drawn_from = stream.for_all_heads() if largest.shared else stream
            hard = drop_table(drawn_from, live_threshold(largest.p, device), keys)
            fill = largest.fill
            # Keys that were dropped before, by `table`, are not among the largest; those dropped later may be.
            cuts = row_cuts(
                *(q.detach(), k.detach(), None if mask is None else mask.detach(), tops, table, hard),
                *(call.scale, causal, largest.count, fill == "neg_inf", largest.shared, code),
            )
    return q, k, v, (mask, table, call.scale, causal, tops, cuts, hard, fill, code), outside


def takes(call: Call) -> bool:
    """Whether `plain` can take the tensors of a call, whatever its methods are."""
    return refuse_device(call.q.device) is None and refuse_tensors(call) is None


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention without methods, (B, H, Nq, e_v); mask: as `fused_attention` takes it, not additive."""
    return fused_attention(*in_autocasts_dtype(q, k, v), mask, None, scale, False)


def in_autocasts_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V as autocast makes products of them, where it is enabled."""
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    if q.dtype == dtype and k.dtype == dtype and v.dtype == dtype:
        return q, k, v
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _mask_and_tops(mask: Tensor | None, queries: int, causal: bool) -> tuple[Tensor | None, Tensor | None]:
    """The mask with four axes, and of an additive one the largest entries of its rows."""
    if mask is None:
        return None, None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype == torch.bool:
        return mask, None
    if mask.dtype == torch.float64:
        mask = mask.float()
    return mask, row_tops(mask.detach(), queries, causal)
