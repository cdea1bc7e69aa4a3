"""The kernels as torch library operators, with shapes for the compiler and gradients for autograd.

`prepare.py` has what comes before, `packed.py` the operator for queries, keys and values in one tensor.
`fused_attention` gives the output and what backward needs: `stats`, int32 planes (the bits of the base-2 log-sum-exp;
where weights are dropped, the share of them that is left; the row words), and `flags` of rows that were left undropped.
Both hold integers, so no gradient is ever asked of them.
"""

from typing import Any

import torch
from torch import Tensor

from attemper.kernels.attention.launch_arguments import (
    PenaltyGradients,
    mask_arguments,
    penalty_gradient_arguments,
    table_arguments,
)
from attemper.kernels.attention.launches import (
    BackwardLaunches,
    ForwardLaunches,
    backward_launches,
    forward_launches,
    stats_shapes,
)
from attemper.kernels.attention.mask_gradients import mask_gradient
from attemper.kernels.common.direct import is_aligned
from attemper.kernels.common.dropping import KEYS, NOTHING
from attemper.kernels.common.eager import is_plain, transformed
from attemper.kernels.common.flops import attention_backward_flops, attention_flops, counted_by
from attemper.kernels.common.launch import DEVICES, LOG2E, on_device, token_major, unit_stride
from attemper.ops.announced import announced

OTHERS = (
    "Tensor? mask, Tensor? table, float scale, bool causal, Tensor? tops=None, Tensor? cuts=None, Tensor? hard=None, "
    "str fill='none', int drop=1"
)
LAST = (None, None, None, "none", KEYS)
"""What the last of these arguments are where they are left out."""
torch.library.define(
    "attemper::fused_attention", f"(Tensor q, Tensor k, Tensor v, {OTHERS}) -> (Tensor, Tensor, Tensor)"
)
torch.library.define(
    "attemper::fused_attention_backward",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor stats, Tensor flags, {OTHERS}) "
    "-> (Tensor, Tensor, Tensor)",
)


@announced("attention")
def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor | None, scale: float, causal: bool,
    tops: Tensor | None = None, cuts: Tensor | None = None, hard: Tensor | None = None, fill: str = "none",
    drop: int = KEYS,
) -> Tensor:  # fmt: skip
    """(B, H, Nq, e_v), laid out in memory as (B, Nq, H, e_v).

    mask: boolean or additive, of four axes, each of the logits' size or 1; an additive one needs its `row_tops`, and
        gets a gradient where it has the logits' queries and keys. A mask of bytes, (B, H or 1, 1, 1), only says whether
        the last key is there.
    table: from `drop_table`, None drops nothing.
    drop: what the table drops, a number of `common/dropping.py`.
    cuts, hard, fill: hard masking, by `row_cuts` and a `drop_table` of its own; fill is "zero", "neg_inf" or "none".
    """
    arguments = (q, k, v, mask, table, scale, causal, tops, cuts, hard, fill, drop)
    out: Tensor
    if is_plain(q):
        out = DirectAttention.apply(*arguments)
    else:
        # Autograd of library operators does not take part in torch.func.grad; that of a function does.
        out = (FusedAttention.apply if transformed() else torch.ops.attemper.fused_attention)(*arguments)[0]
    return out


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor | None, scale: float, causal: bool,
    tops: Tensor | None = None, cuts: Tensor | None = None, hard: Tensor | None = None, fill: str = "none",
    drop: int = KEYS,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, stats and flags."""
    if 0 in q.shape or 0 in v.shape:
        return forward_fake(q, k, v, mask, table, scale, causal, tops, cuts, hard, fill, drop)
    masked, kind = mask_arguments(mask, tops, q)
    settings = (mask, kind, NOTHING if table is None else drop, causal, fill)
    found = forward_launches(q, k, v, *settings)
    if found is None:
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        return forward(q, k, v, mask, table, scale, causal, tops, cuts, hard, fill, drop)
    aligned = is_aligned(q, k, v, table, hard, cuts, mask, tops)
    return run_forward(found, q, k, v, masked, (table, hard, cuts), scale * LOG2E, aligned)


def run_forward(
    found: ForwardLaunches, q: Tensor, k: Tensor, v: Tensor, masked: tuple[Any, ...],
    tables: tuple[Tensor | None, Tensor | None, Tensor | None], scale: float, aligned: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the kernels of a forward pass. masked: a mask as they take it; scale: of base-2 logits."""
    device = q.device
    out = torch.empty_strided(found.out_shape, found.out_strides, dtype=q.dtype, device=device)
    stats = torch.empty(found.stats_shape, dtype=torch.int32, device=device)
    flags = torch.empty(found.flags_shape, dtype=torch.int32, device=device)
    planes = stats.unbind(0)
    arguments = (
        (q, *found.q), (k, *found.k), (v, *found.v), (out, *found.out),
        (stats, planes[-1], flags, planes[1] if len(planes) == 3 else stats),
        table_arguments(*tables, stats), masked, found.sizes, scale,
    )  # fmt: skip
    with on_device(q):
        found.main(aligned, *arguments)
        if found.repair is not None:
            found.repair(aligned, *arguments, found.flags)
    return out, stats, flags


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, flags: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = backward_fake(dout, q, k, v)
    backward_into(grads, dout, q, k, v, out, stats, flags, *others)
    return grads


