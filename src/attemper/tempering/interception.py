"""Interception: while a tempered attention module runs, its attention calls are ours.

A torch-function mode catches attention at three points: `scaled_dot_product_attention`, `multi_head_attention_forward`,
and softmax over the last axis of 4-D logits. Inside the same module it also sees the projections being computed, which
is where penalties get their inputs and DropConnect its weights. Where nothing acts, as in eval mode, no mode is entered
at all: even an empty one would switch off `nn.TransformerEncoder`'s fast path and so change bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.errors import ConflictError, UnmetError, UnsupportedError
from attemper.methods.kinds import AttentionRecord, Penalty
from attemper.ops.call import Call, make_call
from attemper.ops.choice import is_half
from attemper.ops.dispatch import attend_and_square, fastest_unperturbed
from attemper.ops.perturbation import Perturbation, WeightDropout
from attemper.ops.precision import autocast_dtype
from attemper.ops.reference import attention_weights, perturbed_softmax
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import Stream
from attemper.sites.adapted import Added
from attemper.tempering.axes import MATMUL, SOFTMAX, are_four_axes, four_axes, is_attention_softmax, three_axes
from attemper.tempering.ledger import Entry
from attemper.tempering.multihead import MultiheadArguments, attention_as_torch, merge_heads, project, split_heads
from attemper.tempering.padding import hides_some_from_others, real_tokens
from attemper.tempering.wrapped import additions, effective_bias, mapped_product, matrix

if TYPE_CHECKING:
    from attemper.tempering.attention import AttentionAction


class AttentionInterceptor(TorchFunctionMode):
    """Catches the attention calls of one forward pass of one module."""

    def __init__(self, action: AttentionAction, module: nn.Module) -> None:
        super().__init__()
        control, training = action.control, module.training
        self.action = action
        self.training = training
        self.methods = action.active if control.on(training) else ()
        self.maps = action.maps if control.on(training) else ()
        self.penalties = action.penalties if control.penalises(training) else ()
        self.blurs = [m for m in self.methods if "keys" in m.stages]
        self.seen: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        """Of each projection: its input, its output, its bias."""
        self.added: dict[str, Added] = self.added_by_adapters() if self.penalties or self.maps else {}
        """Of each projection that has adapters: what they add to its weight, to that of all rows."""
        self.packed: Tensor | None = None
        """What one projection gave for Q, K and V together, (B, N, 3 · H · e)."""
        self.packed_bias: Tensor | None = None
        self.only_observes = len(self.methods) == 0 and len(self.maps) == 0 and action.impl == "auto"
        """Whether the module computes what it would compute anyway, and penalties or padding are noted."""
        self.mapped: list[Tensor] = []
        """The weights that weight maps have changed."""
        self.blurred = False
        self.waiting = False
        """Whether the weights of the softmax have not met the values yet, and penalties wait for that."""
        self.met = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.met += 1
            return self.sdpa(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            self.met += 1
            return self.multihead(MultiheadArguments(*args, **kwargs))
        if func in SOFTMAX and is_attention_softmax(*args, **kwargs):
            self.met += 1
            return self.softmax(*args, **kwargs)
        if func is F.linear and (self.maps or self.penalties or self.action.packs):
            return self.linear(*args, **kwargs)
        if func in MATMUL and are_four_axes(*args, **kwargs):
            if self.blurs and self.met == 0:
                return self.blurred_product(func, *args, **kwargs)
            if self.waiting:
                return self.attention_times_values(func, *args, **kwargs)
        return func(*args, **kwargs)

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
        """The fused call. Takes (…, N, e) like the original; leading axes beyond (batch, heads) go into the batch."""
        dtype = autocast_dtype(query)
        if dtype is not None:
            query, key, value = (t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value))
        shape = (*query.shape[:-1], value.shape[-1])
        if query.dim() != 4:
            if attn_mask is not None and attn_mask.dim() > 2:
                attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
            query, key, value = four_axes(query), four_axes(key), four_axes(value)
            attn_mask = None if attn_mask is None else four_axes(attn_mask)
        self.action.note_heads(self.methods, query.shape[1])
        if self.penalties:
            self.action.check_values(self.plainly_seen("v"), value)
        self.note_padding(attn_mask, is_causal, query.shape[0], key.shape[2])
        methods = self.with_own_dropout(dropout_p)
        if self.only_observes and dropout_p:  # the model's own dropout, drawn as it always was
            grouped = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
            )
            self.penalise(out, query, key, attn_mask, is_causal, scale)
            return out.view(shape)
        call = make_call(query, key, value, attn_mask, is_causal, scale, methods, None, self.packed)
        out, squares = self.attend(call)
        self.penalise(out, query, key, attn_mask, is_causal, scale, squares=squares)
        return out.view(shape)

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
        self.action.note_heads(self.methods, q.shape[1])
        self.note_padding(mask, call.is_causal, q.shape[0], k.shape[2])
        methods = self.with_own_dropout(dropout_p)
        if as_torch:
            return self.observed_multihead(call, projected, (q, k, v), mask)
        is_causal = call.is_causal and (call.key_padding_mask is None or len(self.blurs) > 0)
        if is_causal and call.key_padding_mask is None:
            mask = None  # the hint says that the mask is the causal one; torch takes the hint then, too
        weights = None
        if call.need_weights:
            if action.impl not in ("auto", "reference"):
                raise UnsupportedError(
                    f"impl='{action.impl}' gives no attention weights, and '{action.place.name}' is called with "
                    "need_weights=True. impl='reference' does, and so does 'auto'."
                )
            weights = attention_weights(make_call(q, k, v, mask, is_causal, None, methods, None))
            out = (weights @ v.to(weights.dtype)).to(q.dtype)
            weights = weights.to(q.dtype)
        else:
            out, _ = self.attend(make_call(q, k, v, mask, is_causal, None, methods, None))
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

    def attend(self, call: Call) -> tuple[Tensor, dict[str, Tensor]]:
        """A fused call, and squares for penalties that it took along.

        A call that is only looked at gets the fastest kernel in training, too.
        """
        impl = self.action.impl
        if impl == "auto" and not call.methods and self.training:
            impl = fastest_unperturbed(call)
        wanted = {square for m in self.penalties for square in cast(Penalty, m).wants_squares(self.action.place)}
        # DropConnect's projections are not those of the weights that are penalised.
        return attend_and_square(call, impl, self.packed_bias, () if self.maps else wanted)

    def softmax(self, input: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        """Softmax: logits (B, H, Nq, Nk) with all their masks in, weights out."""
        action = self.action
        if action.impl not in ("auto", "reference"):
            raise UnsupportedError(
                f"impl='{action.impl}' cannot serve '{action.place.name}': it computes attention by matmul and "
                "softmax, not by one fused call. impl='reference' can, and so can 'auto'."
            )
        if self.blurs and not self.blurred:
            raise UnsupportedError(
                f"blur cannot serve '{action.place.name}': the product of its queries and keys was not seen before "
                "softmax, and blurring the logits with their position bias would be another method."
            )
        self.action.note_heads(self.methods, input.shape[1])
        self.note_padding(input, False, input.shape[0], input.shape[3])
        logits = input if dtype is None else input.to(dtype)
        work = logits.to(torch.promote_types(logits.dtype, torch.float32))
        weights = perturbed_softmax(work, self.methods).to(logits.dtype) if self.methods else logits.softmax(-1)
        self.waiting = bool(self.penalties)
        return weights

    def blurred_product(self, func: Any, input: Tensor, other: Tensor) -> Tensor:
        """Before softmax: QKᵀ, whose keys are blurred here, so that no position bias is."""
        self.blurred = True
        seed = draw_seed(input)
        keys = other.transpose(-2, -1)
        for lane, method in enumerate(self.blurs):
            keys = method.perturb_keys(keys, None, False, Stream(seed, lane))
        out: Tensor = func(input, keys.transpose(-2, -1))
        return out

    def attention_times_values(self, func: Any, input: Tensor, other: Tensor) -> Tensor:
        """Behind softmax: AV, with which the penalties are complete."""
        self.waiting = False
        self.action.check_values(self.plainly_seen("v"), other)
        out: Tensor = func(input, other)
        self.penalise(out, weights=input)
        return out

    def with_own_dropout(self, dropout_p: float) -> tuple[Perturbation, ...]:
        """The methods that act, and the model's own attention dropout behind them, drawn from the same stream."""
        if dropout_p == 0.0:
            return self.methods
        for method in self.penalties:
            component = cast(Penalty, method).needs_unit_rows
            if component:
                raise ConflictError(
                    f"{method.name}({component}) needs rows of attention that sum to 1, and '{self.action.place.name}' "
                    f"has attention dropout of its own ({dropout_p}); build the model without it or use another "
                    "component"
                )
        return (*self.methods, WeightDropout(dropout_p))

    # ------------------------------------------------------------------------------- projections, weights and padding
    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer inside the module: note what a penalty needs, drop what DropConnect drops."""
        projections = self.action.projections
        if projections is None:
            return F.linear(input, weight, bias)
        ours = {name: getattr(projections, name) for name in ("q", "k", "v", "out")}
        ours = {name: part for name, part in ours.items() if part is not None and part.parameter is weight}
        added = next((self.added[name] for name in ours if name in self.added), None)
        if self.maps and added is not None:
            self.mapped.append(weight)
            out = mapped_product(input, weight, bias, added, lambda whole: self.map_weight(whole, input))
        else:
            out = F.linear(input, self.map_weight(weight, input) if ours else weight, bias)
        if self.penalties:
            whole = bias if added is None else effective_bias(bias, added)
            for name, projection in ours.items():
                rows = slice(None) if projection.rows is None else slice(*projection.rows)
                self.seen[name] = (input, out[..., rows], None if whole is None else whole[rows])
        if self.action.packs and "q" in ours and added is None:
            self.packed, self.packed_bias = three_axes(out), bias
        return out

    def plainly_seen(self, name: str) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """What was seen of a projection to which no adapter adds, which is all that it gives."""
        return None if name in self.added else self.seen.get(name)

    def added_by_adapters(self) -> dict[str, Added]:
        """What adapters add to the projections whose weights are needed now."""
        action, names = self.action, ("q", "k", "v", "out") if self.maps else ("q", "k", "v")
        if action.projections is None:
            return {}
        method = (*self.penalties, *action.weight_maps)[0].name
        found = additions(method, action.place.name, {name: getattr(action.projections, name) for name in names})
        if self.maps and self.training and any(added.drops for added in found.values()):
            raise ConflictError(
                f"{action.weight_maps[0].name} maps weights of '{action.place.name}' to which an adapter adds with "
                "dropout of its own, and dropped inputs are part of no weight; set lora_dropout=0"
            )
        return found

    def map_weight(self, weight: Tensor, input: Tensor) -> Tensor:
        if self.maps:
            self.mapped.append(weight)
        for method in self.maps:
            weight = method.map_weight(weight, Stream(draw_seed(input)))
        return weight

    def map_multihead_weights(self, call: MultiheadArguments) -> None:
        if not self.maps:
            return
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight"):
            weight = getattr(call, name)
            if weight is not None and weight.numel() > 0:  # some hand over an empty one beside separate ones
                setattr(call, name, self.map_weight(weight, call.query))

    def note_multihead(self, call: MultiheadArguments, projected: tuple[Tensor, ...]) -> None:
        biases = (None, None, None) if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
        for name, x, out, bias in zip("qkv", (call.query, call.key, call.value), projected, biases, strict=True):
            self.seen[name] = (x.transpose(0, 1) if call.batched else x[None], out.transpose(0, 1), bias)

    def note_padding(self, mask: Tensor | None, is_causal: bool, batch: int, keys: int) -> None:
        """Which tokens are real, for methods that ask: those that any query may attend to.

        Methods that mix tokens are refused where attention is causal, or hides some tokens from others.
        """
        action = self.action
        if not action.watchers:
            return
        if is_causal and action.mixers:
            self.refuse_mixing("is causal, and what mixes all tokens would show every token its future")
        padding = action.control.ledger.padding
        if mask is None:
            padding.pop(action.place.block, None) if action.place.block in padding else None
            return
        real = real_tokens(mask, batch)
        if not torch.compiler.is_compiling() and not action.looked and not mask.is_meta:
            action.looked = mask.dim() > 1 and mask.shape[-2] > 1  # a mask that is the same for all queries tells less
            if action.mixers and hides_some_from_others(mask):
                self.refuse_mixing("hides some tokens from others, and what mixes all tokens would show them")
            self.check_entry(mask, real, known=True)
        self.check_entry(mask, real, known=False)
        padding[action.place.block] = real

    def check_entry(self, mask: Tensor, real: Tensor, known: bool) -> None:
        """Raise where a method acted before this attention without knowing of the padding that its mask tells of."""
        entry = self.action.control.ledger.entry_padding
        if self.action.follows_entry is None or (entry is not None) != known:
            return
        if torch.compiler.is_compiling() or mask.is_meta:  # values cannot be read; one mask for all queries is padding
            unknown = entry is None and mask.dim() == 4 and mask.shape[0] > 1 and mask.shape[2] == 1
        else:
            hidden = not real.all() or (entry is not None and not entry.all())
            unknown = hidden and (entry is None or not torch.equal(entry, real))
        if unknown:
            raise ConflictError(
                f"'{self.action.place.name}' is called with a mask that hides padding, and {self.action.follows_entry} "
                "acts before it, where that padding is not known from the arguments of the block: padding would reach "
                "the other tokens. Use batches without padding, or hand the block a mask in an argument whose name "
                "contains 'mask'."
            )

    def refuse_mixing(self, reason: str) -> NoReturn:
        raise ConflictError(
            f"'{self.action.place.name}' {reason}: {' and '.join(self.action.mixers)} cannot act in this block. Leave "
            "it out with targets=."
        )

    def penalise(
        self,
        out: Tensor,
        q: Tensor | None = None,
        k: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        weights: Tensor | None = None,
        squares: dict[str, Tensor] | None = None,
    ) -> None:
        """Enter this attention's penalties into the ledger."""
        if not self.penalties:
            return
        action = self.action
        missing = [name for name in "qkv" if name not in self.seen]
        if missing or action.projections is None:
            raise UnmetError(
                f"'{action.place.name}' computed its {', '.join(missing) or 'projections'} in a way that was not seen: "
                "its penalties cannot be taken. Leave it out with targets=."
            )
        p = action.projections
        query, key, value = (three_axes(self.seen[name][0]) for name in "qkv")
        b_v = self.seen["v"][2]
        if b_v is not None:
            b_v = b_v.view(-1, out.shape[-1])
            b_v = b_v.repeat_interleave(out.shape[1] // b_v.shape[0], 0)  # (H, e)
            if weights is not None:  # rows of A sum to 1 in a fused call, so the bias comes through it as it is
                out, b_v = out - weights.sum(-1, keepdim=True) * b_v[:, None], None
        added = self.added
        matrices = matrix(p.q, added.get("q")), matrix(p.k, added.get("k")), matrix(p.v, added.get("v"))
        # DropConnect's projections are not those of the weights that are penalised, nor are those without adapters.
        whole = [] if self.maps else [name for name in "qkv" if name not in added]
        outputs = {n: (three_axes(self.seen[n][1]), self.seen[n][2]) for n in whole}
        record = AttentionRecord(
            query, key, value, *matrices, out, weights, q, k, attn_mask, is_causal, scale, outputs, b_v, squares or {}
        )
        for method in self.penalties:
            sums = cast(Penalty, method).sums
            for component, term in cast(Penalty, method).attention_terms(record, action.place).items():
                action.control.enter(Entry(action.place.name, action.place.block, method.name, component, term, sums))
