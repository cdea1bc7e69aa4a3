"""Attention with penalties on the queries, keys and values of one projection: all of their gradients in one piece.

A penalty reads Q, K or V and adds to their gradients. By itself it would have to read, add and write all three of them
once more, which takes as long as a third of attention's backward pass. Here the backward kernels add it to what they
are about to write (`penalty_gradients.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attemper.kernels.attention import operators
from attemper.kernels.attention.launch_arguments import PenaltyGradients
from attemper.kernels.attention.operators import OTHERS
from attemper.kernels.attention.packed import is_packed, lie_in, parts, views
from attemper.kernels.common.eager import is_plain
from attemper.kernels.common.flops import counted_by, grams_flops, packed_backward_flops, packed_flops, part
from attemper.kernels.common.launch import DEVICES
from attemper.kernels.penalties import logit_squares, output_square
from attemper.kernels.penalties.logits import squares_and_grams
from attemper.kernels.penalties.outputs import square_and_sums, totals

WANTED = "bool values, bool logits"
torch.library.define(
    "attemper::attention_with_squares",
    f"(Tensor qkv, Tensor? bias, Tensor q, Tensor k, Tensor v, {WANTED}, {OTHERS}) -> (Tensor, Tensor)",
)
torch.library.define(
    "attemper::penalised_attention",
    f"(Tensor qkv, Tensor? bias, int heads, {WANTED}, {OTHERS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "attemper::penalised_attention_backward",
    "(Tensor dout, Tensor factors, Tensor qkv, Tensor? bias, int heads, bool values, Tensor grams, Tensor shifts, "
    f"Tensor out, Tensor stats, Tensor flags, {OTHERS}) -> Tensor",
)


def with_squares(
    qkv: Tensor, bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor, values: bool, logits: bool, *others: Any
) -> tuple[Tensor, Tensor]:
    """`fused_attention` of q, k and v, and squares of what a projection gave, in float32.

    qkv: (B, N, 3 · H · e), what the projection gave for Q, K and V; bias: (3 · H · e,), None: it has none.
    values, logits: whether ‖V − b_v‖² and ‖(Q − b_q)(K − b_k)ᵀ‖² are asked for. The second result has one number for
        each that is, in this order.
    """
    if is_plain(q) and is_plain(qkv) and lie_in(qkv, q, k, v):
        out, squares = DirectPenalisedAttention.apply(qkv, bias, q.shape[1], values, logits, *operators.filled(others))
    else:
        out, squares = torch.ops.attemper.attention_with_squares(qkv, bias, q, k, v, values, logits, *others)
    return out, squares


def _with_squares(
    qkv: Tensor, bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor, values: bool, logits: bool, *others: Any
) -> tuple[Tensor, Tensor]:
    if is_packed(qkv, q, k, v):
        results = torch.ops.attemper.penalised_attention(qkv, bias, q.shape[1], values, logits, *others)
        return results[0], results[3]
    out = operators.fused_attention(q, k, v, *others)
    if not torch.compiler.is_compiling():
        qkv = qkv.clone()  # which the model may overwrite, since attention did not keep it
    (q, k, v), biases = qkv.chunk(3, -1), (None, None, None) if bias is None else bias.chunk(3)
    squares = []
    if values:
        squares.append(v.float().square().sum() if biases[2] is None else output_square(v, biases[2]))
    if logits:
        squares.append(logit_squares(q, k, biases[0], biases[1], out.shape[1]).sum())
    return out, torch.stack(squares)


def _forward(
    qkv: Tensor, bias: Tensor | None, heads: int, values: bool, logits: bool, *others: Any
) -> tuple[Tensor, ...]:
    """Output, stats, flags; squares; the sums of tokens that the bias' gradient needs; Gram matrices and shifts."""
    out, stats, flags = operators.forward(*_thirds(qkv, heads), *others)
    begin = qkv.shape[2] // 3 * 2
    squares, sums, grams, shifts = [], [], qkv.new_empty(0), qkv.new_empty(0, dtype=torch.float32)
    if values:
        square, columns = square_and_sums(qkv[..., begin:], None if bias is None else bias[begin:])
        squares, sums = [square], [columns]
    if logits:
        each, grams, of_samples, shifts = squares_and_grams(qkv, bias, heads)
        square, of_all = totals(each, of_samples)
        squares, sums = [*squares, square], [*sums, of_all]
    return out, stats, flags, *_joined(squares, sums), grams, shifts


