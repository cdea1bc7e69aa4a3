"""The kernels as torch library operators, with shapes for the compiler and gradients for autograd.

`prepare.py` has what comes before, `packed.py` the operator for queries, keys and values in one tensor.
`fused_attention` gives the output and what backward needs: `stats`, two int32 planes (the bits of the base-2
log-sum-exp, the row words), and `flags` of rows that were left undropped. Both hold integers, so no gradient is ever
asked of them.
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
from attemper.kernels.common.flops import attention_backward_flops, attention_flops, counted_by
from attemper.kernels.common.launch import (
    DEVICES,
    FLAG_ROWS,
    LOG2E,
    on_device,
    precision,
    strided,
    token_major,
    unit_stride,
)
from attemper.kernels.common.plans import backward_plan, forward_plan, is_static, padded, tail, whole_plan

SPAN = 128  # flags that one program looks at
DELTA_ROWS = 32

OTHERS = (
    "Tensor? mask, Tensor? table, float scale, bool causal, Tensor? tops=None, Tensor? cuts=None, Tensor? hard=None, "
    "str fill='none'"
)
torch.library.define(
    "attemper::fused_attention", f"(Tensor q, Tensor k, Tensor v, {OTHERS}) -> (Tensor, Tensor, Tensor)"
)
torch.library.define(
    "attemper::fused_attention_backward",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor stats, Tensor flags, {OTHERS}) "
    "-> (Tensor, Tensor, Tensor)",
)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor | None, scale: float, causal: bool,
    tops: Tensor | None = None, cuts: Tensor | None = None, hard: Tensor | None = None, fill: str = "none",
) -> Tensor:  # fmt: skip
    """(B, H, Nq, e_v), laid out in memory as (B, Nq, H, e_v).

    mask: boolean or additive, of four axes, each of the logits' size or 1; an additive one needs its `row_tops`. A mask
        of bytes, (B, H or 1, 1, 1), only says whether the last key is there.
    table: from `drop_table`, None drops nothing.
    cuts, hard, fill: hard masking, by `row_cuts` and a `drop_table` of its own; fill is "zero", "neg_inf" or "none".
    """
    arguments = (q, k, v, mask, table, scale, causal, tops, cuts, hard, fill)
    # Autograd of library operators does not take part in torch.func.grad; that of a function does.
    out: Tensor = (FusedAttention.apply if transformed() else torch.ops.attemper.fused_attention)(*arguments)[0]
    return out


def transformed() -> bool:
    """Whether torch.func is at work: its tensors are wrapped."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _stats(q: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = q.shape
    groups = (tokens + FLAG_ROWS - 1) // FLAG_ROWS
    stats = q.new_empty((1 if table is None else 2, batch, heads, groups * FLAG_ROWS), dtype=torch.int32)
    return stats, q.new_empty((batch, heads, groups), dtype=torch.int32)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor | None, scale: float, causal: bool,
    tops: Tensor | None = None, cuts: Tensor | None = None, hard: Tensor | None = None, fill: str = "none",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, stats and flags."""
    from attemper.kernels.attention.forward import forward_kernel
    from attemper.kernels.attention.repair import repair_kernel

    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    out = token_major(q, q.shape[1], q.shape[2], v.shape[3])
    stats, flags = _stats(q, table)
    (batch, heads, nq, e), nk, ev = q.shape, k.shape[2], v.shape[3]
    if out.numel() == 0:
        return out, stats, flags
    static = is_static(nq, nk)
    plan = forward_plan(nq, nk, padded(max(e, ev)), q.dtype)
    masked, kind = mask_arguments(mask, tops, q)
    fixed = plan.fixed and q.dtype != torch.float16
    plain = fixed and table is None and fill == "none" and kind == "none" and not causal
    arguments = (
        strided(q), strided(k), strided(v), strided(out), (stats, stats[-1], flags),
        table_arguments(table, hard, cuts, stats), masked, (heads, heads // k.shape[1], nq, nk), scale * LOG2E,
    )  # fmt: skip
    constants = {
        "E": e, "BE": padded(e), "EV": ev, "BEV": padded(ev),
        "DROP": table is not None, "HARD": fill, "CAUSAL": causal, "MASK": kind, "PRECISION": precision(),
    }  # fmt: skip
    with on_device(q):
        forward_kernel[(batch * heads * -(-nq // plan.m),)](
            *arguments, **constants, NQ=nq if static else 0, NK=nk if static else 0, BM=plan.m, BN=plan.n,
            TAIL_M=tail(nq, plan.m, static), TAIL_N=tail(nk, plan.n, static and not causal, kind == "last"),
            FIXED=fixed, AT_ONCE=plain, num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
        )  # fmt: skip
        if table is not None or (fixed and not plain):
            repair_kernel[(-(-flags.numel() // SPAN),)](
                *arguments, flags.numel(), **constants, BN=32, SPAN=SPAN, num_warps=4, num_stages=1
            )
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
    cuts: Tensor | None = None, hard: Tensor | None = None, fill: str = "none", *,
    penalty_gradients: PenaltyGradients | None = None, dlse: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients of q, k and v; they may lie in memory in any way, each token's elements side by side.

    penalty_gradients: what penalties add to them. dlse: (B, H, Nq), the gradient of the natural log-sum-exps.
    """
    from attemper.kernels.attention.backward import backward_kernel, delta_kernel
    from attemper.kernels.attention.repair import spared_kernel
    from attemper.kernels.attention.whole import whole_kernel

    q, k, v, dout = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(dout)
    (batch, heads, nq, e), nk, ev = q.shape, k.shape[2], v.shape[3]
    if out.numel() == 0:
        for grad in grads:
            grad.zero_()
        return
    static = is_static(nq, nk)
    masked, kind = mask_arguments(mask, tops, q)
    group = heads // k.shape[1]
    q_rows, k_rows, v_rows, dout_rows, out_rows = (strided(t) for t in (q, k, v, dout, out))
    dq_rows, dk_rows, dv_rows = (strided(t) for t in grads)
    tables, scales = table_arguments(table, hard, cuts, stats), (scale, scale * LOG2E)
    constants = {
        "E": e, "BE": padded(e), "EV": ev, "BEV": padded(ev),
        "HARD": fill, "CAUSAL": causal, "MASK": kind, "PRECISION": precision(),
    }  # fmt: skip
    penalty_tensors, penalty_constants = penalty_gradient_arguments(penalty_gradients, stats)
    small = None
    if static and group == 1 and dlse is None:
        small = whole_plan(nq, nk, padded(max(e, ev)), q.dtype, table is not None)
    if small is not None:
        with on_device(q):
            whole_kernel[(batch * heads,)](
                q_rows, k_rows, v_rows, out_rows, dout_rows, dq_rows, dk_rows, dv_rows, (stats, stats[-1], flags),
                tables, masked, penalty_tensors, heads, scales,
                **constants, **penalty_constants, NQ=nq, NK=nk, DROP=table is not None,
                BM=small.m, TAIL_M=small.tail_m, BN=small.n, TAIL_N=small.tail_n,
                num_warps=small.warps, num_stages=1, maxnreg=small.registers,
            )  # fmt: skip
        return
    plan = backward_plan(nq, nk, padded(max(e, ev)), q.dtype, fill != "none")
    pairs = torch.empty(stats.shape[1:], dtype=torch.int64, device=q.device)
    tiles = -(-nk // plan.key_n) + group * -(-nq // plan.query_m)
    saved, sizes = (stats[-1], pairs), (heads, group, nq, nk)
    with on_device(q):
        delta_kernel[(batch * heads * -(-nq // DELTA_ROWS),)](
            out_rows, dout_rows, stats, pairs, heads, nq, EV=ev, BEV=padded(ev), BM=DELTA_ROWS
        )
        if dlse is not None:  # the gradient of a logit is its weight times (dP − delta), or here (dP + dlse − delta)
            deltas = pairs.view(torch.float32)[..., 1 : 2 * nq : 2]  # the high halves
            deltas -= dlse
        backward_kernel[(batch * k.shape[1] * tiles,)](
            q_rows, k_rows, v_rows, dout_rows, dq_rows, dk_rows, dv_rows, saved, tables, masked, penalty_tensors,
            sizes, scales, **constants, **penalty_constants,
            NQ=nq if static else 0, NK=nk if static else 0, GROUP=group, DROP=table is not None,
            KEY_N=plan.key_n, KEY_M=plan.key_m,
            KEY_TAIL_N=tail(nk, plan.key_n, static), KEY_TAIL_M=tail(nq, plan.key_m, static),
            QUERY_M=plan.query_m, QUERY_N=plan.query_n,
            QUERY_TAIL_M=tail(nq, plan.query_m, static),
            QUERY_TAIL_N=tail(nk, plan.query_n, static and not causal, kind == "last"),
            num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
        )  # fmt: skip
        if table is not None:
            each = group * flags.shape[2]
            share = each * max(1, SPAN // each)
            spared_kernel[(-(-flags.numel() // share),)](
                q_rows, k_rows, v_rows, dout_rows, dk_rows, dv_rows, saved, flags, tables, masked, sizes, scales,
                share, flags.numel(), **constants, BN=32, SPAN=SPAN, num_warps=4, num_stages=1,
            )  # fmt: skip


def forward_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor | None, scale: float, causal: bool, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """What `forward` gives, empty."""
    return (token_major(q, q.shape[1], q.shape[2], v.shape[3]), *_stats(q, table))


def backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, empty."""
    return token_major(q, *q.shape[1:]), token_major(k, *k.shape[1:]), token_major(v, *v.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill = inputs
    ctx.set_materialize_grads(False)  # zeros for integers, which nobody reads, would cost a launch each
    ctx.save_for_backward(q, k, v, *output, mask, table, tops, cuts, hard)


def _gradients(ctx: Any, dout: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    q, k, v, out, stats, flags, mask, table, tops, cuts, hard = ctx.saved_tensors
    backward = FusedAttentionBackward.apply if transformed() else torch.ops.attemper.fused_attention_backward
    grads = backward(dout, q, k, v, out, stats, flags, mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill)
    return (*grads, *([None] * 8))


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
