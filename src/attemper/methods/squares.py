"""Sums of squares for penalties, and gradients that read no more of a large tensor than they must."""

import functools
from typing import Any

import torch
from torch import Tensor

from attemper.methods.kinds import ConvolutionRecord, wide
from attemper.ops import fused
from attemper.ops.precision import without_autocast

SLICE = 64
PIECE = 512
NOTHING = 1e-30


# --------------------------------------------------------------------------------------------------- a layer's output
def linear_output_square(out: Tensor, bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """‖out − b‖² summed over everything, in float32 at least: out (B, N, o) is XWᵀ + b; x (B, N, i), weight (o, i)."""
    if bias is None:
        return _over_rows(wide(kept(out)))
    if weight.shape[0] <= weight.shape[1] or fused.penalties.reads(out):
        return biased_square(out, bias)
    with torch.no_grad():  # from the narrower side of the layer, and from what it read in its own precision
        columns = _columns_of_product(x.to(out.dtype), weight.to(out.dtype))
    square: Tensor = OutputSquare.apply(out.clone(), bias, columns, False)
    return square


def biased_square(out: Tensor, bias: Tensor) -> Tensor:
    """‖out − b‖² summed over everything, in float32 at least: out (B, N, …), bias (…)."""
    if fused.penalties.reads(out):
        return fused.penalties.output_square(kept(out), bias)
    columns = None
    if torch.compiler.is_compiling():  # which reads out once for the squares and for these
        with torch.no_grad():
            columns = (wide(out) - bias).sum((0, 1))
    square: Tensor = OutputSquare.apply(out.clone(), bias, columns, True)
    return square


def convolution_output_square(record: ConvolutionRecord) -> Tensor:
    """‖w ∗ x‖² summed over everything, in float32 at least, from what the convolution gave where that was seen."""
    out = record.convolve(record.x, record.weight) if record.output is None else record.output
    if record.output is None or record.bias is None:
        return wide(out.clone()).square().sum()
    return biased_square(out.flatten(2).mT, record.bias)


def convolution_own_square(record: ConvolutionRecord) -> Tensor:
    """Σ (w² ∗ x²), the part of ‖w ∗ x‖² that each input entry makes by itself, in float32 at least.

    Samples and the output channels of a group go together before anything is convolved, since all of it is summed.
    """
    power = wide(record.x).square().sum(0, keepdim=True)  # (1, C, …)
    weight = wide(record.weight).square()  # summed to (C, 1, …) of a transposed one, else to (groups, C/groups, …)
    grouped = weight if record.transposed else weight.unflatten(0, (record.groups, -1))
    with without_autocast(power):
        return record.convolve(power, grouped.sum(1, keepdim=record.transposed)).sum()


def _columns_of_product(x: Tensor, weight: Tensor) -> Tensor:
    """The sums of the columns of XWᵀ, from those of X. Not by `@`, which autocast would round."""
    return (wide(weight) * wide(x).sum((0, 1))).sum(-1)


def _over_rows(x: Tensor) -> Tensor:
    """Σ x², row by row first: a compiler then takes the squares where an activation or a norm reads the rows anyway.

    Rows are cut into pieces that it can hold on chip; longer ones it would go through in a loop, activation and all.
    """
    pieces = next(n for n in range(1, x.shape[-1] + 1) if x.shape[-1] % n == 0 and x.shape[-1] // n <= PIECE)
    square: Tensor = x.square().unflatten(-1, (pieces, -1)).sum(-1).sum(-1).sum(-1).sum()
    return square


def _over_columns(x: Tensor, columns: Tensor | None) -> Tensor:
    """Σ x², column by column first, as the sums of the columns are taken.

    A compiler would leave those for backward, and read x once more, if nothing in forward asked for them: hence a
    part of them that is far below any rounding. A zero would be seen through.
    """
    squares = x.square().sum((0, 1))
    return squares.sum() if columns is None else (squares + NOTHING * columns).sum()


def kept(out: Tensor) -> Tensor:
    """A copy, since the model may overwrite its own; compiled code has no such writes, but for what a function with a
    backward of its own keeps, which a compiler does not save from them."""
    return out if torch.compiler.is_compiling() else out.clone()


class OutputSquare(torch.autograd.Function):
    """Σ (out − b)². columns: the sums of the columns of out − b; None: backward takes them.

    That b is subtracted only cancels what its layer's own backward adds for it, so little should be read for it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor, bias: Tensor, columns: Tensor | None, by_columns: bool) -> Tensor:
        product = wide(out) - bias
        return _over_columns(product, columns) if by_columns else _over_rows(product)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, bool], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        out, bias, columns = ctx.saved_tensors
        product = wide(out) - bias
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # second gradients go through the columns
        if columns is None or again:
            columns = product.sum((0, 1))
        return (2 * grad * product).to(out.dtype), (-2 * grad * columns).to(bias.dtype), None, None


# ------------------------------------------------------------------------------------------------- products of outputs
def product_square(left: Tensor, right: Tensor) -> Tensor:
    """Σ ‖L Rᵀ‖² for (B, H, N, e): ⟨LᵀL, RᵀR⟩, in float32 at least."""
    with without_autocast(left):  # which would multiply in float16
        square: Tensor = ProductSquare.apply(left, right)
    return square


class ProductSquare(torch.autograd.Function):
    """`product_square`, in slices of at most SLICE columns, so that no d × d matrix is built.

    Of the two equal halves of each gradient one is multiplied. Nothing is kept but L and R.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        total = wide(left.new_zeros(()))
        for some in _slices(left.shape[-1]):
            total = total + (wide(_gram(left, some)) * wide(_gram(right, some))).sum()
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        return _gradient_of(left, right, grad), _gradient_of(right, left, grad)


def _gradient_of(x: Tensor, other: Tensor, grad: Tensor) -> Tensor:
    """What `ProductSquare` gives to one side: 2 g X · OᵀO."""
    parts = (x[..., some] @ (2 * grad * _gram(other, some)).to(x.dtype) for some in _slices(x.shape[-1]))
    return functools.reduce(torch.add, parts)


def _slices(width: int) -> list[slice]:
    return [slice(i, i + SLICE) for i in range(0, width, SLICE)]


def _gram(x: Tensor, some: slice) -> Tensor:
    """Some rows of XᵀX, (…, slice, e)."""
    return x[..., some].transpose(-2, -1) @ x