def _thirds(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return views(qkv, heads) if qkv.is_contiguous() else parts(qkv, heads)


def _joined(squares: list[Tensor], sums: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One tensor each; nothing is launched for what is alone."""
    if len(squares) == 1:
        return squares[0].view(1), sums[0]
    return torch.stack(squares), torch.cat(sums)


def _forward_fake(
    qkv: Tensor, bias: Tensor | None, heads: int, values: bool, logits: bool, *others: Any
) -> tuple[Tensor, ...]:
    third = qkv.shape[2] // 3
    e = third // heads
    grams = qkv.new_empty((qkv.shape[0], heads, 2, e, e) if logits else (0,))
    shifts = (0,) if not logits else (qkv.shape[0], 0 if bias is None else 2 * third)
    sizes = ((values + logits,), ((values + 2 * logits) * third,), shifts)
    squares, sums, shifted = (qkv.new_empty(size, dtype=torch.float32) for size in sizes)
    return (*operators.forward_fake(*parts(qkv, heads), *others), squares, sums, grams, shifted)


def _backward(
    dout: Tensor, factors: Tensor, qkv: Tensor, bias: Tensor | None, heads: int, values: bool, grams: Tensor,
    shifts: Tensor, *others: Any,
) -> Tensor:  # fmt: skip
    grad = _backward_fake(dout, factors, qkv)
    bias = None if bias is None else bias.contiguous()
    penalty_gradients = PenaltyGradients(factors, bias, grams if grams.numel() else None, shifts, values)
    given, wanted = _thirds(qkv, heads), _thirds(grad, heads)
    operators.backward_into(wanted, dout, *given, *others, penalty_gradients=penalty_gradients)
    return grad


def _backward_fake(dout: Tensor, factors: Tensor, qkv: Tensor, *_: object) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[4:])
    _keep(ctx, inputs, output)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (qkv, bias, ctx.heads, ctx.values, ctx.logits, mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill) = (
        inputs
    )
    out, stats, flags, _, sums, grams, shifts = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(qkv, bias, out, stats, flags, sums, grams, shifts, mask, table, tops, cuts, hard)


def _gradients(ctx: Any, dout: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    qkv, bias, out, stats, flags, sums, grams, shifts, mask, table, tops, cuts, hard = ctx.saved_tensors
    dsquares = others[2]
    dout = torch.zeros_like(out) if dout is None else dout
    factors = sums.new_zeros(ctx.values + ctx.logits) if dsquares is None else 2 * dsquares
    direct = is_plain(dout) and not torch.is_grad_enabled()
    grad = (_backward if direct else torch.ops.attemper.penalised_attention_backward)(
        dout, factors, qkv, bias, ctx.heads, ctx.values, grams, shifts, out, stats, flags,
        mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill,
    )  # fmt: skip
    dbias = None if bias is None else _bias_gradient(factors, sums, ctx.values, ctx.logits, bias)
    return (grad, dbias, *([None] * 11))


class DirectPenalisedAttention(torch.autograd.Function):
    """The operator in eager mode (see `operators.DirectAttention`)."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, bias: Tensor | None, heads: int, values: bool, logits: bool, *others: Any
    ) -> tuple[Tensor, Tensor]:
        output = _forward(qkv, bias, heads, values, logits, *others)
        _keep(ctx, (qkv, bias, heads, values, logits, *others), output)
        return output[0], output[3]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dsquares: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dout, None, None, dsquares)


def _bias_gradient(factors: Tensor, sums: Tensor, values: bool, logits: bool, bias: Tensor) -> Tensor:
    """A bias is not penalised: what its layer's backward pass is going to add for it is taken away here."""
    third = bias.shape[0] // 3
    of_values = -factors[0] * sums[:third] if values else sums.new_zeros(third)
    of_logits = -factors[-1] * sums[-2 * third :] if logits else sums.new_zeros(2 * third)
    return torch.cat((of_logits, of_values)).to(bias.dtype)


torch.library.impl("attemper::attention_with_squares", "CompositeImplicitAutograd", _with_squares)
for _device in DEVICES:
    torch.library.impl("attemper::penalised_attention", _device, _forward)
    torch.library.impl("attemper::penalised_attention_backward", _device, _backward)
torch.library.register_fake("attemper::penalised_attention", _forward_fake)
torch.library.register_fake("attemper::penalised_attention_backward", _backward_fake)
torch.library.register_autograd("attemper::penalised_attention", _gradients, setup_context=_save)
torch.library.register_autograd("attemper::penalised_attention_backward", operators.no_second_gradients)


def _penalty_flops(qkv: Sequence[int], heads: int, logits: bool) -> int:
    """Gram matrices of Q and of K, or what their gradients are multiplied with; the squares of V are elementwise."""
    batch, _, tokens, e = part(qkv, heads)
    return 2 * grams_flops(batch * tokens, heads, e) if logits else 0


def _flops(qkv: Sequence[int], bias: Any, heads: int, values: bool, logits: bool, *_: object, **__: object) -> int:
    return packed_flops(qkv, heads) + _penalty_flops(qkv, heads, logits)


def _backward_flops(
    dout: Sequence[int], factors: Any, qkv: Sequence[int], bias: Any, heads: int, values: bool, grams: Sequence[int],
    *_: object, **__: object,
) -> int:  # fmt: skip
    return packed_backward_flops(dout, qkv, heads) + _penalty_flops(qkv, heads, len(grams) > 1)


counted_by(torch.ops.attemper.penalised_attention, _flops)
counted_by(torch.ops.attemper.penalised_attention_backward, _backward_flops)
