"""Launches of the kernel that mixes the mean of all tokens into each of them: (x + mean) / 2.

With torch's operators it takes a mean, a sum and a quotient, and in backward the gradients of all three. The map is
linear and symmetric, so it is its own gradient, and nothing is kept for it. It is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attemper.kernels.common.devices import DTYPES, refuse_device
from attemper.kernels.common.direct import Launch, memory, remember
from attemper.kernels.common.eager import is_plain
from attemper.kernels.common.launch import is_here
from attemper.ops.announced import announced

MOST_TOKENS = 2048
"""Of a sample. One program goes over all of them; where they are many, torch shares them among several."""
_launches: dict[Any, Launch] = memory()


def mixes(x: Tensor) -> bool:
    """Whether tokens (B, …, C) can be given to `mixed`: they lie side by side, and only autograd follows them."""
    if is_traced() or not (is_plain(x) and x.dtype in DTYPES and x.dim() > 2 and x.is_contiguous() and x.numel() > 0):
        return False
    return x.shape[1:-1].numel() <= MOST_TOKENS and refuse_device(x.device) is None


def is_traced() -> bool:
    """Whether `torch.jit.trace` or an export that rests on it looks on: unlike a dispatch mode, it is not told."""
    return torch._C._get_tracing_state() is not None


@announced("same")
def mixed(x: Tensor) -> Tensor:
    """Tokens (B, …, C), half of each, and half of the mean of all tokens of its sample."""
    out: Tensor = Mixed.apply(x, MeanMix(x))
    return out


class MeanMix:
    """`mixed` of tensors like x, again and again: all that their layout decides is decided."""

    __slots__ = ("channels", "launch", "tokens")

    def __init__(self, x: Tensor) -> None:
        samples, self.tokens, self.channels = x.shape[0], x.shape[1:-1].numel(), x.shape[-1]
        key = (samples, self.tokens, self.channels, x.dtype, x.get_device())
        found = _launches.get(key)
        if found is None:
            from attemper.kernels.tokens.kernels import mix_kernel

            wide = 64 if samples * self.channels >= 64 * 256 else 32
            grid = samples, -(-self.channels // wide)
            found = Launch(mix_kernel, grid, x.get_device(), BN=32, BC=wide, num_warps=4)
            remember(_launches, key, found)
        self.launch = found

    def __call__(self, x: Tensor) -> Tensor:
        """The mixed tokens."""
        out: Tensor = Mixed.apply(x, self)
        return out

    def run(self, x: Tensor) -> Tensor:
        """The same without autograd, for contiguous x."""
        if not is_here(x):
            with torch.cuda.device(x.device):
                return self.run(x)
        out = torch.empty_like(x)
        self.launch(x.data_ptr() & 15 == 0, x, out, self.tokens, self.channels)
        return out


class Mixed(torch.autograd.Function):
    """`mixed`, which is its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mix: MeanMix) -> Tensor:
        ctx.mix = mix
        return mix.run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if not is_plain(grad):
            return (grad + grad.mean(tuple(range(1, grad.dim() - 1)), keepdim=True)) / 2, None
        grad = grad.contiguous()
        if torch.is_grad_enabled():  # somebody wants second gradients
            return Mixed.apply(grad, ctx.mix), None
        return ctx.mix.run(grad), None
