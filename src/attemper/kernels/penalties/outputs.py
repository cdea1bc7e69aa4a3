"""The squares of a layer's output without its bias, read once in each direction.

For code that is not compiled: a compiler takes the squares where it reads the output anyway.
"""

from typing import Any

import torch
from torch import Tensor

from attemper.kernels.common.direct import Launch, is_aligned, layout, memory, remember
from attemper.kernels.common.launch import DEVICES, launch, on_device

ROWS = 256  # that one program sums
TILE = {"BM": 64, "BN": 128}
_squares: dict[Any, Launch] = memory()
_totals: dict[Any, Launch] = memory()

torch.library.define("attemper::output_square", "(Tensor out, Tensor bias) -> (Tensor, Tensor)")
torch.library.define("attemper::scaled_difference", "(Tensor out, Tensor bias, Tensor scale) -> Tensor")


def output_square(out: Tensor, bias: Tensor) -> Tensor:
    """‖out − b‖², a float32 scalar: out (B, N, …), bias (…)."""
    square: Tensor = torch.ops.attemper.output_square(out, bias)[0]
    return square


def as_rows(out: Tensor) -> Tensor:
    """(B · N, columns), a copy only where the elements of a token do not lie side by side."""
    x = out.reshape(out.shape[0] * out.shape[1], -1)
    return x if x.stride(1) == 1 else x.contiguous()


def square_and_sums(out: Tensor, bias: Tensor | None, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """factor · ‖out − b‖², and the sums of the columns of out − b, in float32: out (B, N, …), bias (…)."""
    x = as_rows(out)
    rows, cols = x.shape
    blocks, across = -(-rows // ROWS), -(-cols // TILE["BN"])
    sums = x.new_empty((blocks, cols), dtype=torch.float32)
    squares = x.new_empty((blocks, across), dtype=torch.float32)
    bias = None if bias is None else bias.contiguous()
    key = (*layout(x, bias), x.get_device())
    found = _squares.get(key)
    if found is None:
        from attemper.kernels.penalties.kernels import square_kernel

        constants = {"BIAS": bias is not None, "PER": ROWS, **TILE}
        found = Launch(square_kernel, (blocks, across), x.get_device(), **constants, num_warps=8)
        remember(_squares, key, found)
    with on_device(x):
        found(is_aligned(x, bias), x, x if bias is None else bias, sums, squares, x.stride(0), rows, cols)
    square, total = totals(squares, sums, factor)
    return square, total.view(out.shape[2:])


def _square(out: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return square_and_sums(out, bias)


def totals(squares: Tensor, sums: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """factor · Σ squares, a scalar, and the sums of the columns of `sums`, (rows, columns): two sums in one launch."""
    rows, cols = sums.shape
    square, total = sums.new_empty(()), sums.new_empty(cols)
    key = (rows, cols, squares.numel(), sums.get_device())
    found = _totals.get(key)
    if found is None:
        from attemper.kernels.penalties.kernels import totals_kernel

        constants = {"BM": 128, "BN": 16, "LONG": 1024}
        found = Launch(totals_kernel, (-(-cols // 16) + 1, 1), sums.get_device(), **constants, num_warps=4)
        remember(_totals, key, found)
    with on_device(sums):
        found(is_aligned(sums, squares), sums, squares, total, square, rows, cols, squares.numel(), factor)
    return square, total


def _square_fake(out: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return out.new_empty((), dtype=torch.float32), bias.new_empty(bias.shape, dtype=torch.float32)


def _difference(out: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    from attemper.kernels.penalties.kernels import difference_kernel

    x, result = as_rows(out), _difference_fake(out)
    rows, cols = x.shape
    with on_device(x):
        launch(
            difference_kernel,
            (-(-rows // TILE["BM"]), -(-cols // TILE["BN"])),
            x,
            bias.contiguous(),
            scale,
            result,
            x.stride(0),
            rows,
            cols,
            **TILE,
            num_warps=8,
        )
    return result


def _difference_fake(out: Tensor, *_: object) -> Tensor:
    return torch.empty(out.shape, dtype=out.dtype, device=out.device)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    out, bias, columns = ctx.saved_tensors
    if torch.is_grad_enabled():  # second gradients go through torch
        product = out.float() - bias
        return (2 * grad * product).to(out.dtype), (-2 * grad * product.sum((0, 1))).to(bias.dtype)
    return torch.ops.attemper.scaled_difference(out, bias, 2 * grad), (-2 * grad * columns).to(bias.dtype)


for _device in DEVICES:
    torch.library.impl("attemper::output_square", _device, _square)
    torch.library.impl("attemper::scaled_difference", _device, _difference)
torch.library.register_fake("attemper::output_square", _square_fake)
torch.library.register_fake("attemper::scaled_difference", _difference_fake)
torch.library.register_autograd("attemper::output_square", _gradients, setup_context=_save)
