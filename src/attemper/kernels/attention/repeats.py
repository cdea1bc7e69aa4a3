"""A call that is made again and again: all that its layout decides is decided once, and only launches are left.

In an eager loop of small batches people wait for the host. What comes before a launch is the same for every call with
tensors of the same shapes, strides and dtypes: what its methods drop, which kernels serve it, with which grids and
strides. This serves calls without a mask in which at most one method drops inside of softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.kernels.attention import operators, packed, penalised
from attemper.kernels.attention.launch_arguments import PenaltyGradients, mask_arguments, penalty_gradient_arguments
from attemper.kernels.attention.launches import BackwardLaunches, ForwardLaunches, backward_launches, forward_launches
from attemper.kernels.attention.prepare import TAIL, row_cuts, table_launch
from attemper.kernels.common.direct import is_aligned, remember
from attemper.kernels.common.dropping import KEYS, NOTHING, drop_code
from attemper.kernels.common.eager import is_plain
from attemper.kernels.common.launch import LOG2E, on_device
from attemper.ops.call import Call
from attemper.ops.outside_softmax import is_outside
from attemper.ops.perturbation import LargestDrop, Perturbation
from attemper.ops.stream import LANES, NOWHERE, Source, signed, threshold

Three = tuple[Tensor, Tensor, Tensor]


class Inside(NamedTuple):
    """What is dropped inside of softmax, by the stream of a lane.

    code: a number of `common/dropping.py`; largest: of hard masking, which has none.
    """

    lane: int = 0
    rate: float = 0.0
    code: int = NOTHING
    largest: LargestDrop | None = None

    @property
    def drops(self) -> bool:
        """Whether anything is dropped inside; a method of others may do so at rate 0."""
        return self.code != NOTHING or self.largest is not None

    @property
    def fill(self) -> str:
        return "none" if self.largest is None else self.largest.fill


class Tables(NamedTuple):
    """Random words: of what is dropped, and of hard masking, whose cuts follow from them."""

    table: Tensor | None = None
    hard: Tensor | None = None
    cuts: Tensor | None = None


def repeat_of(call: Call) -> Repeat | None:
    """What is left to do in calls like this one, which these kernels serve; None: more than can be decided once."""
    if call.documents is not None or call.with_lse or call.attn_mask is not None or call.at != NOWHERE:
        return None
    if torch.compiler.is_compiling():
        return None
    inside, keys = Inside(), call.k.shape[2]
    for lane, method in enumerate(call.methods):
        if is_outside(method):
            continue
        drop, largest = method.word_drop, method.largest_drop(keys)
        if inside.drops or (drop is None and largest is None) or method.seed_drop(keys) is not None:
            return None
        if drop is not None and not drop.by_key:
            inside = Inside(lane, drop.p, drop_code(drop))
        elif largest is not None and not largest.shared:
            inside = Inside(lane, largest.p, NOTHING, largest)
        else:
            return None
    return Repeat(call, inside)


class Repeat:
    """One kind of call. It is called with tensors of the layout that it was made for, and of no other."""

    def __init__(self, call: Call, inside: Inside) -> None:
        self.inside, self.causal, self.scale, self.limit = inside, call.is_causal, call.scale, threshold(inside.rate)
        self.device, self.keys, self.drops = call.q.device, call.k.shape[2], inside.drops
        outside = [(method, lane) for lane, method in enumerate(call.methods) if is_outside(method)]
        self.outside: list[tuple[Perturbation, int]] = sorted(outside, key=lambda pair: pair[0].order)
        self.forwards: dict[Any, ForwardLaunches | None] = {}
        self.backwards: dict[Any, BackwardLaunches | None] = {}
        """By the precision of products in float32, which torch lets its users change, and by the layout of what is not
        known before: blurred keys, the gradient of the output."""
        self.code = inside.code or KEYS

    def serves(self, q: Tensor) -> bool:
        """Whether nobody but autograd takes part this time."""
        return is_plain(q) and not torch._C._is_torch_function_mode_enabled()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, qkv: Tensor | None, drawn: Source | None) -> Tensor:
        """The output. qkv: what q, k and v may be the parts of."""
        k = self.keys_of(k, drawn)
        tables = self.tables_of(q, k, drawn)
        out: Tensor
        if qkv is not None and is_plain(qkv) and packed.lie_in(qkv, q, k, v):
            out = PackedRepeat.apply(qkv, (q, k, v), tables, self)
        else:
            out = ApartRepeat.apply(q, k, v, tables, self)
        return self.heads_of(out, drawn)

    def with_squares(
        self, given: Three, qkv: Tensor, bias: Tensor | None, wanted: Mapping[str, float], drawn: Source | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and squares of the projection that gave q, k and v, each times its factor."""
        q, k, v = given[0], self.keys_of(given[1], drawn), given[2]
        tables = self.tables_of(q, k, drawn)
        factors = wanted.get("v", 0.0), wanted.get("qk", 0.0)
        if is_plain(qkv) and packed.lie_in(qkv, q, k, v):
            given, others = (q, k, v), self.others(tables)
            out, *taken = penalised.DirectPenalisedAttention.apply(qkv, bias, *factors, given, (self, tables), *others)
        else:
            out, *taken = penalised.with_squares(qkv, bias, q, k, v, *factors, *self.others(tables))
        names = [name for name in penalised.SQUARES if wanted.get(name)]
        return self.heads_of(out, drawn), dict(zip(names, taken, strict=True))

    def keys_of(self, k: Tensor, drawn: Source | None) -> Tensor:
        """The keys as methods change them outside of softmax."""
        for method, lane in self.outside:
            k = method.perturb_keys(k, None, self.causal, _source(drawn).stream(lane))
        return k

    def heads_of(self, out: Tensor, drawn: Source | None) -> Tensor:
        """The output as they scale its heads."""
        for method, lane in self.outside:
            out = method.perturb_heads(out, _source(drawn).stream(lane))
        return out

    def others(self, tables: Tables) -> tuple[Any, ...]:
        """The arguments of the operators behind Q, K and V."""
        table, hard, cuts = tables
        return None, table, self.scale, self.causal, None, cuts, hard, self.inside.fill, self.code

    def tables_of(self, q: Tensor, k: Tensor, drawn: Source | None) -> Tables:
        """What is drawn for a call that is no part of another, as `prepare.drop_table` and `row_cuts` do it."""
        if not self.drops:
            return Tables()
        drawn, largest = _source(drawn), self.inside.largest
        seed, table = drawn.seed, torch.empty(self.keys + TAIL, dtype=torch.int32, device=self.device)
        path = signed(drawn.call * LANES + self.inside.lane)
        with on_device(seed):
            launch = table_launch(self.keys, self.limit, seed.get_device())
            launch(is_aligned(seed), seed, table, table, self.limit, self.keys, drawn.site, path, 0, 0, 0, 0)
        if largest is None:
            return Tables(table)
        spare = largest.fill == "neg_inf"
        found = row_cuts(q.detach(), k.detach(), None, None, None, table, self.scale, self.causal, largest.count, spare)
        return Tables(None, table, found)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Three:
        """Output, stats and flags."""
        key = (_precision(q), k.stride())
        if key not in self.forwards:
            found = forward_launches(q, k, v, None, "none", self.inside.code, self.causal, self.inside.fill)
            remember(self.forwards, key, found)
        found = self.forwards[key]
        if found is None:
            return operators.forward(q, k, v, *self.others(tables))
        masked, _ = mask_arguments(None, None, q)
        return operators.run_forward(found, q, k, v, masked, tables, self.scale * LOG2E, is_aligned(q, k, v))

    def backward(
        self, dout: Tensor, given: Three, grads: Three, out: Tensor, stats: Tensor, flags: Tensor, tables: Tables,
        penalties: PenaltyGradients | None = None,
    ) -> None:  # fmt: skip
        """Write the gradients of q, k and v, with what penalties add to them."""
        q, k, v = given
        added, constants = penalty_gradient_arguments(penalties, stats)
        kind = constants["PENALTY"], constants["BIAS"]
        key = (dout.stride(), dout.dtype, q.stride(), k.stride(), grads[0].stride(), _precision(q), kind)
        if key not in self.backwards:
            others, settings = (dout, out, *grads), (self.inside.code, self.causal, self.inside.fill)
            found = backward_launches(q, k, v, others, None, "none", *settings, True, constants)
            remember(self.backwards, key, found)
        found = self.backwards[key]
        if found is None:
            operators.backward_into(
                grads, dout, *given, out, stats, flags, *self.others(tables), penalty_gradients=penalties
            )  # fmt: skip
            return
        masked, aligned = mask_arguments(None, None, q)[0], is_aligned(q, k, v, dout, *added[:4])
        tensors = (q, k, v, dout, out, *grads)
        operators.run_backward(found, tensors, stats, flags, masked, tables, added, self.scale, aligned)