def backward_into(
    grads: tuple[Tensor, Tensor, Tensor], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
    flags: Tensor, mask: Tensor | None, table: Tensor | None, scale: float, causal: bool, tops: Tensor | None = None,
    cuts: Tensor | None = None, hard: Tensor | None = None, fill: str = "none", drop: int = KEYS, *,
    penalty_gradients: PenaltyGradients | None = None, dlse: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients of q, k and v; they may lie in memory in any way, each token's elements side by side.

    penalty_gradients: what penalties add to them. dlse: (B, H, Nq), the gradient of the natural log-sum-exps.
    """
    if out.numel() == 0:
        for grad in grads:
            grad.zero_()
        return
    masked, kind = mask_arguments(mask, tops, q)
    penalties, penalty_constants = penalty_gradient_arguments(penalty_gradients, stats)
    found = backward_launches(
        q, k, v, (dout, out, *grads), mask, kind, NOTHING if table is None else drop, causal, fill, dlse is None,
        penalty_constants,
    )  # fmt: skip
    if found is None:
        q, k, v, dout = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(dout)
        backward_into(
            grads, dout, q, k, v, out, stats, flags, mask, table, scale, causal, tops, cuts, hard, fill, drop,
            penalty_gradients=penalty_gradients, dlse=dlse,
        )  # fmt: skip
        return
    aligned = is_aligned(q, k, v, dout, out, *grads, stats, flags, table, hard, cuts, mask, tops, *penalties[:4])
    tensors, tables = (q, k, v, dout, out, *grads), (table, hard, cuts)
    run_backward(found, tensors, stats, flags, masked, tables, penalties, scale, aligned, dlse)


def run_backward(
    found: BackwardLaunches, tensors: tuple[Tensor, ...], stats: Tensor, flags: Tensor, masked: tuple[Any, ...],
    tables: tuple[Tensor | None, Tensor | None, Tensor | None], penalties: tuple[Any, ...], scale: float,
    aligned: bool, dlse: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernels of a backward pass. tensors: q, k, v, dout, out, and the gradients of q, k and v."""
    q, k, v, dout, out, dq, dk, dv = tensors
    planes = stats.unbind(0)
    words, left = planes[-1], planes[1] if len(planes) == 3 else stats
    q_rows, k_rows, v_rows, dout_rows, out_rows = (
        (q, *found.q), (k, *found.k), (v, *found.v), (dout, *found.dout), (out, *found.out),
    )  # fmt: skip
    dq_rows, dk_rows, dv_rows = (dq, *found.dq), (dk, *found.dk), (dv, *found.dv)
    read, scales = table_arguments(*tables, stats), (scale, scale * LOG2E)
    with on_device(q):
        if found.whole is not None:
            found.whole(
                aligned, q_rows, k_rows, v_rows, out_rows, dout_rows, dq_rows, dk_rows, dv_rows,
                (stats, words, flags, left), read, masked, penalties, found.sizes[0], scales,
            )  # fmt: skip
            return
        pairs = torch.empty(stats.shape[1:], dtype=torch.int64, device=q.device)
        saved, (heads, _, nq, _) = (words, pairs), found.sizes
        found.delta(aligned, out_rows, dout_rows, stats, left, pairs, heads, nq)
        if dlse is not None:  # the gradient of a logit is its weight times (dP − delta), or here (dP + dlse − delta)
            deltas = pairs.view(torch.float32)[..., 1 : 2 * nq : 2]  # the high halves
            deltas -= dlse
        found.main(
            aligned, q_rows, k_rows, v_rows, dout_rows, dq_rows, dk_rows, dv_rows, saved, read, masked,
            penalties, found.sizes, scales,
        )  # fmt: skip
        if tables[0] is not None:
            found.spared(
                aligned, q_rows, k_rows, v_rows, dout_rows, dk_rows, dv_rows, saved, flags, read, masked,
                found.sizes, scales, found.share, flags.numel(),
            )  # fmt: skip


def forward_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor | None, scale: float, causal: bool,
    tops: Tensor | None = None, cuts: Tensor | None = None, hard: Tensor | None = None, fill: str = "none",
    drop: int = KEYS,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What `forward` gives, empty."""
    stats, flags = stats_shapes(q, NOTHING if table is None else drop)
    out = token_major(q, q.shape[1], q.shape[2], v.shape[3])
    return out, q.new_empty(stats, dtype=torch.int32), q.new_empty(flags, dtype=torch.int32)


def backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, empty."""
    return token_major(q, *q.shape[1:]), token_major(k, *k.shape[1:]), token_major(v, *v.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop = inputs
    ctx.set_materialize_grads(False)  # zeros for integers, which nobody reads, would cost a launch each
    ctx.save_for_backward(q, k, v, *output, mask, table, tops, cuts, hard)


def gradients(dout: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, by the operator."""
    backward = FusedAttentionBackward.apply if transformed() else torch.ops.attemper.fused_attention_backward
    grads: tuple[Tensor, Tensor, Tensor] = backward(dout, *arguments)
    return grads


def _gradients(ctx: Any, dout: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    q, k, v, out, stats, flags, mask, table, tops, cuts, hard = ctx.saved_tensors
    others = (mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop)
    grads = gradients(dout, q, k, v, out, stats, flags, *others)
    dmask = mask_gradient(dout, q, k, v, out, stats, flags, *others) if ctx.needs_input_grad[3] else None
    return (*grads, dmask, *([None] * 8))


def filled(others: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments behind Q, K and V, those that were left out, too."""
    return (*others, *LAST[len(others) - 4 :]) if len(others) < 9 else others


class DirectAttention(torch.autograd.Function):
    """The operator in eager mode, where nobody looks at operators: a dispatcher's way to Python and back is spared."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        output = forward(*arguments)
        _save(ctx, arguments, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 12
        if not is_plain(dout) or torch.is_grad_enabled():  # which says that there are no second gradients
            return _gradients(ctx, dout)
        q, k, v, out, stats, flags, mask, table, tops, cuts, hard = ctx.saved_tensors
        others = (mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop)
        dmask = mask_gradient(dout, q, k, v, out, stats, flags, *others) if ctx.needs_input_grad[3] else None
        return (*_backward(dout, q, k, v, out, stats, flags, *others), dmask, *([None] * 8))


class FusedAttention(torch.autograd.Function):
    """The operator under torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.attemper.fused_attention(*arguments)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, *grads)


class FusedAttentionBackward(torch.autograd.Function):
    """Its gradients under torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.attemper.fused_attention_backward(*arguments)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        no_second_gradients(ctx)


def no_second_gradients(ctx: Any, *_: object) -> None:
    """Say that there are none."""
    raise NotImplementedError("impl='triton' has no second derivatives; impl='reference' has")


for _device in DEVICES:
    torch.library.impl("attemper::fused_attention", _device, forward)
    torch.library.impl("attemper::fused_attention_backward", _device, _backward)
torch.library.register_fake("attemper::fused_attention", forward_fake)
torch.library.register_fake("attemper::fused_attention_backward", backward_fake)
torch.library.register_autograd("attemper::fused_attention", _gradients, setup_context=_save)
torch.library.register_autograd("attemper::fused_attention_backward", no_second_gradients)
counted_by(torch.ops.attemper.fused_attention, attention_flops)
counted_by(torch.ops.attemper.fused_attention_backward, attention_backward_flops)
