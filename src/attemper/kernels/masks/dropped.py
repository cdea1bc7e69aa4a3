"""What a stream drops of tokens and of residual branches, in one launch each way.

With torch's operators it takes a mask, a quotient and a choice, and in backward the latter two again. Here nothing is
kept for backward but where the stream starts: its kernel makes the mask once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.kernels.common.devices import DTYPES, refuse_device
from attemper.kernels.common.direct import Launch, memory, remember
from attemper.kernels.common.eager import is_plain
from attemper.kernels.common.launch import is_here
from attemper.kernels.masks.launches import tile
from attemper.ops.announced import announced
from attemper.ops.stream import LANES, NOWHERE, Offsets, Stream, signed, threshold

__all__ = ["BranchDrop", "TokenDrop", "adds", "dropped_branch", "dropped_sum", "dropped_tokens", "drops"]
BLOCK = 1024
"""Elements of a branch in one program."""
_launches: dict[Any, Launch] = memory()


class Drawn(NamedTuple):
    """Where a stream starts, as kernels take it; path: `Stream.path`."""

    seed: Tensor
    site: int
    path: int
    at: Offsets = NOWHERE

    def stream(self, at: Offsets) -> Stream:
        """The stream, read from a place."""
        return Stream(self.seed, self.path % LANES, site=self.site, call=self.path // LANES, at=at)


def start_of(drawn: Stream) -> Drawn:
    """Where a stream starts."""
    return Drawn(drawn.seed, drawn.site, signed(drawn.path), drawn.at)


def drops(x: Tensor) -> bool:
    """Whether a tensor can be given to these functions: its elements lie side by side, and only autograd follows it."""
    taken = is_plain(x) and x.dtype in DTYPES and x.is_contiguous()
    return taken and x.numel() > 0 and x.dim() > 1 and refuse_device(x.device) is None


def adds(stream: Tensor, branch: Tensor) -> bool:
    """Whether `dropped_sum` can be asked. A mode that follows functions would take it for something else than a sum."""
    alike = stream.shape == branch.shape and stream.device == branch.device
    return alike and drops(stream) and drops(branch) and not torch._C._is_torch_function_mode_enabled()


# -------------------------------------------------------------------------------------------------------------- tokens
@announced("same")
def dropped_tokens(x: Tensor, drawn: Stream, p: float) -> Tensor:
    """x (B, …, C), or (N, C), where `drawn` keeps it for head 0, divided by 1 − p; zeros elsewhere."""
    out: Tensor = DroppedTokens.apply(x, start_of(drawn), TokenDrop(x, p))
    return out


class TokenDrop:
    """`dropped_tokens` of tensors like x, again and again: all that their layout decides is decided."""

    __slots__ = ("channels", "keep", "launch", "limit", "p", "rows", "scale", "tokens")

    def __init__(self, x: Tensor, p: float) -> None:
        self.channels, samples = x.shape[-1], x.shape[0] if x.dim() > 2 else 1
        self.rows = x.numel() // self.channels
        self.tokens = self.rows // samples
        self.p, self.limit, self.scale = p, threshold(p), 1 / (1 - p)
        key = (samples, self.tokens, self.channels, x.dtype, x.get_device())
        found = _launches.get(key)
        if found is None:
            from attemper.kernels.masks.kernels import dropped_kernel

            across, down = tile(self.channels)
            grid = -(-self.rows // down), -(-self.channels // across)
            found = Launch(dropped_kernel, grid, x.get_device(), BM=down, BN=across, num_warps=4)
            remember(_launches, key, found)
        self.launch = found

    def __call__(self, x: Tensor, seed: Tensor, site: int, call: int) -> Tensor:
        """The tokens as they are dropped by the stream of the first lane."""
        out: Tensor = DroppedTokens.apply(x, (seed, site, signed(call * LANES), NOWHERE), self)
        return out

    def run(self, x: Tensor, drawn: Any) -> Tensor:
        """The same without autograd, for contiguous x."""
        if not is_here(x):
            with torch.cuda.device(x.device):
                return self.run(x, drawn)
        seed, site, path, at = drawn
        out = torch.empty_like(x)
        self.launch(
            (x.data_ptr() | seed.data_ptr()) & 15 == 0, seed, x, out, self.limit, self.scale, self.tokens,
            self.channels, self.rows, site, path, at[0], at[2], at[3],
        )  # fmt: skip
        return out


class DroppedTokens(torch.autograd.Function):
    """`dropped_tokens`, which is its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, drawn: Any, drop: TokenDrop) -> Tensor:
        ctx.drawn, ctx.drop = drawn, drop
        return drop.run(x, drawn)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        drawn, drop = ctx.drawn, ctx.drop
        if not is_plain(grad):
            at = Drawn(*drawn)
            shape = drop.rows // drop.tokens, 1, drop.tokens, drop.channels
            kept = at.stream(at.at._replace(head=0)).keep(shape, drop.p)
            return torch.where(kept.view(grad.shape), grad * drop.scale, 0.0), None, None
        grad = grad.contiguous()
        if torch.is_grad_enabled():  # somebody wants second gradients
            return DroppedTokens.apply(grad, drawn, drop), None, None
        return drop.run(grad, drawn), None, None