def _source(drawn: Source | None) -> Source:
    assert drawn is not None  # where methods act
    return drawn


def _precision(q: Tensor) -> str:
    return torch.get_float32_matmul_precision() if q.dtype == torch.float32 else ""


class PackedRepeat(torch.autograd.Function):
    """The call where they are the parts of one tensor: `packed.DirectPackedAttention`, but for what is decided."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, given: Three, tables: Tables, call: Repeat) -> Tensor:
        out, stats, flags = call.forward(*given, tables)
        ctx.call, ctx.heads = call, given[0].shape[1]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(qkv, out, stats, flags, *tables)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 4
        qkv, out, stats, flags, *kept = ctx.saved_tensors
        tables, heads = Tables(*kept), ctx.heads
        if not is_plain(dout) or torch.is_grad_enabled():  # which says that there are no second gradients
            grad = packed.gradient(dout, qkv, heads, out, stats, flags, *ctx.call.others(tables))
            return grad, None, None, None
        grad = torch.empty_like(qkv)
        ctx.call.backward(dout, packed.views(qkv, heads), packed.views(grad, heads), out, stats, flags, tables)
        return grad, None, None, None


class ApartRepeat(torch.autograd.Function):
    """The call where they are apart: `operators.DirectAttention`, but for what is decided."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tables: Tables, call: Repeat) -> Tensor:
        out, stats, flags = call.forward(q, k, v, tables)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, stats, flags, *tables)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 5
        q, k, v, out, stats, flags, *kept = ctx.saved_tensors
        tables = Tables(*kept)
        if not is_plain(dout) or torch.is_grad_enabled():
            grads = operators.gradients(dout, q, k, v, out, stats, flags, *ctx.call.others(tables))
        else:
            grads = operators.backward_fake(dout, q, k, v)
            ctx.call.backward(dout, (q, k, v), grads, out, stats, flags, tables)
        return (*grads, None, None)
