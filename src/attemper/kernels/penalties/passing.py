"""A layer's output, passed on, and the square of it: what a penalty adds to a gradient is added as that comes by.

An operator that takes the output of a layer beside the model has to keep a copy, and autograd to add its gradient to
the model's: launches and sweeps more in each direction. Here the output goes through the function to the model, and
its backward pass adds to the model's gradient in the sweep that makes its own.
"""

from typing import Any

import torch
from torch import Tensor

from attemper.errors import UnmetError
from attemper.kernels.common.direct import Launch, is_aligned, memory, remember
from attemper.kernels.common.launch import on_device
from attemper.kernels.penalties.outputs import TILE, as_rows, square_of_rows
from attemper.ops.announced import announced

__all__ = ["Untouched", "bias_gradient", "passed_square"]

_backwards: dict[Any, Launch] = memory()
_biases: dict[Any, Launch] = memory()


class Untouched:
    """Whether a model leaves the output of a layer as it is, as its last backward pass has seen."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known = False


@announced("same")
def passed_square(out: Tensor, bias: Tensor | None, factor: float, untouched: Untouched) -> tuple[Tensor, Tensor]:
    """The output, and factor · ‖out − b‖² in float32: out (…, columns), bias (columns,).

    Only where nobody but autograd takes part (`common/eager.py`), and nobody hooks what it saves.
    untouched: as long as it does not know, a copy is kept, since activations may overwrite what they get.
    """
    passed, term = PassedSquare.apply(out, bias, factor, untouched)
    return passed, term


class PassedSquare(torch.autograd.Function):
    """`passed_square`. What is kept differs from pass to pass, what is computed from it does not."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, bias: Tensor | None, factor: float, untouched: Untouched
    ) -> tuple[Tensor, Tensor]:
        term, columns = square_of_rows(*_rows(out), bias, factor)
        # The same memory, but no view of the input: the model may write into it, which its version tells.
        passed = out.data
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.untouched = factor, untouched
        if untouched.known:
            ctx.save_for_backward(passed, bias, columns)
            return passed, term
        ctx.save_for_backward(out, bias, columns)
        ctx.copy, ctx.seen = out.clone(), passed.detach()  # which shares the version of what it is detached from
        ctx.version = ctx.seen._version
        return passed, term

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dterm: Tensor | None) -> tuple[Tensor | None, ...]:
        if dterm is None:
            return dout, None, None, None
        out, bias, columns = _kept(ctx)
        if not torch.is_grad_enabled():
            return *_gradients(out, bias, columns, dout, dterm, ctx.factor), None, None
        product = out.float() if bias is None else out.float() - bias  # second gradients go through torch
        grad = 2 * ctx.factor * dterm * product
        dbias = None if bias is None else -grad.flatten(0, -2).sum(0).to(bias.dtype)
        return (grad if dout is None else grad + dout).to(out.dtype), dbias, None, None


def _kept(ctx: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """The output as it was, the bias, the sums of its columns."""
    try:
        out, bias, columns = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error) or not ctx.untouched.known:
            raise
        raise UnmetError(
            "the model overwrote the output of a layer that has a penalty, and in passes before it did not: what the "
            "penalty's gradient needs is gone. Use activations that do not work in place."
        ) from error
    seen = getattr(ctx, "seen", None)
    if seen is None:
        return out, bias, columns
    ctx.untouched.known = seen._version == ctx.version
    return Valued.apply(out, ctx.copy) if torch.is_grad_enabled() else ctx.copy, bias, columns


class Valued(torch.autograd.Function):
    """Values of the second argument, whose gradients are those of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """Rows whose elements lie side by side, and how far they are from each other; a copy only where there are none."""
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = as_rows(x[None])
    return rows, rows.stride(0)


def _gradients(
    out: Tensor, bias: Tensor | None, columns: Tensor, dout: Tensor | None, dterm: Tensor, factor: float
) -> tuple[Tensor, Tensor | None]:
    """What the output and its bias get, in one launch."""
    (x, step), grad = _rows(out), torch.empty(out.shape, dtype=out.dtype, device=out.device)
    more, more_step = (None, 0) if dout is None else _rows(dout)
    bias = None if bias is None else bias.contiguous()
    dbias = None if bias is None else torch.empty_like(bias)
    cols = x.shape[-1]
    rows = x.numel() // cols
    key = (
        rows, cols, step, x.dtype, None if bias is None else bias.dtype,
        more_step, None if more is None else more.dtype, x.get_device(),
    )  # fmt: skip
    found = _backwards.get(key)
    if found is None:
        from attemper.kernels.penalties.passing_kernels import passed_kernel

        grid = -(-rows // TILE["BM"]), -(-cols // TILE["BN"])
        constants = {"BIAS": bias is not None, "ADD": more is not None, **TILE}
        found = Launch(passed_kernel, grid, x.get_device(), **constants, num_warps=8)
        remember(_backwards, key, found)
    with on_device(x):
        found(
            is_aligned(x, bias, more, dterm, columns), x, x if bias is None else bias, x if more is None else more,
            dterm, columns, grad, columns if dbias is None else dbias, step, more_step, rows, cols, 2 * factor,
        )  # fmt: skip
    return grad, dbias


def bias_gradient(factors: Tensor, sums: Tensor, values: bool, logits: bool, bias: Tensor) -> Tensor:
    """What the bias (3 · H · e) of Q, K and V together gets, in one launch.

    It is not penalised: what its layer's backward pass is going to add for it is taken away here.
    factors: what the gradient of each square is multiplied with, that of V first. sums: of the columns that it is then
        multiplied with, those of V first, then of Q and K.
    """
    grad = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    third = bias.shape[0] // 3
    key = (third, bias.dtype, bias.get_device(), values, logits)
    found = _biases.get(key)
    if found is None:
        from attemper.kernels.penalties.passing_kernels import bias_kernel

        constants = {"VALUES": values, "LOGITS": logits, "BLOCK": 256}
        found = Launch(bias_kernel, -(-3 * third // 256), bias.get_device(), **constants, num_warps=4)
        remember(_biases, key, found)
    with on_device(bias):
        found(is_aligned(factors, sums), factors, sums, grad, third)
    return grad
