"""What happens round the layers of MLPs, and where tokens enter a block."""

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ConflictError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import LayerRecord, Penalty, TokenMap, Tokens, WeightMap
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import Stream
from attemper.tempering.padding import padding_in_arguments
from attemper.tempering.penalties import Control, Entry
from attemper.tempering.subclassing import Action, state_of

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
    masks: dict[int, str] | None = None
    """Where it acts before any attention could tell which tokens are padding: the module's arguments that are masks."""

    checked: bool = False
    """Whether padding that masks tell of was looked at; once is enough."""

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)

    def acts(self, training: bool) -> bool:
        if cast(TokenMap, self.method).always:
            return self.control.when != "never"
        return self.control.on(training) and not self.method.idle

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.masks is not None:
            self.control.entry_padding = padding_in_arguments(self.masks, args, kwargs, self.layout)
            self.check_padding(self.control.entry_padding)
        if self.side == "input":
            if len(args) == 0:
                name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
                return forward(**{**kwargs, name: self.map(kwargs[name])})
            return forward(self.map(args[0]), *args[1:], **kwargs)
        out = forward(*args, **kwargs)
        if isinstance(out, tuple):
            return (self.map(out[0]), *out[1:])
        return self.map(out)

    def check_padding(self, real: Tensor | None) -> None:
        """Once: a mask after which a sample has no token left is one that the block means in another way."""
        if self.checked or real is None or torch.compiler.is_compiling() or real.is_meta:
            return
        self.checked = True
        if not real.any(1).all():
            raise ConflictError(
                f"'{self.place.name}' is called with a mask that says of a whole sample that it is padding, so it "
                f"means something else than {self.method.name} would read from it. Use batches without padding."
            )

    def map(self, x: Tensor) -> Tensor:
        """Bring x into (B, N, C), map it, and bring it back."""
        method = cast(TokenMap, self.method)
        tokens = to_tokens(x, self.layout)
        if method.mixes_tokens and not torch.compiler.is_compiling():
            self.vain = "it mixes tokens, and there was only one" if tokens.shape[1] == 1 else None
        real = self.control.entry_padding if self.masks is not None else self.control.padding.get(self.place.block)
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
class WeightAction(Action):
    """Maps the weight of one linear layer."""

    control: Control
    place: Place
    method: Method

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)

    def acts(self, training: bool) -> bool:
        return self.control.on(training) and not self.method.idle

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        x: Tensor = args[0]
        weight = cast(WeightMap, self.method).map_weight(cast(Tensor, module.weight), Stream(draw_seed(x)))
        return F.linear(x, weight, cast("Tensor | None", module.bias))


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
        x = args[0] if len(args) > 0 else next(value for value in kwargs.values() if isinstance(value, Tensor))
        record = LayerRecord(to_tokens(x, self.layout), weight)
        if state_of(module).original in (nn.Linear, nn.Conv2d):  # nothing is inside of this action but the plain layer
            bias = cast("Tensor | None", module.bias)
            record = replace(record, output=to_tokens(out, self.layout), bias=bias)
        method = cast(Penalty, self.method)
        for component, term in method.mlp_terms(self.which, record, self.place).items():
            self.control.enter(Entry(self.place.name, self.place.block, self.method.name, component, term, method.sums))
        return out
