"""The squares of a layer's output without its bias, read once in each direction.

For code that is not compiled: a compiler takes the squares where it reads the output anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attemper.ops.triton_attention.launch import DEVICES, on_device

__all__ = ["output_square"]

ROWS = 512  # that one program sums
TILE = {"BM": 16, "BN": 128}

torch.library.define("attemper::output_square", "(Tensor out, Tensor bias) -> (Tensor, Tensor)")
torch.library.define("attemper::scaled_difference", "(Tensor out, Tensor bias, Tensor scale) -> Tensor")


def output_square(out: Tensor, bias: Tensor) -> Tensor:
    """‖out − b‖², a float32 scalar: out (B, N, …), bias (…)."""
    square: Tensor = torch.ops.attemper.output_square(out, bias)[0]
    return square


def _as_rows(out: Tensor) -> Tensor:
    """(B · N, columns), a copy only where the elements of a token do not lie side by side."""
    x = out.reshape(out.shape[0] * out.shape[1], -1)
    return x if x.stride(1) == 1 else x.contiguous()


def _square(out: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from attemper.ops.triton_penalties.kernels import square_kernel

    x = _as_rows(out)
    rows, cols = x.shape
    blocks = -(-rows // ROWS)
    sums, squares = x.new_empty((2, blocks, cols), dtype=torch.float32).unbind()
    with on_device(x):
        square_kernel[(blocks, -(-cols // TILE["BN"]))](
            x, bias.contiguous(), sums, squares, x.stride(0), rows, cols, PER=ROWS, **TILE, num_warps=4
        )
    return squares.sum(), sums.sum(0).view(bias.shape)


def _square_fake(out: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return out.new_empty((), dtype=torch.float32), bias.new_empty(bias.shape, dtype=torch.float32)


def _difference(out: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    from attemper.ops.triton_penalties.kernels import difference_kernel

    x, result = _as_rows(out), _difference_fake(out)
    rows, cols = x.shape
    with on_device(x):
        difference_kernel[(-(-rows // TILE["BM"]), -(-cols // TILE["BN"]))](
            x, bias.contiguous(), scale, result, x.stride(0), rows, cols, **TILE, num_warps=4
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