# ------------------------------------------------------------------------------------------------------------ branches
@announced("same")
def dropped_branch(branch: Tensor, drawn: Stream, p: float) -> Tensor:
    """A residual branch (B, …) in the samples that keep it, divided by 1 − p; zeros in the others."""
    out: Tensor = DroppedBranch.apply(branch, start_of(drawn), BranchDrop(branch, branch, p))
    return out


def dropped_sum(stream: Tensor, branch: Tensor, drawn: Stream, p: float) -> Tensor:
    """The residual stream with that added to it, rounded once; where `adds` of both."""
    out: Tensor = DroppedSum.apply(stream, branch, start_of(drawn), BranchDrop(stream, branch, p))
    return out


class BranchDrop:
    """`dropped_sum` of tensors like these, again and again."""

    __slots__ = ("back", "each", "launch", "limit", "of_branch", "of_stream", "of_sum", "p", "scale")

    def __init__(self, stream: Tensor, branch: Tensor, p: float) -> None:
        self.of_stream, self.of_branch = stream.dtype, branch.dtype
        self.of_sum = torch.promote_types(stream.dtype, branch.dtype)
        samples = branch.shape[0]
        self.p, self.limit, self.scale, self.each = p, threshold(p), 1 / (1 - p), branch.numel() // samples
        self.launch, self.back = (self.prepare(add, branch, samples) for add in (True, False))

    def prepare(self, add: bool, branch: Tensor, samples: int) -> Launch:
        """The launch of a sum, or of what a branch gets."""
        key = (samples, self.each, add, self.of_stream, self.of_branch, branch.get_device())
        found = _launches.get(key)
        if found is None:
            from attemper.kernels.masks.kernels import branch_kernel

            grid = samples, -(-self.each // BLOCK)
            found = Launch(branch_kernel, grid, branch.get_device(), ADD=add, BLOCK=BLOCK, num_warps=4)
            remember(_launches, key, found)
        return found

    def __call__(self, stream: Tensor, branch: Tensor, seed: Tensor, site: int, call: int) -> Tensor:
        """The sum, by the stream of the first lane."""
        out: Tensor = DroppedSum.apply(stream, branch, (seed, site, signed(call * LANES), NOWHERE), self)
        return out

    def run(self, stream: Tensor | None, branch: Tensor, dtype: torch.dtype, drawn: Any) -> Tensor:
        """The sum without autograd, or the branch as it is dropped; of contiguous tensors."""
        if not is_here(branch):
            with torch.cuda.device(branch.device):
                return self.run(stream, branch, dtype, drawn)
        seed, site, path, at = drawn
        out = torch.empty_like(branch, dtype=dtype)
        first, launch = (branch, self.back) if stream is None else (stream, self.launch)
        launch(
            (branch.data_ptr() | first.data_ptr() | seed.data_ptr()) & 15 == 0, seed, branch, first, out, self.limit,
            self.scale, self.each, site, path, at[0],
        )  # fmt: skip
        return out

    def gradient(self, grad: Tensor, dtype: torch.dtype, drawn: Any) -> Tensor:
        """What a branch of this dtype gets."""
        if not is_plain(grad):
            at = Drawn(*drawn)
            kept = at.stream(Offsets(at.at.sample)).keep((grad.shape[0], 1, 1, 1), self.p)
            return torch.where(kept.view(-1, *[1] * (grad.dim() - 1)), grad * self.scale, 0.0).to(dtype)
        grad = grad.contiguous()
        if torch.is_grad_enabled():
            out: Tensor = DroppedBranch.apply(grad, drawn, BranchDrop(grad, grad, self.p))
            return out.to(dtype)
        return self.run(None, grad, dtype, drawn)


class DroppedBranch(torch.autograd.Function):
    """`dropped_branch`, which is its own gradient."""

    @staticmethod
    def forward(ctx: Any, branch: Tensor, drawn: Any, drop: BranchDrop) -> Tensor:
        ctx.drawn, ctx.drop = drawn, drop
        return drop.run(None, branch, branch.dtype, drawn)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.drop.gradient(grad, grad.dtype, ctx.drawn), None, None


class DroppedSum(torch.autograd.Function):
    """`dropped_sum`."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, branch: Tensor, drawn: Any, drop: BranchDrop) -> Tensor:
        ctx.drawn, ctx.drop = drawn, drop
        return drop.run(stream, branch, drop.of_sum, drawn)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        drop, (of_stream, of_branch, *_) = ctx.drop, ctx.needs_input_grad
        passed = grad.to(drop.of_stream) if of_stream else None
        return passed, drop.gradient(grad, drop.of_branch, ctx.drawn) if of_branch else None, None, None
