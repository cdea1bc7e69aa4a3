"""What happens round modules other than attention: layers of MLPs, blocks, patch embeddings and the root."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.errors import UnmetError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import (
    BlockMap,
    BranchMap,
    LayerRecord,
    Penalty,
    SkipRemover,
    TokenMap,
    Tokens,
)
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import Stream
from attemper.tempering.subclassing import Action, Control, Entry, state_of

__all__ = [
    "BlockAction",
    "Layout",
    "MlpPenaltyAction",
    "Parameters",
    "RootAction",
    "SkipAction",
    "TokenAction",
]

Layout = Literal["batch_first", "sequence_first", "channels_first"]


class Parameters(nn.Module):
    """The parameters that methods add to a model, under the one prefix `attemper`."""

    def forward(self, x: Any) -> Any:
        """Nothing: in an nn.Sequential it is run like any other module."""
        return x

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """A checkpoint of the plain model has none of these: they then keep the values that they have."""
        missing = {name: value for name, value in self.named_parameters() if prefix + name not in state_dict}
        full = {**state_dict, **{prefix + name: value.detach() for name, value in missing.items()}}
        super()._load_from_state_dict(full, prefix, *args)


@dataclass
class TokenAction(Action):
    """Maps the tokens that go into a layer, or that come out of it."""

    control: Control
    place: Place
    method: Method
    side: Literal["input", "output"]
    layout: Layout
    parameters: Parameters | None = None
    parameter: str = ""

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)

    def acts(self, training: bool) -> bool:
        if cast(TokenMap, self.method).always:
            return self.control.when != "never"
        return self.control.on(training) and not self.method.idle

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.side == "input":
            return forward(self.map(args[0]), *args[1:], **kwargs)
        out = forward(*args, **kwargs)
        if isinstance(out, tuple):
            return (self.map(out[0]), *out[1:])
        return self.map(out)

    def map(self, x: Tensor) -> Tensor:
        """Bring x into (B, N, C), map it, and bring it back."""
        method = cast(TokenMap, self.method)
        tokens = to_tokens(x, self.layout)
        real = self.control.padding.get(self.place.block)
        if real is not None and real.shape != tokens.shape[:2]:
            real = None
        parameter = None if self.parameters is None else getattr(self.parameters, self.parameter)
        stream = Stream(draw_seed(x)) if self.method.stochastic else None
        return from_tokens(method.map_tokens(tokens, Tokens(real, parameter), stream), x, self.layout)


def to_tokens(x: Tensor, layout: Layout) -> Tensor:
    """(B, N, C) from (N, C), (B, N, C), (N, B, C), (B, H, W, C) or (B, C, H, W)."""
    if layout == "channels_first":
        return x.flatten(2).transpose(1, 2)
    if x.dim() == 2:
        return x[None]
    if layout == "sequence_first":
        return x.transpose(0, 1)
    return x.flatten(1, -2) if x.dim() > 3 else x


def from_tokens(tokens: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """The way back, to the shape of `like`."""
    if layout == "channels_first":
        return tokens.transpose(1, 2).reshape(like.shape)
    if layout == "sequence_first" and like.dim() == 3:
        return tokens.transpose(0, 1)
    return tokens.reshape(like.shape)


@dataclass
class MlpPenaltyAction(Action):
    """Takes the penalty of one layer of an MLP."""

    control: Control
    place: Place
    method: Method
    which: Literal["ff1", "ff2"]
    layout: Layout

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)

    def acts(self, training: bool) -> bool:
        return self.control.penalises(training)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        weight = cast(Tensor, module.weight).flatten(1)
        out = forward(*args, **kwargs)
        record = LayerRecord(to_tokens(args[0], self.layout), weight)
        if state_of(module).original in (nn.Linear, nn.Conv2d):  # nothing is inside of this action but the plain layer
            bias = cast("Tensor | None", module.bias)
            record = replace(record, output=to_tokens(out, self.layout), bias=bias)
        method = cast(Penalty, self.method)
        for component, term in method.mlp_terms(self.which, record, self.place).items():
            self.control.enter(Entry(self.place.name, self.place.block, self.method.name, component, term, method.sums))
        return out


@dataclass
class BlockAction(Action):
    """Maps what went into a block and what came out of it."""

    control: Control
    place: Place
    method: Method

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)

    def acts(self, training: bool) -> bool:
        return self.control.on(training) and not self.method.idle

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        after = out[0] if isinstance(out, tuple) else out
        before = next((x for x in tensors(args, kwargs) if x.shape == after.shape), None)
        if before is None:  # a block that changes the shape of its tokens cannot be skipped
            return out
        mapped = cast(BlockMap, self.method).map_block(before, after, Stream(draw_seed(after)))
        return (mapped, *out[1:]) if isinstance(out, tuple) else mapped


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


def tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a module was called with."""
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


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


@dataclass
class RootAction(Action):
    """Stands at the way in and out of the whole model."""

    control: Control

    def acts(self, training: bool) -> bool:
        return training and (torch.compiler.is_compiling() or self.control.auto_penalty)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Compiled activation checkpointing refuses a mode that is entered inside a checkpointed block, unless the
            # mode stack was touched before.
            with Touch():
                pass
        if not self.control.auto_penalty:
            return forward(*args, **kwargs)
        self.control.ledger.clear()
        out = forward(*args, **kwargs)
        if not self.control.ledger:
            return out
        penalty = torch.stack([entry.value for entry in self.control.ledger]).sum()
        self.control.ledger.clear()
        return with_penalty(out, penalty * share_of_step(module, kwargs), self.control)


class Touch(TorchFunctionMode):
    """Does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def share_of_step(module: nn.Module, kwargs: Any) -> Tensor | float:
    """Which part of an optimiser's step this pass is, where the loop says so.

    Transformers' Trainer hands over how many labels the whole step has, in all batches whose gradients it adds up. The
    model then divides the sum of its losses by that number, and nothing is divided by the number of batches.
    """
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("shift_labels", kwargs.get("labels"))
    if items is None or not isinstance(labels, Tensor):
        return 1.0
    if "shift_labels" not in kwargs and getattr(module, "loss_type", None) == "ForCausalLM":
        labels = labels[..., 1:]  # the first token of a text is never predicted
    share: Tensor = labels.ne(-100).sum() / items
    return share


def with_penalty(out: Any, penalty: Tensor, control: Control) -> Any:
    """A model's output, changed so that backward through it adds the penalty's gradient.

    An output that holds its own loss, as Transformers' do, gets the penalty added to it. Any other keeps its values,
    and the gradient of control.loss_scale · penalty is added when backward passes through its first tensor.
    """
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        out["loss"] = loss + penalty
        return out
    if isinstance(out, Tensor):
        return cast(Tensor, Attach.apply(out, penalty, control))
    if isinstance(out, dict):
        name = next(name for name, value in out.items() if isinstance(value, Tensor) and value.requires_grad)
        out[name] = Attach.apply(out[name], penalty, control)
        return out
    index = next(i for i, value in enumerate(out) if isinstance(value, Tensor) and value.requires_grad)
    parts = [Attach.apply(value, penalty, control) if i == index else value for i, value in enumerate(out)]
    return type(out)(parts)


class Attach(torch.autograd.Function):
    """The first argument as it is; backward sends the loss scale to the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor, control: Control) -> Tensor:
        ctx.control, ctx.like = control, penalty
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = ctx.control.loss_scale
        return grad, torch.full_like(ctx.like, scale() if callable(scale) else scale), None
