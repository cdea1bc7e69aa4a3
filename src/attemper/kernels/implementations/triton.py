"""Fused attention in Triton, with keys dropped inside: linear memory, the masks of `attemper.keep_mask`.

Inside of softmax it serves one method that drops keys or weights by words of the stream (DropKey; DropAttention, by
element or by key; a model's own attention dropout) or keys round seeds on an image (structured DropKey), one that drops
the largest logits of a row (HardMask), or both, dropped keys in either order and dropped weights last; and beside them
any that stay outside (Blur, DropHead). Masks may be boolean or additive. Packed documents may have DropKey and
DropHead. Log-sum-exps, and calls that drop from a part of the keys, have no additive masks. Triton is imported when a
kernel first runs.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from attemper.kernels.attention.arguments import in_autocasts_dtype, prepared, refuse_tensors
from attemper.kernels.attention.document_operators import document_attention, document_tables
from attemper.kernels.attention.log_sum_exps import attention_and_lse as fused_attention_and_lse
from attemper.kernels.attention.operators import fused_attention
from attemper.kernels.attention.packed import either
from attemper.kernels.attention.penalised import SQUARES, with_squares
from attemper.kernels.attention.repeats import Repeat, repeat_of
from attemper.kernels.common.devices import refuse_device
from attemper.kernels.common.eager import transformed
from attemper.kernels.penalties.logits import widest
from attemper.ops.call import Call
from attemper.ops.documents import Documents
from attemper.ops.outside_softmax import is_outside, perturbed_document_heads, perturbed_heads, refuse_keys
from attemper.ops.perturbation import draw
from attemper.ops.stream import live_threshold

WIDEST_IMAGE = 1024
"""Rows of logits have a bit for every line and column."""


def refuse(call: Call) -> str | None:
    """Why these kernels cannot serve this call, or None."""
    refused = refuse_device(call.q.device) or _refuse_methods(call) or _refuse_documents(call)
    return refused or _refuse_lse(call) or refuse_tensors(call) or refuse_keys(call)


def _drops_from_parts(call: Call) -> bool:
    return call.is_partial and any(method.independent_drop is not None for method in call.methods)


def _refuse_lse(call: Call) -> str | None:
    if not (call.with_lse or _drops_from_parts(call)):
        return None
    what = "gives log-sum-exps (return_lse)" if call.with_lse else "drops from a part of the keys (at.key, at.keys)"
    if any(drop is not None and drop.what != "keys" for drop in (method.word_drop for method in call.methods)):
        return f"{what} where keys are dropped before softmax only, not weights behind it"
    if transformed():
        return f"{what} outside of torch.func only"
    if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
        return f"{what} under boolean masks only, and this one is additive"
    return None


def _refuse_documents(call: Call) -> str | None:
    if call.documents is None:
        return None
    if transformed():
        return "knows no packed documents (cu_seqlens) under torch.func"
    for method in call.methods:
        if method.independent_drop is None and not set(method.stages) <= {"heads"}:
            return f"cannot do in packed documents (cu_seqlens) what {method} does"
    return None


def _refuse_methods(call: Call) -> str | None:
    drops, largest, first = 0, 0, None
    for method in sorted(call.methods, key=lambda method: method.order):
        if (seeds := method.seed_drop(call.k.shape[2])) is not None:
            drops += 1
            if max(seeds.grid) > WIDEST_IMAGE and seeds.shape == "cross":
                return f"drops stripes of images of up to {WIDEST_IMAGE} lines and columns, not {seeds.grid}"
        elif (drop := method.word_drop) is not None:
            drops += 1
            first = None if drop.what == "keys" and not drop.by_key else method
        elif method.largest_drop(call.k.shape[2]) is not None:
            largest += 1
            if first is not None:
                return f"looks for the largest logits before it does what {first} does, and here it comes first"
        elif not is_outside(method):
            return (
                "knows only methods that drop keys or weights by words of the stream, such as DropKey(0.1) and "
                "DropAttention(0.1), keys round seeds on an image, or the largest logits, such as HardMask(0.1), "
                f"inside of softmax, not {method}"
            )
    if drops > 1 or largest > 1:
        names = ", ".join(type(method).__name__ for method in call.methods if not is_outside(method))
        return f"takes one method of a kind inside of softmax, and this call has {drops + largest}: {names}"
    return None


def attention(call: Call) -> Tensor:
    """softmax(scale · QKᵀ + mask, keys dropped) V, (B, H, Nq, e_v).

    Under autocast it computes in autocast's dtype, as torch's own kernels do.
    """
    if call.documents is not None:
        return _document_attention(call, call.documents)
    if _drops_from_parts(call):
        return attention_and_lse(call)[0]
    q, k, v, others, outside = prepared(call)
    if call.packed is None or transformed():
        out = fused_attention(q, k, v, *others)
    else:
        out = either(call.packed, q, k, v, *others)
    return perturbed_heads(out, outside)


def repeat(call: Call) -> Repeat | None:
    """What is left to do in calls with tensors of the same layout; None: more than can be decided once."""
    return repeat_of(call)


def attention_and_lse(call: Call) -> tuple[Tensor, Tensor]:
    """`attention`, and the natural log-sum-exps of the rows, (B, H, Nq) float32."""
    q, k, v, others, outside = prepared(call)
    out, lse = fused_attention_and_lse(q, k, v, call.is_partial, *others)
    return perturbed_heads(out, outside), lse


def _document_attention(call: Call, documents: Documents) -> Tensor:
    drawn = draw(call.methods, call.source, call.q)
    q, k, v = in_autocasts_dtype(call.q, call.k, call.v)
    tables = None
    for method, stream in drawn:
        if (rate := method.independent_drop) is not None:
            tables = document_tables(stream, live_threshold(rate, q.device), documents, k.shape[2])
    out = document_attention(q, k, v, documents, tables, call.scale, call.is_causal)
    return perturbed_document_heads(out, drawn, documents)


def squares(call: Call, wanted: Collection[str]) -> tuple[str, ...]:
    """Those of the wanted squares that `attention_and_squares` can take for a call."""
    if call.packed is None or transformed():
        return ()
    logits = call.q.shape[-1] <= widest(call.q.dtype) and call.q.dtype != torch.float16  # which ends at 65504
    return tuple(name for name in SQUARES if name in wanted and (name == "v" or logits))


def attention_and_squares(
    call: Call, bias: Tensor | None, wanted: Mapping[str, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """`attention`, and squares of the projection that gave Q, K and V, whose gradients then cost next to nothing.

    call.packed: (B, N, 3 · H · e), what the projection gave; bias: its bias, which squares leave out.
    wanted: of `squares`, each with a factor. "v": ‖V − b_v‖²; "qk": ‖(Q − b_q)(K − b_k)ᵀ‖², summed over heads and
        samples.
    """
    assert call.packed is not None
    q, k, v, others, outside = prepared(call)
    factors = [wanted.get(name, 0.0) for name in SQUARES]
    out, *taken = with_squares(call.packed, bias, q, k, v, *factors, *others)
    names = [name for name in SQUARES if wanted.get(name)]
    return perturbed_heads(out, outside), dict(zip(names, taken, strict=True))
