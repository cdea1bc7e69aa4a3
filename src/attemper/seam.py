"""The seam: while a tempered module runs, its attention calls are ours.

A module is tempered by giving it a made subclass of its own class. In training the subclass's forward runs the original
one under a torch-function mode that catches attention at three doors: `scaled_dot_product_attention`,
`multi_head_attention_forward`, and softmax over the last axis of 4-D logits. In eval it does nothing at all: even an
empty mode would switch off `nn.TransformerEncoder`'s fast path and so change bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.errors import UnmetError, UnsupportedError
from attemper.methods.base import Method, Place
from attemper.methods.dropattention import DropAttention
from attemper.multihead import MultiheadArguments, merge_heads, project_heads
from attemper.ops.attention import attention
from attemper.ops.call import make_call
from attemper.ops.perturbation import Perturbation
from attemper.ops.reference import attention_weights, perturbed_softmax, reachable

__all__ = ["KEY", "SiteState", "is_tempered", "restore_class", "state_of", "temper_attention", "temper_root"]

KEY = "_attemper"
"""The one attribute that a tempered module has more than before."""

When = Literal["training", "always", "never"]


@dataclass
class SiteState:
    """What a tempered attention module carries: picklable, without a reference to any module."""

    place: Place
    recipe: tuple[Method, ...]
    """The methods as the user wrote them."""
    impl: str
    when: When = "training"
    methods: tuple[Method, ...] = field(init=False)
    """The methods as they act here, rates resolved."""
    active: tuple[Perturbation, ...] = field(init=False)
    """Those of them that do something: a rate of zero costs nothing."""

    def __post_init__(self) -> None:
        self.set_recipe(self.recipe)

    def set_recipe(self, recipe: tuple[Method, ...]) -> None:
        """Resolve the methods for this place; raises before anything is changed."""
        methods = tuple(method.at(self.place) for method in recipe)
        self.recipe, self.methods = recipe, methods
        self.active = tuple(m for m in methods if isinstance(m, Perturbation) and not m.idle)

    def acts(self, training: bool) -> bool:
        return len(self.active) > 0 and (self.when == "always" or (self.when == "training" and training))


@dataclass(frozen=True)
class RootState:
    """What the tempered model's root module carries."""

    left_alone: dict[str, str]


class Doors(TorchFunctionMode):
    """Catches the attention calls of one forward pass of one module."""

    def __init__(self, state: SiteState) -> None:
        super().__init__()
        self.state = state
        self.met = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.met += 1
            return tempered_sdpa(self.state, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            self.met += 1
            return tempered_multihead(self.state, MultiheadArguments(*args, **kwargs))
        if func in SOFTMAX and is_attention_softmax(*args, **kwargs):
            self.met += 1
            return tempered_softmax(self.state, *args, **kwargs)
        return func(*args, **kwargs)


SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)


def with_own_dropout(state: SiteState, dropout_p: float) -> tuple[Perturbation, ...]:
    """The methods that act, and the model's own attention dropout behind them, drawn from the same stream."""
    if dropout_p == 0.0:
        return state.active
    return (*state.active, DropAttention(dropout_p, rescale="inverted"))


def tempered_sdpa(
    state: SiteState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The first door. Takes (…, N, e) like the original; leading axes beyond (batch, heads) are folded into batch."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value))
    methods = with_own_dropout(state, dropout_p)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "methods": methods, "impl": state.impl}
    if query.dim() == 4:
        return attention(query, key, value, attn_mask=attn_mask, **options)
    if attn_mask is not None and attn_mask.dim() > 2:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    parts = [_four_axes(t) for t in (query, key, value)]
    out = attention(*parts, attn_mask=None if attn_mask is None else _four_axes(attn_mask), **options)
    return out.view(*query.shape[:-1], value.shape[-1])


def _four_axes(t: Tensor) -> Tensor:
    if t.dim() == 2:
        return t[None, None]
    return t[:, None] if t.dim() == 3 else t.flatten(0, -4)


def tempered_multihead(state: SiteState, call: MultiheadArguments) -> tuple[Tensor, Tensor | None]:
    """The second door, which the first one cannot see into."""
    q, k, v, mask = project_heads(call)
    methods = with_own_dropout(state, call.dropout_p if call.training else 0.0)
    weights = None
    if call.need_weights:
        if state.impl not in ("auto", "reference"):
            raise UnsupportedError(
                f"impl='{state.impl}' gives no attention weights, and '{state.place.name}' is called with "
                "need_weights=True. impl='reference' does, and so does 'auto'."
            )
        weights = attention_weights(make_call(q, k, v, mask, False, None, methods, None))
        out = (weights @ v.to(weights.dtype)).to(q.dtype)
        weights = weights.to(q.dtype)
    else:
        out = attention(q, k, v, attn_mask=mask, methods=methods, impl=cast(Any, state.impl))
    return merge_heads(call, out, weights)


