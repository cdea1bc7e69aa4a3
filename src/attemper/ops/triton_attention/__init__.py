"""Fused attention in Triton, with keys dropped inside: linear memory, the masks of `attemper.keep_mask`.

Inside of softmax it serves one method that drops keys independently (DropKey), one that drops the largest logits of a
row (HardMask), or both, in either order; and beside them any that stay outside (Blur, DropHead). Masks may be boolean
or additive. Triton is imported when a kernel first runs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from attemper.ops.call import Call
from attemper.ops.outside import is_outside, perturbed_heads, perturbed_keys, refuse_keys
from attemper.ops.perturbation import Drawn, draw
from attemper.ops.stream import live_threshold
from attemper.ops.triton_attention import vmap  # noqa: F401, registers its rules
from attemper.ops.triton_attention.library import fused_attention, transformed
from attemper.ops.triton_attention.packed import either
from attemper.ops.triton_attention.penalised import with_squares
from attemper.ops.triton_attention.prepare import drop_table, row_cuts, row_tops
from attemper.ops.triton_penalties.library import widest

__all__ = ["attention", "attention_and_squares", "plain", "prepared", "refuse", "squares", "takes"]

SQUARES = ("v", "qk")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (8, 128)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None


def refuse(call: Call) -> str | None:
    """Why these kernels cannot serve this call, or None."""
    return _refuse_device(call) or _refuse_methods(call) or _refuse_tensors(call) or refuse_keys(call)


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
    drops, largest = 0, 0
    for method in call.methods:
        if method.independent_drop is not None:
            drops += 1
        elif method.largest_drop(call.k.shape[2]) is not None:
            largest += 1
        elif not is_outside(method):
            return (
                "knows only methods that drop every key independently, such as DropKey(0.1), or the largest logits, "
                f"such as HardMask(0.1), inside of softmax, not {method}"
            )
    if drops > 1 or largest > 1:
        names = ", ".join(type(method).__name__ for method in call.methods if not is_outside(method))
        return f"takes one method of a kind inside of softmax, and this call has {drops + largest}: {names}"
    return None


def _refuse_tensors(call: Call) -> str | None:
    if call.q.dtype not in DTYPES:
        return f"computes in float16, bfloat16 and float32, not in {call.q.dtype}"
    for width in (call.q.shape[-1], call.v.shape[-1]):
        if width % 8 or not WIDTHS[0] <= width <= WIDTHS[1]:
            return f"needs head widths that are multiples of 8 from {WIDTHS[0]} to {WIDTHS[1]}, not {width}"
    mask = call.attn_mask
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return "gives no gradient to an additive mask, and this one requires it"
    return None


def attention(call: Call) -> Tensor:
    """softmax(scale · QKᵀ + mask, keys dropped) V, (B, H, Nq, e_v).

    Under autocast it computes in autocast's dtype, as torch's own kernels do.
    """
    q, k, v, others, outside = prepared(call)
    if call.packed is None or transformed():
        out = fused_attention(q, k, v, *others)
    else:
        out = either(call.packed, q, k, v, *others)
    return perturbed_heads(out, outside)


def squares(call: Call, wanted: Collection[str]) -> tuple[str, ...]:
    """Those of the wanted squares that `attention_and_squares` can take for a call."""
    if call.packed is None or transformed():
        return ()
    logits = call.q.shape[-1] <= widest(call.q.dtype) and call.q.dtype != torch.float16  # which ends at 65504
    return tuple(name for name in SQUARES if name in wanted and (name == "v" or logits))


def attention_and_squares(call: Call, bias: Tensor | None, wanted: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """`attention`, and squares of the projection that gave Q, K and V, whose gradients then cost next to nothing.

    call.packed: (B, N, 3 · H · e), what the projection gave; bias: its bias, which squares leave out.
    wanted: of `squares`. "v": ‖V − b_v‖²; "qk": ‖(Q − b_q)(K − b_k)ᵀ‖², summed over heads and samples.
    """
    assert call.packed is not None
    q, k, v, others, outside = prepared(call)
    out, taken = with_squares(call.packed, bias, q, k, v, "v" in wanted, "qk" in wanted, *others)
    return perturbed_heads(out, outside), dict(zip(wanted, taken.unbind(), strict=True))


def prepared(call: Call) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...], Drawn]:
    """Q, K and V as kernels take them, their other arguments, and the methods that act outside."""
    drawn = draw(call.methods, call.seed, call.q)
    outside = [(method, stream) for method, stream in drawn if is_outside(method)]
    q, k, v = _in_autocasts_dtype(call.q, perturbed_keys(call, outside), call.v)
    device = q.device
    mask, tops = _mask_and_tops(call)
    table, cuts, hard, fill = None, None, None, "none"
    keys = k.shape[2]
    for method, stream in drawn:
        rate, largest = method.independent_drop, method.largest_drop(keys)
        if rate is not None:
            table = drop_table(stream.seed, live_threshold(rate, device), keys, stream.lane)
        elif largest is not None:
            hard = drop_table(stream.seed, live_threshold(largest.p, device), keys, stream.lane)
            fill = largest.fill
            # Keys that were dropped before, by `table`, are not among the largest; those dropped later may be.
            cuts = row_cuts(
                *(q.detach(), k.detach(), mask, tops, table, hard),
                *(call.scale, call.is_causal, largest.count, fill == "neg_inf"),
            )
    return q, k, v, (mask, table, call.scale, call.is_causal, tops, cuts, hard, fill), outside


def takes(call: Call) -> bool:
    """Whether `plain` can take the tensors of a call, whatever its methods are."""
    return _refuse_device(call) is None and _refuse_tensors(call) is None


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention without methods, (B, H, Nq, e_v); mask: as `fused_attention` takes it, not additive."""
    return fused_attention(*_in_autocasts_dtype(q, k, v), mask, None, scale, False)


def _in_autocasts_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _mask_and_tops(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The mask with four axes, and of an additive one the largest entries of its rows."""
    mask = call.attn_mask
    if mask is None:
        return None, None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype == torch.bool:
        return mask, None
    mask = mask.detach()
    if mask.dtype == torch.float64:
        mask = mask.float()
    return mask, row_tops(mask, call.shape[2], call.is_causal)
