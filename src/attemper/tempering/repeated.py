"""Interception of attention whose calls are known: what one pass found out is not found out again in the next.

Most attention modules make one fused call of plain tensors, in every pass the same one. The first pass goes through
`interception.py`, which can do everything and asks everything. Where it saw nothing but such calls, later passes come
here: a call is looked up by the layout of its tensors, and what was decided for it holds again. Whatever differs, such
as a mask or a softmax, is handed to the full interceptor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.methods.kinds import Penalty
from attemper.ops.call import Call
from attemper.ops.dispatch import IMPLEMENTATIONS
from attemper.ops.perturbation import Perturbation
from attemper.ops.precision import autocast_dtype
from attemper.ops.regions import innermost, may_repeat
from attemper.ops.stream import NOWHERE, Source
from attemper.tempering.axes import SOFTMAX
from attemper.tempering.draws import Note, note, ordinary_source, source
from attemper.tempering.ledger import Entry
from attemper.tempering.mesh import is_distributed
from attemper.tempering.offsets import AttentionShape, attention_offsets
from attemper.tempering.parts import refuse_parts
from attemper.tempering.products import PRODUCTS
from attemper.tempering.projected import refuse_inner_checkpoint

if TYPE_CHECKING:
    from attemper.tempering.attention import AttentionAction
    from attemper.tempering.interception import AttentionInterceptor

SDPA = torch._C._nn.scaled_dot_product_attention
MOST = 256
"""Calls that are remembered for one module. Where lengths change with every batch, they would become ever more."""


UNUSUAL = frozenset((*SOFTMAX, F.multi_head_attention_forward))
UNUSUAL_FOR_KEYS = UNUSUAL | frozenset(PRODUCTS)
"""The same where methods change keys: in attention that is written out they follow the product with the queries."""


class All:
    """Contains everything."""

    def __contains__(self, x: object) -> bool:
        return True


ALL = All()


def unusual_for(methods: tuple[Perturbation, ...], packed: bool) -> frozenset[Any]:
    """The functions to look at where these methods act. packed: one linear layer gives Q, K and V, which matters."""
    unusual = UNUSUAL_FOR_KEYS if any("keys" in method.stages for method in methods) else UNUSUAL
    return unusual | {SDPA, F.linear} if packed else unusual | {SDPA}


class Repeat(Protocol):
    """What an implementation has left to do in a call like one before."""

    scale: float

    def serves(self, q: Tensor) -> bool:
        """Whether it does this time, for queries of the same layout."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, qkv: Tensor | None, drawn: Source | None) -> Tensor:
        """The output. qkv: what q, k and v may be the parts of."""

    def with_squares(
        self,
        given: tuple[Tensor, Tensor, Tensor],
        qkv: Tensor,
        bias: Tensor | None,
        wanted: Mapping[str, float],
        drawn: Source | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and squares of the projection that gave q, k and v, each times its factor."""


@dataclass(slots=True)
class Decision:
    """What was decided for a call."""

    impl: str
    """The name of the implementation."""
    methods: tuple[Perturbation, ...]
    """As they act on so many keys."""
    terms: tuple[Term, ...] = ()
    """Of the penalties, which are nothing but squares that the implementation takes along."""
    repeat: Repeat | None = None
    """What serves the call from its second time on, where the implementation can do less then."""
    asked: bool = False
    """Whether it was asked."""
    factors: dict[str, float] = field(init=False)
    """`factors_of` the terms."""

    def __post_init__(self) -> None:
        self.factors = factors_of(self.terms)


class Term(NamedTuple):
    """What a penalty adds: a square times a factor, as this component of this method."""

    method: str
    component: str
    square: str
    factor: float
    sums: bool


def terms_of(action: AttentionAction, samples: int, tokens: int) -> tuple[Term, ...] | None:
    """The terms of an attention's penalties, if they are all squares times factors."""
    found: list[Term] = []
    for method in action.penalties:
        penalty = cast(Penalty, method)
        factors = penalty.square_factors(samples, tokens, action.place)
        if factors is None:
            return None
        found += [Term(method.name, name, square, factor, penalty.sums) for name, (square, factor) in factors.items()]
    return tuple(found)


def attend_with_terms(
    action: AttentionAction, impl: str, call: Call, bias: Tensor | None, terms: tuple[Term, ...]
) -> Tensor:
    """A call that takes all penalties along, which are entered. bias: of the projection that gave call.packed."""
    refuse_parts(action.control, action.penalties[0], action.place)
    out, squares = IMPLEMENTATIONS[impl].attention_and_squares(call, bias, factors_of(terms))
    enter(action, terms, squares)
    attended: Tensor = out
    return attended


def factors_of(terms: tuple[Term, ...]) -> dict[str, float]:
    """The squares that terms ask for, each with its factor; 1 where it is in several terms that have their own."""
    factors = {term.square: term.factor for term in terms}
    return factors if len(factors) == len(terms) else dict.fromkeys(factors, 1.0)


def enter(action: AttentionAction, terms: tuple[Term, ...], squares: Mapping[str, Tensor]) -> None:
    """Put terms into the ledger. squares: each times what `factors_of` says."""
    control, place = action.control, action.place
    alone = len(squares) == len(terms)
    for term in terms:
        value = squares[term.square] if alone else term.factor * squares[term.square]
        control.enter(Entry(place.name, place.block, term.method, term.component, value, term.sums))


def never(call: Call) -> None:
    """Of implementations that do everything each time."""


class Decisions:
    """What was decided for the calls of one module, as long as the same methods act in them."""

    def __init__(self) -> None:
        self.methods: tuple[Perturbation, ...] | None = None
        self.known: dict[Any, Decision] = {}

    def of(self, methods: tuple[Perturbation, ...]) -> dict[Any, Decision]:
        """Layout → what was decided for it, where these methods act."""
        if self.methods is not methods:
            self.methods, self.known = methods, {}
        return self.known

    def __reduce__(self) -> tuple[type[Decisions], tuple[()]]:
        """A copy of the module decides for itself, and a file holds no kernels."""
        return Decisions, ()

    def remember(self, methods: tuple[Perturbation, ...], key: Any, decision: Decision) -> None:
        known = self.of(methods)
        if len(known) >= MOST:
            known.clear()
        known[key] = decision


def layout_of(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, training: bool, on: bool, penalises: bool
) -> tuple[Any, ...]:
    """What a decision depends on, beside the methods. on: whether these act now; penalises: whether penalties do."""
    shapes = (query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride())
    return (*shapes, query.dtype, query.device, is_causal, training, on, penalises)


class RepeatedAttention(TorchFunctionMode):
    """Catches the attention calls of a module that is known to make nothing but fused calls of plain tensors."""

    def __init__(self, action: AttentionAction, module: nn.Module, full: type[AttentionInterceptor]) -> None:
        super().__init__()
        training = module.training
        self.action, self.module, self.full_class, self.training = action, module, full, training
        self.on = action.control.on(training)
        self.penalises = len(action.penalties) > 0 and action.control.penalises(training)
        self.unusual: Container[Any] = action.unusual
        """The functions that are looked at."""
        self.packing: Tensor | None = action.packing if F.linear in action.unusual else None
        """The weight that gives Q, K and V together."""
        self.packed: Tensor | None = None
        self.projected: tuple[Tensor, Tensor | None] | None = None
        """The input and the bias of the projection that gave them."""
        self.counted = False
        """Whether their penalties were taken."""
        self.region = innermost()
        self.met = 0
        self.untouched = False
        """Whether torch's own call was made as it was."""
        self.full: AttentionInterceptor | None = None
        """What took over, since something was not as it was."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.unusual:  # a dozen functions in every block: nothing else is asked of most of them
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.full is None:
            if func is SDPA:
                return self.attend(*args, **(kwargs or {}))
            if func is F.linear:
                out = func(*args, **(kwargs or {}))
                self.note_projection(out, *args, **(kwargs or {}))
                return out
        return self.hand_over().__torch_function__(func, types, args, kwargs)

    def hand_over(self) -> AttentionInterceptor:
        """Let the full interceptor do the rest of this pass."""
        if self.full is None:
            self.full, self.unusual = self.full_class(self.action, self.module), ALL
            self.full.region = self.region
            self.full.met = self.met
            if self.packed is not None and self.projected is not None:
                self.full.note_packed(self.projected[0], self.packed, self.projected[1])
                self.full.counted = self.full.seen["v"][1] if self.counted else None
        return self.full

    def note_projection(self, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """A linear layer inside the module, and what it gave."""
        if weight is self.packing:
            self.packed, self.projected, self.counted = out, (input, bias), False

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The fused call."""
        if attn_mask is None and not dropout_p and type(query) is Tensor and query.dim() == 4:
            dtype = autocast_dtype(query)
            q, k, v = query, key, value
            if dtype is not None and not (q.dtype == k.dtype == v.dtype == dtype) and q.dtype != torch.float64:
                q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            known = self.action.decisions.of(self.action.active)
            decision = known.get(layout_of(q, k, v, is_causal, self.training, self.on, self.penalises))
            packed = self.packed if self.packed is not None and self.packed.dim() == 3 else None
            bias = None if self.projected is None else self.projected[1]
            if decision is not None and decision.repeat is not None:
                again = self.repeat(decision, decision.repeat, (q, k, v), packed, scale)
                if again is not None:
                    return again
            if decision is not None and not decision.methods and not decision.terms and decision.impl == "sdpa":
                self.met += 1
                self.untouched = True
                self.note_no_padding()
                grouped = q.shape[1] != k.shape[1]
                given = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=given, enable_gqa=grouped)
            if decision is not None and (not decision.terms or (packed is not None and not self.counted)):
                refuse_inner_checkpoint(self.action, self.region)
                drawn = self.source(q, k, is_causal) if decision.methods else None
                if drawn is None or drawn.at is NOWHERE or drawn.at == NOWHERE:
                    self.met += 1
                    whole = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
                    call = Call(q, k, v, None, is_causal, whole, decision.methods, drawn, packed)
                    self.note_no_padding()
                    if not decision.asked:
                        decision.asked = True
                        decision.repeat = getattr(IMPLEMENTATIONS[decision.impl], "repeat", never)(call)
                    if decision.terms:
                        self.counted = True
                        return attend_with_terms(self.action, decision.impl, call, bias, decision.terms)
                    out: Tensor = IMPLEMENTATIONS[decision.impl].attention(call)
                    return out
                self.give_back(drawn)
        full = self.hand_over()
        full.met += 1
        return full.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def repeat(
        self, decision: Decision, call: Repeat, given: tuple[Tensor, Tensor, Tensor], packed: Tensor | None,
        scale: float | None,
    ) -> Tensor | None:  # fmt: skip
        """A call for which nothing is left to decide, in a process that stands alone; None: there is more to do."""
        q, k, v = given
        whole = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if whole != call.scale or not call.serves(q) or may_repeat():
            return None
        drawn, terms = None, decision.terms
        if terms:
            if packed is None or self.counted or is_distributed():
                return None
        if decision.methods:
            control = self.action.control
            drawn = ordinary_source(control, self.action.stream_site.word, q)
            if drawn is None:
                return None
            control.ledger.draws.notes[drawn.site, drawn.call] = Note((*q.shape[:3], k.shape[2]), NOWHERE)
        self.met += 1
        self.note_no_padding()
        if not terms or packed is None:
            return call(q, k, v, packed, drawn)
        self.counted = True
        bias = None if self.projected is None else self.projected[1]
        out, squares = call.with_squares(given, packed, bias, decision.factors, drawn)
        enter(self.action, terms, squares)
        return out

    def source(self, q: Tensor, k: Tensor, is_causal: bool) -> Source:
        """Where the streams of a call start."""
        action = self.action
        batch, heads, queries, width = q.shape
        shape = AttentionShape(heads, queries, k.shape[2], width, is_causal)
        place = functools.partial(attention_offsets, action=action, shape=shape, held=None)
        drawn = source(action.control, action.stream_site, q, batch, place)
        note(action.control, drawn, (batch, heads, queries, k.shape[2]))
        return drawn

    def give_back(self, drawn: Source) -> None:
        """Undo `source`: the full interceptor will draw."""
        draws = self.action.control.ledger.draws
        if draws is not None:
            draws.calls[drawn.site] = drawn.call

    def note_no_padding(self) -> None:
        """Methods that ask for padding learn that this block has none."""
        action = self.action
        if action.watchers:
            action.control.ledger.padding.pop(action.place.block, None)
