"""What happens round the layers of MLPs, and where tokens enter a block."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ConflictError, UnmetError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import LayerRecord, Penalty, PreparedMap, TokenMap, Tokens, WeightMap
from attemper.ops import fused
from attemper.ops.regions import as_told, is_ordinary
from attemper.ops.stream import Stream
from attemper.ops.tracing import all_true, has_numbers
from attemper.sites.adapted import is_transposed
from attemper.sites.base import Slot
from attemper.tempering.draws import draw_again, note, ordinary_source, source
from attemper.tempering.ledger import Entry
from attemper.tempering.mesh import is_distributed
from attemper.tempering.operands import input_in_front
from attemper.tempering.padding import padding_in_arguments
from attemper.tempering.parts import map_weight, refuse_parts, refuse_split_tokens, token_axes, token_offsets
from attemper.tempering.penalties import Control
from attemper.tempering.root import run_pass
from attemper.tempering.shards import hold, is_whole, refuse_nested
from attemper.tempering.subclassing import Action, site_of, state_of
from attemper.tempering.wrapped import addition, effective, is_known, is_outermost, mapped_product

Layout = Literal["batch_first", "sequence_first", "channels_first"]
LINEAR = nn.Linear.forward
MOST = 256
"""Shapes of which something is remembered. Where lengths change with every batch, they would become ever more."""


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

    goes_outside: ClassVar[bool] = True
    """Where adapters are put round the layer, it acts round them."""

    control: Control
    place: Place
    method: Method
    side: Literal["input", "output"]
    layout: Layout
    told_by: int = 0
    """The block whose attention tells which tokens are padding."""
    parameters: Parameters | None = None
    parameter: str = ""
    masks: dict[int, str] | None = None
    """Where it acts before any attention could tell which tokens are padding: the module's arguments that are masks."""
    slot: Slot | None = None
    """Where the layer stands; None: it is no layer that others wrap."""

    checked: bool = False
    """Whether padding that masks tell of was looked at; once is enough."""
    always: bool = field(init=False)
    """Whether it acts in evaluation, too."""
    rests: bool = field(init=False)
    """Whether it does nothing: a rate of zero."""
    asks: bool = field(init=False)
    """Whether it asks which tokens are padding."""
    prepared: dict[Any, PreparedMap] = field(init=False, default_factory=dict, compare=False)
    """Shape, dtype and device of tokens → what is left to do with them."""

    def __post_init__(self) -> None:
        kind = cast(TokenMap, self.method)
        self.always, self.rests, self.asks = kind.always, self.method.idle, kind.needs_padding
        self.prepared = {}

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)
        self.__post_init__()

    def __getstate__(self) -> dict[str, Any]:  # a copy of the model prepares for itself, and a file holds no kernels
        return {**self.__dict__, "prepared": {}}

    def name_site(self) -> None:
        self.stream_site = site_of(self.place.name, self.method.name, self.side)

    def sites(self) -> dict[int, str]:
        return {self.stream_site.word: f"{self.place.name}:{self.side}"}

    def acts(self, training: bool) -> bool:
        if self.always:
            return self.control.when != "never"
        return not self.rests and self.control.on(training)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        slot = self.slot
        if slot is not None and slot.layer is not module and not is_outermost(self, module):
            return forward(*args, **kwargs)
        if self.side == "input":
            return self.map_input(module, forward, args, kwargs)
        out = forward(*args, **kwargs)
        if isinstance(out, tuple):
            return (self.map(out[0]), *out[1:])
        return self.map(out)

    def map_input(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run the module on mapped tokens: its first argument, or the first that is named and a tensor."""
        name = None
        if len(args) == 0:
            name = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
        x = args[0] if len(args) > 0 else kwargs.get(name)
        if not isinstance(x, Tensor):
            raise UnmetError(
                f"{self.method.name} maps the tokens that {self.place.where} ({type(module).__name__}) gets, and its "
                f"first argument is no tensor ({type(x).__name__}). Leave it out with targets=."
            )
        if self.masks is not None:
            layout = self.layout_of(x)
            self.control.ledger.entry_padding = padding_in_arguments(self.masks, x, args, kwargs, layout)
            self.check_padding(self.control.ledger.entry_padding)
        if name is not None:
            return forward(**{**kwargs, name: self.map(x, module)})
        return forward(self.map(x, module), *args[1:], **kwargs)

    def check_padding(self, real: Tensor | None) -> None:
        """Once: a mask after which a sample has no token left is one that the block means in another way."""
        if self.checked or real is None or not has_numbers(real):
            return
        self.checked = True
        if not all_true(real.any(1)):
            raise ConflictError(
                f"{self.place.where} is called with a mask that says of a whole sample that it is padding, so it "
                f"means something else than {self.method.name} would read from it. Use batches without padding."
            )

    def map(self, x: Tensor, layer: nn.Module | None = None) -> Tensor:
        """Map tokens, or the part of them that this process holds. layer: what they go into, if they do."""
        mapped = None if torch.compiler.is_compiling() else self.map_again(x)
        if mapped is not None:
            return mapped
        method, layout = cast(TokenMap, self.method), self.layout_of(x)
        parameter = None if self.parameters is None else getattr(self.parameters, self.parameter)
        if is_whole(x):
            self.prepare(x, layout)
            if not self.method.stochastic:
                return self.map_part(x, layout, parameter, None)
            if (drawn := ordinary_source(self.control, self.stream_site.word, x)) is not None:
                return self.map_part(x, layout, parameter, drawn.stream())
        axes = token_axes(x.dim(), layout)
        if method.mixes_tokens:
            refuse_split_tokens(self.control, method, self.place, x)
        held = hold(x, range(x.dim()) if parameter is not None else axes.tokens if method.mixes_tokens else ())
        stream = None
        if self.method.stochastic:
            at = functools.partial(token_offsets, axes=axes, held=held, channels=getattr(layer, "in_features", 0))
            stream = source(self.control, self.stream_site, held.local, held.rows(axes.sample), at).stream()
        return held.whole(self.map_part(held.local, layout, parameter, stream))

    def prepare(self, x: Tensor, layout: Layout) -> None:
        """Let the method prepare for more tokens like these."""
        alone = self.asks and x.shape[1:-1].numel() == 1  # `map_part` tells what that means
        if (x.shape, x.dtype, x.device) in self.prepared:
            return
        if layout != "batch_first" or x.dim() < 3 or self.parameters is not None or alone:
            return
        found = cast(TokenMap, self.method).prepare(x)
        if found is not None:
            if len(self.prepared) >= MOST:
                self.prepared.clear()
            self.prepared[x.shape, x.dtype, x.device] = found

    def map_again(self, x: Tensor) -> Tensor | None:
        """Map tokens for which the method has prepared, where none of them is padding; None: there is more to do."""
        if type(x) is not Tensor or x.is_nested:
            return None
        known, control = self.prepared.get((x.shape, x.dtype, x.device)), self.control
        if known is None or not x.is_contiguous() or not is_ordinary():
            return None
        ledger = control.ledgers.own
        if ledger.origins is not None:
            return None
        if self.asks:
            real = ledger.entry_padding if self.masks is not None else ledger.padding.get(self.told_by)
            if real is not None or is_distributed():
                return None
            self.vain = None
        if not self.method.stochastic:
            return known(x)
        tokens = tuple(x.shape) if x.dim() == 3 else (x.shape[0], x.shape[1:-1].numel(), x.shape[-1])
        drawn = draw_again(control, self.stream_site.word, x, tokens)
        return None if drawn is None else known(x, *drawn)

    def map_part(self, x: Tensor, layout: Layout, parameter: Tensor | None, stream: Stream | None) -> Tensor:
        """Bring x into (B, N, C), map it, and bring it back."""
        method = cast(TokenMap, self.method)
        tokens = to_tokens(x, layout)
        ledger = self.control.ledger
        if method.mixes_tokens and not torch.compiler.is_compiling():
            self.vain = "it mixes tokens, and there was only one" if tokens.shape[1] == 1 else None
        real = ledger.entry_padding if self.masks is not None else ledger.padding.get(self.told_by)
        if method.needs_padding:
            real = as_told(id(self), real)
        if real is not None and real.shape != tokens.shape[:2]:
            real = None
        if stream is not None:
            note(self.control, stream, tokens.shape)
        mapped = from_tokens(method.map_tokens(tokens, Tokens(real, parameter), stream), x, layout)
        if ledger.origins is not None and not torch.compiler.is_compiling():
            ledger.origins.carry(x, mapped)  # products of tokens inside of the method are no attention
        return mapped

    def layout_of(self, x: Tensor) -> Layout:
        """Where x has its samples, tokens and channels."""
        return self.layout


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
    return tokens if like.dim() == 3 else tokens.reshape(like.shape)


@dataclass
class WeightAction(Action):
    """Maps the weight of one linear layer."""

    control: Control
    place: Place
    method: Method
    slot: Slot | None = None

    def name_site(self) -> None:
        self.stream_site = site_of(self.place.name, self.method.name)

    def sites(self) -> dict[int, str]:
        return {self.stream_site.word: f"{self.place.name}:output_weights"}

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)

    def acts(self, training: bool) -> bool:
        return self.control.on(training) and not self.method.idle

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        (x, *_), _ = input_in_front(args, kwargs)
        added = addition(self.method.name, self.place.name, self.slot, module)
        weight, bias = cast(Tensor, module.weight), cast("Tensor | None", module.bias)
        if added is None:
            return F.linear(x, self.map(weight, module), bias)
        if added.drops:
            raise ConflictError(
                f"{self.method.name} maps the weight behind {self.place.where}, to which an adapter adds with dropout "
                "of its own, and dropped inputs are part of no weight; set lora_dropout=0"
            )
        return mapped_product(x, weight, bias, added, lambda whole: self.map(whole, module))

    def map(self, weight: Tensor, layer: nn.Module) -> Tensor:
        return map_weight(self.control, self.stream_site, cast(WeightMap, self.method), weight, layer)


@dataclass
class MlpPenaltyAction(Action):
    """Takes the penalty of one layer of an MLP."""

    control: Control
    place: Place
    method: Method
    which: Literal["ff1", "ff2"]
    layout: Layout
    slot: Slot | None = None
    """Where the layer stands; what adapters add to it there belongs to its weight."""
    untouched: Any = field(init=False, default_factory=fused.penalties.Untouched, compare=False)
    """Whether the model leaves what the layer gives as it is."""
    factors: dict[torch.Size, float | None] = field(init=False, default_factory=dict, compare=False)
    """Shape of the layer's input → `layer_factor`."""
    sums: bool = field(init=False)
    """Whether its terms are sums over samples."""

    def __post_init__(self) -> None:
        self.sums = cast(Penalty, self.method).sums

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method, self.factors = methods[self.method.name].at(self.place), {}
        self.sums = cast(Penalty, self.method).sums

    def acts(self, training: bool) -> bool:
        return self.control.penalises(training)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.control.is_inside():
            if len(args) == 1 and not kwargs and getattr(forward, "__func__", None) is LINEAR:
                passed = self.pass_on(args[0], module)
                if passed is not None:
                    return passed
            return self.penalise(module, forward, args, kwargs)

        def penalised(*args: Any, **kwargs: Any) -> Any:
            return self.penalise(module, forward, args, kwargs)

        return run_pass(self.control, module, penalised, args, kwargs)

    def penalise(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run the layer, and enter what it adds to the loss."""
        if is_distributed():
            refuse_parts(self.control, self.method, self.place)
        known = is_known(self.slot, module)
        x = args[0] if len(args) == 1 else input_in_front(args, kwargs)[0][0]
        refuse_nested(x)
        added = None if known else addition(self.method.name, self.place.name, self.slot, module)
        out = forward(*args, **kwargs)
        # nothing is inside of this action but the plain layer, and nothing is added outside of it
        plain = known or (added is None and state_of(module).original in (nn.Linear, nn.Conv2d))
        tokens = to_tokens(x, self.layout)
        weight = cast(Tensor, module.weight)
        weight = weight if added is None else effective(weight, added)
        weight = weight.t() if is_transposed(module) else weight.flatten(1)
        record = LayerRecord(tokens, weight)
        if plain:
            bias = cast("Tensor | None", module.bias)
            record = replace(record, output=to_tokens(out, self.layout), bias=bias)
        method = cast(Penalty, self.method)
        for component, term in method.mlp_terms(self.which, record, self.place).items():
            self.enter(component, term)
        return out

    def pass_on(self, x: Tensor, layer: nn.Module) -> Tensor | None:
        """What a linear layer gives, by a function that takes its square on the way; None: no kernel does."""
        opened = self.control.ledgers.own.open
        if opened is None or opened.shared or not is_known(self.slot, layer):
            return None
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        assert weight is not None  # a layer that is known has one
        if not fused.penalties.passes(x, weight, bias):
            return None
        if x.shape not in self.factors:
            self.remember_factor(x)
        factor = self.factors[x.shape]
        if not factor:  # 0: there is no term
            return None
        found = fused.penalties.squared_linear(x, weight, bias, factor, self.untouched)
        if found is None:
            return None
        self.enter(self.which, found[1])
        return found[0]

    def remember_factor(self, x: Tensor) -> None:
        """Note what the square of the layer's output for an input like this one is multiplied with, if that is all."""
        if len(self.factors) > MOST:
            self.factors.clear()
        factor = None
        if self.layout != "channels_first":
            samples, each = to_tokens(x, self.layout).shape[:2]
            factor = cast(Penalty, self.method).layer_factor(self.which, samples, each, self.place)
        self.factors[x.shape] = factor

    def enter(self, component: str, term: Tensor) -> None:
        place = self.place
        self.control.enter(Entry(place.name, place.block, self.method.name, component, term, self.sums))