def is_attention_softmax(input: Any, dim: int | None = None, *_: Any, **__: Any) -> bool:
    return isinstance(input, Tensor) and input.dim() == 4 and dim in (-1, 3)


def tempered_softmax(
    state: SiteState, input: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """The third door: logits (B, H, Nq, Nk) with all their masks in, weights out."""
    if state.impl not in ("auto", "reference"):
        raise UnsupportedError(
            f"impl='{state.impl}' cannot serve '{state.place.name}': it computes attention by matmul and softmax, "
            "not by one fused call. impl='reference' can, and so can 'auto'."
        )
    logits = input if dtype is None else input.to(dtype)
    work = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return perturbed_softmax(work, reachable(work), state.active, None).to(logits.dtype)


# --------------------------------------------------------------------------------------------------- made subclasses
def _attention_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    state = self.__dict__.get(KEY)
    if state is None or not state.acts(self.training):
        return super(self._attemper_class, self).forward(*args, **kwargs)
    doors = Doors(state)
    with doors:
        out = super(self._attemper_class, self).forward(*args, **kwargs)
    if doors.met == 0:
        raise UnmetError(
            f"'{state.place.name}' ({type(self).__name__}) ran in training mode, but computed no attention by "
            "scaled_dot_product_attention, multi_head_attention_forward or a softmax over the last axis of 4-D logits: "
            "the recipe would have had no effect. A Transformers model may need attn_implementation='sdpa'; "
            "otherwise leave the module out with targets=."
        )
    return out


def _root_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.training and torch.compiler.is_compiling():
        # Compiled activation checkpointing refuses a mode that is entered inside a checkpointed block, unless the mode
        # stack was touched before.
        with Touch():
            pass
    return super(self._attemper_class, self).forward(*args, **kwargs)


class Touch(TorchFunctionMode):
    """Does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@functools.cache
def made_class(original: Any, kind: Literal["attention", "root"]) -> Any:
    """The subclass of `original` that a tempered module gets; one per class, under the original's name."""
    template = {"attention": _attention_forward, "root": _root_forward}[kind]
    # Dynamo keeps its compiled entries, and their limit, per code object: every class needs one of its own.
    forward = FunctionType(template.__code__.replace(), template.__globals__, "forward")
    forward.__module__ = __name__

    def reduce(self: nn.Module, protocol: Any) -> Any:
        rebuild, args, *rest = super(made, self).__reduce_ex__(protocol)
        args = tuple(original if arg is made else arg for arg in args)
        return (_rebuild, (original, kind, rebuild, args), *rest)

    body = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    made: Any = type(original)(original.__name__, (original,), body)
    made._attemper_class = made
    made._attemper_original = original
    return made


def _rebuild(original: Any, kind: Literal["attention", "root"], rebuild: Any, args: Any) -> nn.Module:
    module: nn.Module = rebuild(*args)
    module.__class__ = made_class(original, kind)
    return module


def _swap_class(module: nn.Module, kind: Literal["attention", "root"]) -> None:
    original: Any = type(module)
    module.__class__ = made_class(original, kind)


def temper_attention(module: nn.Module, state: SiteState) -> None:
    """Make a module's attention ours."""
    _swap_class(module, "attention")
    module.__dict__[KEY] = state


def temper_root(module: nn.Module, state: RootState) -> None:
    """Prepare the root of a tempered model for compiled activation checkpointing."""
    _swap_class(module, "root")
    module.__dict__[KEY] = state


def restore_class(module: nn.Module) -> None:
    """Take away what temper_* gave. Where another library put a class on top since, ours stays below it, asleep."""
    module.__dict__.pop(KEY, None)
    original = type(module).__dict__.get("_attemper_original")
    if original is not None:
        module.__class__ = original


def is_tempered(module: nn.Module) -> bool:
    """Whether this very module is tempered, not only one inside it."""
    return KEY in module.__dict__


def state_of(module: nn.Module) -> SiteState | RootState:
    """What a tempered module carries."""
    state: SiteState | RootState = module.__dict__[KEY]
    return state
