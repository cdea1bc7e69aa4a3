"""The squares of a layer's output without its bias, read once in each direction.

For code that is not compiled: a compiler takes the squares where it reads the output anyway.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.kernels.common.direct import Launch, is_aligned, memory, remember
from attemper.kernels.common.launch import DEVICES, launch, on_device

ROWS = 256  # that one program sums
TILE = {"BM": 64, "BN": 128}
_squares: dict[Any, "Squares"] = memory()
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


class Squares(NamedTuple):
    """A kernel that takes squares of blocks of rows. sums, squares: the shapes of what it gives."""

    launch: Launch
    sums: tuple[int, int]
    squares: tuple[int]


def square_and_sums(out: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """‖out − b‖², and the sums of the columns of out − b, in float32: out (B, N, …), bias (…)."""
    rows = as_rows(out)
    square, total = square_of_rows(rows, rows.stride(0), bias, 1.0)
    return square, total.view(out.shape[2:])


def square_of_rows(x: Tensor, step: int, bias: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    """factor · ‖x − b‖², a scalar, and the sums of the columns of x − b; see `squares_of_rows`."""
    squares, sums = squares_of_rows(x, step, bias, 1.0)
    return totals(squares, sums, factor)


def squares_of_rows(x: Tensor, step: int, bias: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    """Numbers whose sum is factor · ‖x − b‖², and (blocks, columns) of which the sums are those of x − b, in float32.

    x (…, columns): rows whose elements lie side by side, each `step` elements behind the one before.
    """
    bias = None if bias is None else bias.contiguous()
    key = (x.shape, step, x.dtype, None if bias is None else bias.dtype, x.get_device())
    found = _squares.get(key)
    if found is None:
        found = _plan_squares(x, bias)
        remember(_squares, key, found)
    sums = torch.empty(found.sums, dtype=torch.float32, device=x.device)
    squares, cols = torch.empty(found.squares, dtype=torch.float32, device=x.device), found.sums[1]
    aligned, rows = is_aligned(x, bias), x.numel() // cols
    with on_device(x):
        found.launch(aligned, x, x if bias is None else bias, sums, squares, step, rows, cols, factor)
    return squares, sums


def _plan_squares(x: Tensor, bias: Tensor | None) -> Squares:
    from attemper.kernels.penalties.kernels import square_kernel

    cols = x.shape[-1]
    blocks, across = -(-(x.numel() // cols) // ROWS), -(-cols // TILE["BN"])
    constants = {"BIAS": bias is not None, "SUMS": True, "PER": ROWS, **TILE}
    launch = Launch(square_kernel, (blocks, across), x.get_device(), **constants, num_warps=8)
    return Squares(launch, (blocks, cols), (blocks * across,))


def _square(out: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return square_and_sums(out, bias)


def totals(squares: Tensor, sums: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """factor · Σ squares, a scalar, and the sums of the columns of `sums`, (rows, columns): two sums in one launch."""
    rows, cols = sums.shape
    square, total = sums.new_empty(()), sums.new_empty(cols)
    key = (rows, cols, squares.numel(), sums.get_device())
    found = _totals.get(key)
    if found is None:
        found = _plan_totals(cols, sums.get_device())
        remember(_totals, key, found)
    with on_device(sums):
        found(is_aligned(sums, squares), sums, squares, total, square, rows, cols, squares.numel(), factor)
    return square, total


def _plan_totals(cols: int, device: int) -> Launch:
    from attemper.kernels.penalties.kernels import totals_kernel

    return Launch(totals_kernel, (-(-cols // 16) + 1, 1), device, BM=128, BN=16, LONG=1024, num_warps=4)


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
