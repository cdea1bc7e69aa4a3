"""Interception: while a tempered attention module runs, its attention calls are ours.

A torch-function mode catches attention at three points: `scaled_dot_product_attention`, `multi_head_attention_forward`,
and softmax over keys, however logits lie in their axes. Inside the same module it also sees the products before and
behind softmax, and the projections. Where nothing acts, as in eval mode, no mode is entered at all: even an empty one
would switch off `nn.TransformerEncoder`'s fast path and so change bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ConflictError, MeshError, UnsupportedError
from attemper.methods.kinds import Penalty
from attemper.ops.call import Call, make_call
from attemper.ops.choice import is_half
from attemper.ops.dispatch import attend_and_square, choose, chosen_name, fastest_unperturbed
from attemper.ops.perturbation import Perturbation, WeightDropout
from attemper.ops.precision import autocast_dtype
from attemper.ops.reference import attention_weights
from attemper.ops.stream import Source
from attemper.tempering.axes import SOFTMAX, Arrangement, as_it_was, plain_arrangement, sorted_by_role
from attemper.tempering.mesh import is_sharded
from attemper.tempering.multihead import MultiheadArguments, attention_as_torch, merge_heads, project, split_heads
from attemper.tempering.offsets import AttentionShape
from attemper.tempering.operands import in_order
from attemper.tempering.products import PRODUCTS
from attemper.tempering.readings import read_heads
from attemper.tempering.repeated import Decision, Term, attend_with_terms, layout_of, terms_of
from attemper.tempering.shards import Held, hold_call, refuse_nested
from attemper.tempering.witness import note_padding
from attemper.tempering.written import WrittenAttention

if TYPE_CHECKING:
    from attemper.tempering.attention import AttentionAction


CONVOLUTIONS = (F.conv2d, torch.conv2d)
SDPA = torch._C._nn.scaled_dot_product_attention
"""`F.scaled_dot_product_attention`, also where somebody has put another function in its place, which calls this one."""


class AttentionInterceptor(WrittenAttention):
    """Catches the attention calls of one forward pass of one module."""

    def __init__(self, action: AttentionAction, module: nn.Module) -> None:
        super().__init__(action, module)
        self.only_observes = len(self.methods) == 0 and len(self.maps) == 0 and action.impl == "auto"
        """Whether the module computes what it would compute anyway, and penalties or padding are noted."""
        self.plain = True
        """Whether it met fused calls of plain tensors (B, H, N, e) alone."""
        self.entered = False
        """Whether the call that was computed last has entered its penalties."""
        self.held: Held | None = None
        """While a call of DTensors is computed: which part of its queries this process has."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = in_order(func, args, kwargs)
        if func is SDPA:
            self.met += 1
            return self.sdpa(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            self.met += 1
            self.plain = False
            return self.multihead(MultiheadArguments(*args, **kwargs))
        if func in SOFTMAX:
            self.plain = False
            return self.softmax(func, args, kwargs)
        if func in PRODUCTS and (self.maps or self.penalties) and not kwargs:
            layer = self.product_with_weight(func, args)
            if layer is not None:
                return layer
        if func in PRODUCTS and (self.blurs or self.following):
            return self.product(func, args, kwargs)
        if func is F.linear and (self.maps or self.penalties or self.action.packs):
            out = self.linear(*args, **kwargs)
        elif func in CONVOLUTIONS and (self.maps or self.penalties):
            out = self.convolution(func, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if self.seen_maps is not None:
            self.seen_maps.note(func, out)
        if self.following and isinstance(out, Tensor):
            self.follow_weights(func, args, kwargs, out)
        elif self.blurred is not None and isinstance(out, Tensor):
            self.follow_content(func, args, kwargs, out)
        return out

    # ----------------------------------------------------------------------------------------- interception points
    def sdpa(
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
        """The fused call. Takes (…, N, e) like the original; leading axes other than heads go into the batch."""
        refuse_nested(query)
        if is_sharded(query):
            return self.sharded_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale)
        given = query, value
        self.plain &= query.dim() == 4 and attn_mask is None and not dropout_p and type(query) is Tensor
        dtype = autocast_dtype(query)
        if dtype is not None:
            query, key, value = (t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value))
        lead, width = query.shape[:-2], value.shape[-1]
        arrangement = self.heads_of(query)
        if arrangement is not None:
            if attn_mask is not None and attn_mask.dim() > 2:
                attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
                attn_mask = sorted_by_role(attn_mask, arrangement.of(attn_mask.shape))
            axes = arrangement.of((*query.shape[:-1], width))
            query, key, value = (
                sorted_by_role(t.expand(*lead, *t.shape[-2:]), arrangement.of((*lead, *t.shape[-2:])))
                for t in (query, key, value)
            )
        self.settle_grid(query.shape[0], key.shape[2])
        self.action.note_shape(self.methods, query.shape[1], key.shape[2], self.met)
        if self.penalties:
            self.note_order(given[1], given[1].dim() - 2)
            self.check_values(value)
        note_padding(self.action, attn_mask, is_causal, query.shape[0], key.shape[2])
        methods = self.with_own_dropout(dropout_p, key.shape[2])
        if self.only_observes and dropout_p:  # the model's own dropout, drawn as it always was
            grouped = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
            )
            squares: dict[str, Tensor] = {}
        else:
            packed = None if arrangement is not None or is_sharded(self.packed) else self.packed
            self.plain &= arrangement is None
            out, squares = self.attend(
                make_call(
                    query,
                    key,
                    value,
                    attn_mask,
                    is_causal,
                    scale,
                    methods,
                    self.drawn(query, key, methods, is_causal),
                    packed,
                )
            )
        if not self.entered:
            self.penalise(out, query, key, attn_mask, is_causal, scale, squares=squares)
        self.entered = False
        out = out if arrangement is None else as_it_was(out, axes)
        if self.origins is not None:
            self.origins.note_attended(*given, out)
        return out

    def sharded_sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """The fused call of DTensors: each process computes the samples and heads that it holds."""
        held = hold_call(query, key, value, attn_mask)
        if isinstance(held, str):
            raise MeshError(
                f"{self.action.place.where} computes attention on DTensors, and {held}. Where tokens are split, as "
                "under torch's context_parallel, call attemper.attention(…, seed=…, at=…) yourself."
            )
        self.held = held.query
        try:
            return held.whole(self.sdpa(held.query.local, held.key, held.value, held.mask, dropout_p, is_causal, scale))
        finally:
            self.held = None

    def heads_of(self, query: Tensor) -> Arrangement | None:
        """Where samples and heads are in queries (…, Nq, e); None: (B, H, Nq, e)."""
        facts, key = self.action.facts, ("queries", query.dim(), -1)
        if self.origins is not None:
            facts.learn(key, read_heads(self.origins.of(query)))
        arrangement = facts.arrangements.get(key)
        if arrangement is None:
            arrangement = plain_arrangement(query.dim())
            self.require_heads(query.dim() > 3)
        single = query.dim() == 4 and query.shape[1] == 1
        return None if arrangement.is_plain or single else arrangement

    def multihead(self, call: MultiheadArguments) -> tuple[Tensor, Tensor | None]:
        """The multi-head call, whose attention cannot be caught inside of it."""
        action = self.action
        self.map_multihead_weights(call)
        dropout_p = call.dropout_p if call.training else 0.0
        # In half precision on a GPU our kernel may be faster than torch's; elsewhere the bits stay as they are.
        faster = is_half(call.query) and not (call.need_weights or dropout_p)
        as_torch = self.only_observes and not faster
        projected = project(call, as_torch)
        q, k, v, mask = split_heads(call, *projected)
        self.settle_grid(q.shape[0], k.shape[2])
        self.action.note_shape(self.methods, q.shape[1], k.shape[2], self.met)
        note_padding(self.action, mask, call.is_causal, q.shape[0], k.shape[2])
        methods = self.with_own_dropout(dropout_p, k.shape[2])
        if as_torch:
            return self.observed_multihead(call, projected, (q, k, v), mask)
        is_causal = call.is_causal and (call.key_padding_mask is None or len(self.blurs) > 0)
        if is_causal and call.key_padding_mask is None:
            mask = None  # the hint says that the mask is the causal one; torch takes the hint then, too
        weights = None
        if call.need_weights:
            if action.impl not in ("auto", "reference"):
                raise UnsupportedError(
                    f"impl='{action.impl}' gives no attention weights, and {action.place.where} is called with "
                    "need_weights=True. impl='reference' does, and so does 'auto'."
                )
            drawn = self.drawn(q, k, methods, is_causal)
            weights = attention_weights(make_call(q, k, v, mask, is_causal, None, methods, drawn))
            out = (weights @ v.to(weights.dtype)).to(q.dtype)
            weights = weights.to(q.dtype)
        else:
            drawn = self.drawn(q, k, methods, is_causal)
            out, _ = self.attend(make_call(q, k, v, mask, is_causal, None, methods, drawn))
        if self.penalties:
            self.note_multihead(call, projected)
            self.penalise(out, q, k, mask, is_causal)
        return merge_heads(call, out, weights)

    def observed_multihead(
        self, call: MultiheadArguments, projected: tuple[Tensor, ...], heads: tuple[Tensor, ...], mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A call in which nothing is changed: torch's own operations, of which penalties see the operands."""
        q, k, v = heads
        hinted = call.is_causal and call.key_padding_mask is None and not call.need_weights
        if hinted:
            mask = None  # the hint says that the mask is the causal one, and torch takes the hint
        out, weights = attention_as_torch(call, q, k, v, mask)
        if self.penalties:
            self.note_multihead(call, projected)
            self.penalise(out, q, k, mask, hinted)
        return merge_heads(call, out, weights)

    def drawn(self, q: Tensor, k: Tensor, methods: tuple[Perturbation, ...], is_causal: bool) -> Source | None:
        """Where the streams of a call start. q: (B, H, Nq, e); k: (B, H_kv, Nk, e)."""
        batch, heads, queries, width = q.shape
        shape = AttentionShape(heads, queries, k.shape[2], width, is_causal)
        return self.source(methods, batch, shape, q, self.held)

    def attend(self, call: Call) -> tuple[Tensor, dict[str, Tensor]]:
        """A fused call, and squares for penalties that it took along.

        A call that is only looked at gets the fastest kernel in training, too.
        """
        impl = self.action.impl
        if impl == "auto" and not call.methods and self.training:
            impl = fastest_unperturbed(call, alone=len(self.penalties) == 0)
        terms = self.terms_taken(call, impl)
        self.plain &= len(self.penalties) == 0 or len(terms) > 0
        if self.plain and self.action.may_repeat():
            self.decide(call, impl, terms)
        if terms:
            self.check_penalised(call.v, call.q.shape[1])
            self.entered = True
            return attend_with_terms(self.action, chosen_name(call, impl), call, self.packed_bias, terms), {}
        wanted = {square for m in self.penalties for square in cast(Penalty, m).wants_squares(self.action.place)}
        # DropConnect's projections are not those of the weights that are penalised.
        return attend_and_square(call, impl, self.packed_bias, () if self.maps else wanted)

    def terms_taken(self, call: Call, impl: str) -> tuple[Term, ...]:
        """The terms of all penalties, if they are squares that the call takes along."""
        if not self.penalties or self.maps or self.added or call.packed is None or torch.compiler.is_compiling():
            return ()
        terms = terms_of(self.action, call.q.shape[0], call.q.shape[2])
        chosen = choose(call, impl)
        if not terms or not hasattr(chosen, "squares"):
            return ()
        wanted = {term.square for term in terms}
        return terms if wanted <= set(chosen.squares(call, wanted)) else ()

    def decide(self, call: Call, impl: str, terms: tuple[Term, ...]) -> None:
        """Remember who serves a call like this. terms: of penalties, which it takes along."""
        if call.methods == self.methods or call.methods == self.fitted(call.k.shape[2]):
            on, penalises = self.action.control.on(self.training), len(self.penalties) > 0
            key = layout_of(call.q, call.k, call.v, call.is_causal, self.training, on, penalises)
            decision = Decision(chosen_name(call, impl), call.methods, terms)
            self.action.decisions.remember(self.action.active, key, decision)

    def with_own_dropout(self, dropout_p: float, keys: int) -> tuple[Perturbation, ...]:
        """The methods that act, and the model's own attention dropout behind them, drawn from the same stream."""
        if dropout_p == 0.0:
            return self.fitted(keys)
        for method in self.penalties:
            component = cast(Penalty, method).needs_unit_rows
            if component:
                raise ConflictError(
                    f"{method.name}({component}) needs rows of attention that sum to 1, and {self.action.place.where} "
                    f"has attention dropout of its own ({dropout_p}); build the model without it or use another "
                    "component"
                )
        return (*self.fitted(keys), WeightDropout(dropout_p))
