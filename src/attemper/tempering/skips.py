"""What happens where a block adds its branches to the residual stream."""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.errors import UnmetError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import BranchMap, SkipRemover
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import Stream
from attemper.tempering.layers import Layout, tensors
from attemper.tempering.penalties import Control
from attemper.tempering.subclassing import Action


@dataclass
class SkipAction(Action):
    """Acts where a block adds its branches to the residual stream: removes the skip, or changes the branch."""

    control: Control
    place: Place
    method: Method
    attentions: int
    mlps: int
    """How many attentions and MLPs the block has; each of them has a skip."""
    layout: Layout

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)

    def acts(self, training: bool) -> bool:
        if isinstance(self.method, SkipRemover):
            return self.control.when != "never"
        return self.control.on(training) and not self.method.idle

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        skips = Skips(tensors(args, kwargs), self)
        with skips:
            out = forward(*args, **kwargs)
        expected = self.attentions + self.mlps
        if skips.met != expected:
            raise UnmetError(
                f"{self.method.name} found {skips.met} skip connections in '{self.place.name}' "
                f"({type(module).__name__}), where {expected} were expected: the block adds its branches in a way that "
                "is not understood. Leave it out with targets=."
            )
        return out

    def add(self, func: Any, args: Any, branch: Tensor, attention: bool) -> Tensor:
        """The sum of stream and branch, or what the method makes of it."""
        out: Tensor
        if isinstance(self.method, SkipRemover):
            out = branch if self.method.removes(self.place)[0 if attention else 1] else func(*args)
            return out
        swap = self.layout == "sequence_first" and branch.dim() == 3
        mapped = cast(BranchMap, self.method).map_branch(
            branch.transpose(0, 1) if swap else branch, Stream(draw_seed(branch))
        )
        mapped = mapped.transpose(0, 1) if swap else mapped
        out = func(*(mapped if arg is branch else arg for arg in args))
        return out


class Skips(TorchFunctionMode):
    """Watches a block's residual stream, and hands over where a branch is added to it."""

    def __init__(self, streams: list[Tensor], action: SkipAction) -> None:
        super().__init__()
        self.streams = streams
        self.action = action
        self.met = 0
        self.worked = False
        """Whether the branch was computed since the last skip: a position that is added before it is no skip."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (ATTENTION if self.met < self.action.attentions else LAYERS):
            self.worked = True
        elif (
            self.worked
            and func in ADDITIONS
            and len(args) == 2
            and isinstance(args[1], Tensor)
            and args[0].shape == args[1].shape
        ):
            left, right = self.is_stream(args[0]), self.is_stream(args[1])
            if left != right:
                return self.skip(func, args[1] if left else args[0], args)
        out = func(*args, **kwargs)
        if func in SAME_STREAM and args and self.is_stream(args[0]):
            self.streams.append(out)
        return out

    def skip(self, func: Any, branch: Tensor, args: Any) -> Tensor:
        """One skip connection."""
        attention = self.met < self.action.attentions
        self.met += 1
        self.worked = False
        out = self.action.add(func, args, branch, attention)
        self.streams = [out]
        return out

    def is_stream(self, x: Any) -> bool:
        return any(x is stream for stream in self.streams)


ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)
ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward, F.softmax, torch.softmax, Tensor.softmax)
LAYERS = (F.linear, F.conv2d, torch.conv2d)
SAME_STREAM = (  # views, and the norm that a post-norm block puts behind the sum
    F.layer_norm,
    Tensor.__getitem__,
    Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.contiguous, Tensor.transpose, Tensor.permute,
    torch.reshape, torch.flatten, torch.transpose, torch.permute,
)  # fmt: skip
