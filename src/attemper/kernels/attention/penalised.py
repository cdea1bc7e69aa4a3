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
from attemper.kernels.attention.mask_gradients import mask_gradient
from attemper.kernels.attention.operators import OTHERS
from attemper.kernels.attention.packed import is_packed, lie_in, parts, views
from attemper.kernels.common.eager import is_plain
from attemper.kernels.common.flops import counted_by, grams_flops, packed_backward_flops, packed_flops, part
from attemper.kernels.common.launch import DEVICES
from attemper.kernels.penalties import logit_squares, output_square
from attemper.kernels.penalties.logits import squares_and_grams
from attemper.kernels.penalties.outputs import squares_of_rows, totals
from attemper.kernels.penalties.passing import bias_gradient
from attemper.ops.announced import announced

SQUARES = ("v", "qk")
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


@announced("attention")
def with_squares(
    qkv: Tensor, bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor, values: float, logits: float, *others: Any
) -> tuple[Tensor, ...]:
    """`fused_attention` of q, k and v, and squares of what a projection gave, in float32.

    qkv: (B, N, 3 · H · e), what the projection gave for Q, K and V; bias: (3 · H · e,), None: it has none.
    values, logits: factors of ‖V − b_v‖² and of ‖(Q − b_q)(K − b_k)ᵀ‖²; 0: that one is not asked for. Behind the
        output comes a scalar for each that is, or numbers whose sum is meant, in this order.
    """
    if is_plain(q, qkv) and lie_in(qkv, q, k, v):
        results: tuple[Tensor, ...] = DirectPenalisedAttention.apply(
            qkv, bias, values, logits, (q, k, v), None, *operators.filled(others)
        )
        return results
    wanted = values != 0, logits != 0
    out, squares = torch.ops.attemper.attention_with_squares(qkv, bias, q, k, v, *wanted, *others)
    factors = [factor for factor in (values, logits) if factor]
    return out, *(factor * square for factor, square in zip(factors, squares.unbind(), strict=True))


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
    attended = operators.forward(*_thirds(qkv, heads), *others)
    squares, sums, grams, shifts = _squares(qkv, bias, heads, values, logits)
    empty = qkv.new_empty(0), qkv.new_empty(0, dtype=torch.float32)
    return *attended, *_joined(squares, sums), *(empty if grams is None or shifts is None else (grams, shifts))


def _squares(
    qkv: Tensor, bias: Tensor | None, heads: int, values: bool, logits: bool
) -> tuple[list[Tensor], list[Tensor], Tensor | None, Tensor | None]:
    """Squares, the sums that go with them; Gram matrices and shifts, if logits are asked for."""
    squares, sums, grams, shifts = [], [], None, None
    if values:
        square, columns = totals(*_value_squares(qkv, bias, 1.0))
        squares, sums = [square], [columns]
    if logits:
        square, of_all, grams, shifts = _logit_square(qkv, bias, heads, 1.0)
        squares, sums = [*squares, square], [*sums, of_all]
    return squares, sums, grams, shifts


