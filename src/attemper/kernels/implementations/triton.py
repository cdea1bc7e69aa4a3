"""Fused attention in Triton, with keys dropped inside: linear memory, the masks of `attemper.keep_mask`.

Inside of softmax it serves one method that drops keys independently (DropKey), one that drops the largest logits of a
row (HardMask), or both, in either order; and beside them any that stay outside (Blur, DropHead). Masks may be boolean
or additive. Triton is imported when a kernel first runs.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from attemper.kernels.attention.arguments import prepared, refuse_tensors
from attemper.kernels.attention.operators import fused_attention, transformed
from attemper.kernels.attention.packed import either
from attemper.kernels.attention.penalised import with_squares
from attemper.kernels.common.devices import refuse_device
from attemper.kernels.penalties.logits import widest
from attemper.ops.call import Call
from attemper.ops.outside_softmax import is_outside, perturbed_heads, refuse_keys

SQUARES = ("v", "qk")


def refuse(call: Call) -> str | None:
    """Why these kernels cannot serve this call, or None."""
    return refuse_device(call.q.device) or _refuse_methods(call) or refuse_tensors(call) or refuse_keys(call)


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
