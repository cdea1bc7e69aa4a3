"""Watching a whole pass: which modules compute attention, and which layers make gates."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.tempering.residual import Known, uses_weight


class CallWatch(TorchFunctionMode):
    """Notes attention that runs outside of the given modules, and MLPs whose output becomes a factor.

    inside: names of modules whose attention is known. mlps: names of MLPs, and of their last layers.
    """

    def __init__(self, model: nn.Module, inside: set[str], mlps: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.inside = inside
        self.lasts = [(name, model.get_submodule(last)) for name, last in mlps]
        self.outside: dict[str, int] = {}
        """Module → how many attention calls it made."""
        self.gates: list[str] = []
        self.weights = Known(None)
        """What softmax gave, and the module that called it."""
        self.pooled = Known(None)
        """What MLPs made of a single position: the MLP, and how many numbers they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return out
        if func in FUSED:
            self.note(self.caller())
        elif func in SOFTMAX:
            if is_over_last_axis(*args, **kwargs):
                self.weights.note(out, self.caller())
        elif func in PRODUCTS:
            self.note(self.weights.first((*args, *kwargs.values())))
            self.find_pooled(args, out)
        else:
            self.pass_on(func, args, out)
        return out

    def note(self, caller: str | None) -> None:
        if caller is not None:
            self.outside[caller] = self.outside.get(caller, 0) + 1

    def caller(self) -> str | None:
        """The module whose forward is running; None: attention is known there, or in one that runs round it."""
        nearest = None
        for module in running_modules():
            name = self.names.get(id(module))
            if name is None:
                continue
            if name in self.inside:
                return None
            if nearest is None and not isinstance(module, nn.Softmax):
                nearest = name
        return nearest

    def find_pooled(self, args: Any, out: Any) -> None:
        for name, last in self.lasts:
            if isinstance(out, Tensor) and is_one_position(out, isinstance(last, nn.Conv2d)):
                if uses_weight(last, args):
                    self.pooled.note(out, (name, out.numel()))

    def pass_on(self, func: Any, args: Any, out: Any) -> None:
        """Follow attention weights and pooled features through what leaves them what they are."""
        if func in MULTIPLICATIONS and len(args) == 2:
            pooled = self.pooled.first(args)
            others = [x for x in args if isinstance(x, Tensor) and self.pooled.of(x) is None]
            if pooled is not None and any(x.numel() > pooled[1] for x in others):
                if pooled[0] not in self.gates:
                    self.gates.append(pooled[0])
                return
        if func in FACTORS_OF_WEIGHTS or func in VIEWS:
            weights = self.weights.first(args[:2])
            if weights is not None and isinstance(out, Tensor):
                self.weights.note(out, weights)
        pooled = self.pooled.first(args)
        if pooled is not None and isinstance(out, Tensor) and (out.numel() == pooled[1] or func in VIEWS):
            self.pooled.note(out, pooled)


def running_modules() -> Iterator[nn.Module]:
    """The modules whose methods are running, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        holder = frame.f_locals.get("self")
        if isinstance(holder, nn.Module):
            yield holder
        frame = frame.f_back  # type: ignore[assignment]


def is_over_last_axis(input: Any, dim: int | None = None, *_: Any, **__: Any) -> bool:
    """Whether a softmax is over the last axis of logits that have queries before their keys."""
    return isinstance(input, Tensor) and input.dim() >= 3 and dim in (-1, input.dim() - 1)


def is_one_position(x: Tensor, channels_first: bool) -> bool:
    """Whether every sample has a single position: (B, C), (B, 1, C), or (B, C, 1, 1)."""
    if x.dim() < 2:
        return False
    positions = x.shape[2:] if channels_first else x.shape[1:-1]
    return all(size == 1 for size in positions)


FUSED = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
PRODUCTS = (
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, torch.einsum,
    F.linear, F.conv2d, torch.conv2d,
)  # fmt: skip
MULTIPLICATIONS = (torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__)
FACTORS_OF_WEIGHTS = (*MULTIPLICATIONS, F.dropout, torch.dropout, torch.where, Tensor.masked_fill)
VIEWS = (
    Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.contiguous, Tensor.transpose, Tensor.permute,
    Tensor.squeeze, Tensor.unsqueeze, Tensor.expand, Tensor.expand_as, Tensor.__getitem__, Tensor.to, Tensor.type_as,
    Tensor.float, Tensor.half, Tensor.bfloat16,
    torch.reshape, torch.flatten, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze,
)  # fmt: skip
