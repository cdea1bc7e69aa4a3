"""Attention of queries, keys and values that one projection made: their gradient comes in one piece, too.

Most vision transformers compute q, k and v by one linear layer and hand views of its output to attention. Three
gradients would have to be copied into one before that layer's backward pass, which takes a sixth as long as attention
itself. Here the kernels write them to where they belong.
"""

from typing import Any

import torch
from torch import Tensor

from attemper.kernels.attention import operators
from attemper.kernels.attention.mask_gradients import mask_gradient
from attemper.kernels.attention.operators import OTHERS
from attemper.kernels.common.eager import is_plain
from attemper.kernels.common.flops import counted_by, packed_backward_flops, packed_flops
from attemper.kernels.common.launch import DEVICES
from attemper.ops.announced import announced

torch.library.define(
    "attemper::packed_or_fused_attention", f"(Tensor qkv, Tensor q, Tensor k, Tensor v, {OTHERS}) -> Tensor"
)
torch.library.define("attemper::packed_attention", f"(Tensor qkv, int heads, {OTHERS}) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    "attemper::packed_attention_backward",
    f"(Tensor dout, Tensor qkv, int heads, Tensor out, Tensor stats, Tensor flags, {OTHERS}) -> Tensor",
)


def parts(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views (B, H, N, e) of the queries, keys and values in qkv (B, N, 3 · H · e)."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def is_packed(qkv: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k and v are those views, memory and all: a tensor that only looks like one has a memory of its own."""
    batch, heads, tokens, width = q.shape
    if qkv.shape != (batch, tokens, 3 * heads * width) or qkv.dtype != q.dtype:
        return False
    return all(
        given.shape == part.shape
        and given.stride() == part.stride()
        and given.storage_offset() == part.storage_offset()
        and given.untyped_storage()._cdata == part.untyped_storage()._cdata
        for given, part in zip((q, k, v), parts(qkv, heads), strict=True)
    )


def lie_in(qkv: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """`is_packed` of plain tensors, by their addresses."""
    batch, heads, tokens, width = q.shape
    step = heads * width
    if qkv.shape != (batch, tokens, 3 * step) or qkv.dtype != q.dtype or not qkv.is_contiguous():
        return False
    strides = (3 * step * tokens, width, 3 * step, 1)
    if q.stride() != strides or k.stride() != strides or v.stride() != strides or not q.shape == k.shape == v.shape:
        return False
    start, third = qkv.data_ptr(), step * qkv.element_size()
    return q.data_ptr() == start and k.data_ptr() == start + third and v.data_ptr() == start + 2 * third


def views(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """`parts` of a contiguous tensor, which autograd need not follow."""
    batch, tokens, all_ = qkv.shape
    step, at = all_ // 3, qkv.storage_offset()
    shape, strides = (batch, heads, tokens, step // heads), (all_ * tokens, step // heads, all_, 1)
    return (
        qkv.as_strided(shape, strides, at),
        qkv.as_strided(shape, strides, at + step),
        qkv.as_strided(shape, strides, at + 2 * step),
    )


@announced("attention")
def either(qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    """`fused_attention` of q, k and v, in one piece if they are the parts of qkv.

    As a composite operator it is run as it is when a compiler traces the call, since only then it is known whose
    memory is whose.
    """
    out: Tensor
    if is_plain(q, qkv):
        if not lie_in(qkv, q, k, v):
            return operators.fused_attention(q, k, v, *others)
        out = DirectPackedAttention.apply(qkv, q.shape[1], (q, k, v), *operators.filled(others))
        return out
    out = torch.ops.attemper.packed_or_fused_attention(qkv, q, k, v, *others)
    return out


def _either(qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    if is_packed(qkv, q, k, v):
        out: Tensor = torch.ops.attemper.packed_attention(qkv, q.shape[1], *others)[0]
        return out
    return operators.fused_attention(q, k, v, *others)


def _forward(qkv: Tensor, heads: int, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return operators.forward(*parts(qkv, heads), *others)


def _forward_fake(qkv: Tensor, heads: int, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return operators.forward_fake(*parts(qkv, heads), *others)


def _backward(dout: Tensor, qkv: Tensor, heads: int, *others: Any) -> Tensor:
    grad = _backward_fake(dout, qkv)
    operators.backward_into(parts(grad, heads), dout, *parts(qkv, heads), *others)
    return grad


def _backward_fake(dout: Tensor, qkv: Tensor, *_: object) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    qkv, ctx.heads, mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(qkv, *output, mask, table, tops, cuts, hard)


def gradient(dout: Tensor, qkv: Tensor, heads: int, out: Tensor, stats: Tensor, flags: Tensor, *others: Any) -> Tensor:
    """The gradient of qkv, by the operator."""
    grad: Tensor = torch.ops.attemper.packed_attention_backward(dout, qkv, heads, out, stats, flags, *others)
    return grad


def _gradients(ctx: Any, dout: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    qkv, out, stats, flags, mask, table, tops, cuts, hard = ctx.saved_tensors
    others = (mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop)
    grad = gradient(dout, qkv, ctx.heads, out, stats, flags, *others)
    return (grad, None, _mask_gradient(ctx, 2, dout, qkv, out, stats, flags, *others), *([None] * 8))


def _mask_gradient(ctx: Any, at: int, dout: Tensor, qkv: Tensor, *others: Any) -> Tensor | None:
    """The gradient of the mask, which is the argument at this place, if it needs one."""
    return mask_gradient(dout, *parts(qkv, ctx.heads), *others) if ctx.needs_input_grad[at] else None


class DirectPackedAttention(torch.autograd.Function):
    """The operator in eager mode (see `operators.DirectAttention`).

    given: the queries, keys and values in qkv; in a tuple, where autograd does not see them.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, given: tuple[Tensor, Tensor, Tensor], *others: Any) -> Tensor:
        output = operators.forward(*given, *others)
        _save(ctx, (qkv, heads, *others), output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 12
        if not is_plain(dout) or torch.is_grad_enabled():
            grad, _, dmask, *_ = _gradients(ctx, dout)
            return (grad, None, None, dmask, *([None] * 8))
        qkv, out, stats, flags, mask, table, tops, cuts, hard = ctx.saved_tensors
        others = (mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop)
        grad = torch.empty_like(qkv)
        given, wanted = views(qkv, ctx.heads), views(grad, ctx.heads)
        operators.backward_into(wanted, dout, *given, out, stats, flags, *others)
        dmask = _mask_gradient(ctx, 3, dout, qkv, out, stats, flags, *others)
        return (grad, None, None, dmask, *([None] * 8))


torch.library.impl("attemper::packed_or_fused_attention", "CompositeImplicitAutograd", _either)
for _device in DEVICES:
    torch.library.impl("attemper::packed_attention", _device, _forward)
    torch.library.impl("attemper::packed_attention_backward", _device, _backward)
torch.library.register_fake("attemper::packed_attention", _forward_fake)
torch.library.register_fake("attemper::packed_attention_backward", _backward_fake)
torch.library.register_autograd("attemper::packed_attention", _gradients, setup_context=_save)
torch.library.register_autograd("attemper::packed_attention_backward", operators.no_second_gradients)
counted_by(torch.ops.attemper.packed_attention, packed_flops)
counted_by(torch.ops.attemper.packed_attention_backward, packed_backward_flops)
