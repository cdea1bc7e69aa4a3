"""Interception of attention whose calls are known: what one pass found out is not found out again in the next.

Most attention modules make one fused call of plain tensors, in every pass the same one. The first pass goes through
`interception.py`, which can do everything and asks everything. Where it saw nothing but such calls, later passes come
here: a call is looked up by the layout of its tensors, and what was decided for it holds again. Whatever differs, such
as a mask or a softmax, is handed to the full interceptor.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.ops.call import Call
from attemper.ops.dispatch import IMPLEMENTATIONS
from attemper.ops.perturbation import Perturbation
from attemper.ops.precision import autocast_dtype
from attemper.ops.stream import NOWHERE, Source
from attemper.tempering.axes import SOFTMAX
from attemper.tempering.draws import note, source
from attemper.tempering.offsets import AttentionShape, attention_offsets
from attemper.tempering.products import PRODUCTS

if TYPE_CHECKING:
    from attemper.tempering.attention import AttentionAction
    from attemper.tempering.interception import AttentionInterceptor

SDPA = torch._C._nn.scaled_dot_product_attention
MOST = 256
"""Calls that are remembered for one module. Where lengths change with every batch, they would become ever more."""


UNUSUAL = frozenset((*SOFTMAX, F.multi_head_attention_forward))
UNUSUAL_FOR_KEYS = UNUSUAL | frozenset(PRODUCTS)
"""The same where methods change keys: in attention that is written out they follow the product with the queries."""


class Decision(NamedTuple):
    """What was decided for a call: the name of the implementation, and the methods as they act on so many keys."""

    impl: str
    methods: tuple[Perturbation, ...]


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

    def remember(self, methods: tuple[Perturbation, ...], key: Any, decision: Decision) -> None:
        known = self.of(methods)
        if len(known) >= MOST:
            known.clear()
        known[key] = decision


def layout_of(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, training: bool, on: bool) -> tuple[Any, ...]:
    """What a decision depends on, beside the methods. on: whether these act now."""
    shapes = (query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride())
    return (*shapes, query.dtype, query.device, is_causal, training, on)


class RepeatedAttention(TorchFunctionMode):
    """Catches the attention calls of a module that is known to make nothing but fused calls of plain tensors."""

    def __init__(self, action: AttentionAction, module: nn.Module, full: type[AttentionInterceptor]) -> None:
        super().__init__()
        self.action, self.module, self.full_class = action, module, full
        self.training = module.training
        self.on = action.control.on(module.training)
        self.unusual = UNUSUAL_FOR_KEYS if any("keys" in method.stages for method in action.active) else UNUSUAL
        """What the full interceptor has to see."""
        self.packing: Tensor | None = None
        """The weight that gives Q, K and V together."""
        if action.packs and action.projections is not None and action.projections.q is not None:
            self.packing = action.projections.q.parameter
        self.packed: Tensor | None = None
        self.met = 0
        self.full: AttentionInterceptor | None = None
        """What took over, since something was not as it was."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.full is None:
            if func is SDPA:
                return self.attend(*args, **(kwargs or {}))
            if func is F.linear and self.packing is not None and len(args) > 1 and args[1] is self.packing:
                self.packed = func(*args, **(kwargs or {}))
                return self.packed
            if func not in self.unusual:
                return func(*args, **(kwargs or {}))
        return self.hand_over().__torch_function__(func, types, args, kwargs)

    def hand_over(self) -> AttentionInterceptor:
        """Let the full interceptor do the rest of this pass."""
        if self.full is None:
            self.full = self.full_class(self.action, self.module)
            self.full.met = self.met
            if self.packed is not None and self.packed.dim() == 3:
                self.full.packed = self.packed
        return self.full

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
            decision = known.get(layout_of(q, k, v, is_causal, self.training, self.on))
            if decision is not None:
                drawn = self.source(q, k, is_causal) if decision.methods else None
                if drawn is None or drawn.at is NOWHERE or drawn.at == NOWHERE:
                    self.met += 1
                    packed = self.packed if self.packed is not None and self.packed.dim() == 3 else None
                    whole = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
                    call = Call(q, k, v, None, is_causal, whole, decision.methods, drawn, packed)
                    self.note_no_padding()
                    out: Tensor = IMPLEMENTATIONS[decision.impl].attention(call)
                    return out
                self.give_back(drawn)
        full = self.hand_over()
        full.met += 1
        return full.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

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
