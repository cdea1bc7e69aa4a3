"""Attention with the log-sum-exps of its rows, of which calls that have a part of the keys are merged.

The kernels are those of `fused_attention`. Its stats have the log-sum-exps, and their gradient changes one number of a
row in the backward pass. In a part of the keys a row that lost all of them has to come out empty. The kernels leave it
undropped; here its output and its gradient are set to zero.
"""

import math
from typing import Any

import torch
from torch import Tensor

from attemper.kernels.attention import operators
from attemper.kernels.attention.operators import OTHERS
from attemper.kernels.common.flops import attention_backward_flops, attention_flops, counted_by
from attemper.kernels.common.launch import DEVICES

torch.library.define(
    "attemper::attention_and_lse",
    f"(Tensor q, Tensor k, Tensor v, bool partial, {OTHERS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "attemper::attention_and_lse_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? dlse, bool partial, Tensor out, Tensor lse, Tensor stats, "
    f"Tensor flags, {OTHERS}) -> (Tensor, Tensor, Tensor)",
)


def attention_and_lse(q: Tensor, k: Tensor, v: Tensor, partial: bool, *others: Any) -> tuple[Tensor, Tensor]:
    """`fused_attention`, (B, H, Nq, e_v), and the natural log-sum-exps of its rows, (B, H, Nq) float32.

    partial: the call has a part of the keys, and a row that loses all of them has zeros, and −inf as its log-sum-exp.
    """
    out, lse, *_ = torch.ops.attemper.attention_and_lse(q, k, v, partial, *others)
    return out, lse


def _forward(q: Tensor, k: Tensor, v: Tensor, partial: bool, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, stats, flags = operators.forward(q, k, v, *others)
    lse = _natural(stats[:, :, :, : q.shape[2]].view(torch.float32), partial)
    if partial:
        out.masked_fill_((lse == -torch.inf)[..., None], 0.0)
    return out, lse, stats, flags


def _natural(stats: Tensor, partial: bool) -> Tensor:
    """Log-sum-exps (B, H, Nq) to the base of e, −inf where a row has no key.

    stats: float32 (planes, B, H, Nq). A row that was left undropped has +inf in the first, and its log-sum-exp in the
        last; a row without keys has +inf in both.
    """
    lse = stats[0] if partial else torch.where(stats[0] == torch.inf, stats[-1], stats[0])
    return torch.where(lse == torch.inf, -torch.inf, lse * math.log(2))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, partial: bool, *others: Any) -> tuple[Tensor, ...]:
    out, stats, flags = operators.forward_fake(q, k, v, *others)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32), stats, flags


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None, partial: bool, out: Tensor, lse: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    empty = lse == -torch.inf
    if partial:
        dout = dout.masked_fill(empty[..., None], 0.0)
    if dlse is not None:
        dlse = dlse.masked_fill(empty, 0.0)
    grads = operators.backward_fake(dout, q, k, v)
    operators.backward_into(grads, dout, q, k, v, out, *others, dlse=dlse)
    return grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.partial, mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, mask, table, tops, cuts, hard)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, stats, flags, mask, table, tops, cuts, hard = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    grads = torch.ops.attemper.attention_and_lse_backward(
        dout, q, k, v, dlse, ctx.partial, out, lse, stats, flags,
        mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop,
    )  # fmt: skip
    return (*grads, *([None] * 10))


for _device in DEVICES:
    torch.library.impl("attemper::attention_and_lse", _device, _forward)
    torch.library.impl("attemper::attention_and_lse_backward", _device, _backward)
torch.library.register_fake("attemper::attention_and_lse", _forward_fake)
torch.library.register_fake("attemper::attention_and_lse_backward", operators.backward_fake)
torch.library.register_autograd("attemper::attention_and_lse", _gradients, setup_context=_save)
torch.library.register_autograd("attemper::attention_and_lse_backward", operators.no_second_gradients)
counted_by(torch.ops.attemper.attention_and_lse, attention_flops)
counted_by(torch.ops.attemper.attention_and_lse_backward, attention_backward_flops)