def _value_squares(qkv: Tensor, bias: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    """`squares_of_rows` of V."""
    begin = qkv.shape[2] // 3 * 2
    given = qkv if qkv.is_contiguous() else qkv.contiguous()
    return squares_of_rows(given[..., begin:], qkv.shape[2], None if bias is None else bias[begin:], factor)


def _logit_square(qkv: Tensor, bias: Tensor | None, heads: int, factor: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """factor · ‖(Q − b_q)(K − b_k)ᵀ‖², the sums that go with it, Gram matrices and shifts."""
    each, grams, of_samples, shifts = squares_and_grams(qkv, bias, heads)
    square, of_all = totals(each, of_samples, factor)
    return square, of_all, grams, shifts


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
    qkv, bias, ctx.heads, ctx.values, ctx.logits, *others = inputs
    mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop = others
    out, stats, flags, _, sums, grams, shifts = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(qkv, bias, out, stats, flags, sums, grams, shifts, mask, table, tops, cuts, hard)


def _gradients(ctx: Any, dout: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    qkv, bias, out, stats, flags, sums, grams, shifts, mask, table, tops, cuts, hard = ctx.saved_tensors
    dsquares = others[2]
    factors = sums.new_zeros(ctx.values + ctx.logits) if dsquares is None else 2 * dsquares
    arguments = (mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop)
    grad, dbias, dmask = _dispatched(
        torch.zeros_like(out) if dout is None else dout, factors, (qkv, bias, sums, grams, shifts),
        (out, stats, flags), arguments, ctx.heads, (ctx.values, ctx.logits), ctx.needs_input_grad[5],
    )  # fmt: skip
    return (grad, dbias, None, None, None, dmask, *([None] * 8))


def _dispatched(
    dout: Tensor, factors: Tensor, given: tuple[Any, ...], attended: tuple[Tensor, Tensor, Tensor],
    others: tuple[Any, ...], heads: int, wanted: tuple[bool, bool], masked: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of qkv, of the bias and, if asked for, of the mask, by operators.

    given: qkv, its bias, sums, Gram matrices, shifts. attended: output, stats, flags. wanted: which squares were.
    """
    qkv, bias, sums, *of_logits = given
    grams, shifts = (qkv.new_empty(0) if t is None else t for t in of_logits)
    grad = torch.ops.attemper.penalised_attention_backward(
        dout, factors, qkv, bias, heads, wanted[0], grams, shifts, *attended, *others
    )
    dbias = None if bias is None else _bias_gradient(factors, sums, *wanted, bias)
    dmask = mask_gradient(dout, *_thirds(qkv, heads), *attended, *others) if masked else None
    return grad, dbias, dmask


class DirectPenalisedAttention(torch.autograd.Function):
    """The operator in eager mode (see `operators.DirectAttention`), with factors of the squares.

    Of ‖V − b_v‖² it gives numbers whose sum is meant. given: the queries, keys and values in qkv; in a tuple, where
    autograd does not see them. known: a call of `repeats.py` that this one is, and its tables.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, bias: Tensor | None, values: float, logits: float,
        given: tuple[Tensor, Tensor, Tensor], known: tuple[Any, Any] | None, *others: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        out, stats, flags = operators.forward(*given, *others) if known is None else known[0].forward(*given, known[1])
        mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop = others
        squares, columns, sums, grams, shifts = [], None, None, None, None
        if values:
            square, columns = _value_squares(qkv, bias, values)
            squares.append(square)
        if logits:
            square, sums, grams, shifts = _logit_square(qkv, bias, given[0].shape[1], logits)
            squares.append(square)
        ctx.call, ctx.heads, ctx.factors = None if known is None else known[0], given[0].shape[1], (values, logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(qkv, bias, out, stats, flags, columns, sums, grams, shifts, mask, table, tops, cuts, hard)
        return out, *squares

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *dsquares: Tensor | None) -> tuple[Tensor | None, ...]:
        qkv, bias, out, stats, flags, columns, sums, grams, shifts, *kept = ctx.saved_tensors
        mask, table, tops, cuts, hard = kept
        others = (mask, table, ctx.scale, ctx.causal, tops, cuts, hard, ctx.fill, ctx.drop)
        values, logits = ctx.factors
        factors, scales = _first_of(dsquares, out), (2 * values, 2 * logits)
        dout = torch.zeros_like(out) if dout is None else dout
        if not is_plain(dout) or torch.is_grad_enabled():
            asked = [scale for scale in scales if scale]
            factors = factors.reshape(-1)[: len(asked)] * factors.new_tensor(asked)
            columns = None if columns is None else columns.sum(0)
            joined = torch.cat([x for x in (columns, sums) if x is not None])
            grad, dbias, dmask = _dispatched(
                dout, factors, (qkv, bias, joined, grams, shifts), (out, stats, flags), others, ctx.heads,
                (values != 0, logits != 0), ctx.needs_input_grad[6],
            )  # fmt: skip
            return (grad, dbias, *([None] * 4), dmask, *([None] * 8))
        grad = torch.empty_like(qkv)
        given = PenaltyGradients(
            factors, None if bias is None else bias.contiguous(), grams, stats if shifts is None else shifts,
            values != 0, scales,
        )  # fmt: skip
        attended, wanted = (*views(qkv, ctx.heads), out, stats, flags), views(grad, ctx.heads)
        if ctx.call is None:
            operators.backward_into(wanted, dout, *attended, *others, penalty_gradients=given)
        else:
            ctx.call.backward(dout, attended[:3], wanted, out, stats, flags, (table, hard, cuts), given)
        dbias = None if bias is None else bias_gradient(factors, scales, columns, sums, bias)
        dmask = mask_gradient(dout, *attended, *others) if ctx.needs_input_grad[6] else None
        return (grad, dbias, *([None] * 4), dmask, *([None] * 8))


def _first_of(grads: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """The gradients of squares, of which kernels read the first number: one that is meant as a sum has equal ones."""
    if len(grads) == 1 and grads[0] is not None:
        return grads[0]
    zero = like.new_zeros(1, dtype=torch.float32)
    return torch.cat([zero if grad is None else grad.view(-1)[:1] for grad in grads])


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
