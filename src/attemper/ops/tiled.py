"""Attention tile by tile on a CPU, through torch's own batched products: what stays in the cache is fast.

Torch's fused CPU kernel takes a mask, but the mask is stored, for backward as well. Here a mask is made where it is
used, again in backward, and no logits outlive their tile. Of short rows the weights are kept, where they take less
memory than what goes in and comes out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from attemper.errors import ParameterError
from attemper.ops.call import Call, without_future
from attemper.ops.outside_softmax import is_outside, perturbed_heads, perturbed_keys, refuse_keys
from attemper.ops.perturbation import Drawn, Perturbation, draw
from attemper.ops.precision import without_autocast
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import Source, Stream
from attemper.ops.tile_masks import KeyDrop, Largest, Masks, WeightDrop, Words, reach_of
from attemper.ops.tile_work import Drops, Found, Work
from attemper.ops.tiles import Tile, tiling, zeros

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ------------------------------------------------------------------------------------------------------- what it serves
def refuse(call: Call) -> str | None:
    """Why tiles cannot serve this call, or None."""
    return _refuse_tensors(call) or _refuse_methods(call) or _refuse_surroundings() or refuse_keys(call)


def _refuse_tensors(call: Call) -> str | None:
    if call.q.device.type != "cpu":
        return f"runs on a CPU, and the tensors are on {call.q.device}"
    for x in (call.q, call.k, call.v, call.attn_mask):
        if x is not None and type(x) not in (Tensor, torch.nn.Parameter):
            return f"takes plain tensors, not {type(x).__name__}"
    if call.q.dtype not in DTYPES:
        return f"computes in float32, bfloat16 and float16, not in {call.q.dtype}"
    if 0 in call.shape or call.v.shape[-1] == 0:
        return "has nothing to compute: there are no samples, no queries or no values"
    if call.documents is not None:
        return "knows of no packed documents (cu_seqlens)"
    if call.is_partial or call.with_lse:
        return "takes whole rows of keys, and gives no log-sum-exps (at.key, at.keys, return_lse)"
    return None


def _refuse_methods(call: Call) -> str | None:
    largest, after = False, False
    for method in call.methods:
        if is_outside(method):
            continue
        if _kind(method, call) is None:
            return (
                "knows only methods that drop keys, such as DropKey(0.1), the largest logits, such as HardMask(0.1), "
                f"or weights as ordinary dropout does, inside of softmax, not {method}"
            )
    for kind in (_kind(method, call) for method in sorted(call.methods, key=lambda method: method.order)):
        if kind == "keys" and (largest or after):
            return "drops keys first, and in this call another method drops largest logits or weights before"
        if (kind == "largest" and (largest or after)) or (kind == "weights" and after):
            return "takes one method that drops largest logits and one that drops weights, in this order"
        largest, after = largest or kind == "largest", after or kind == "weights"
    return None


def _kind(method: Perturbation, call: Call) -> str | None:
    """What a method drops: keys, largest logits or weights; None: it does something else."""
    if method.independent_drop is not None or method.drops_keys:
        return "keys"
    with contextlib.suppress(ParameterError):  # which says more where the method is at work
        if method.largest_drop(call.k.shape[2]) is None:
            return "weights" if method.inverted_drop is not None else None
    return "largest"


def _refuse_surroundings() -> str | None:
    if torch.compiler.is_compiling():
        return "is written for eager mode; a compiler makes its own loops of the reference"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "has no rules for torch.func and forward-mode derivatives"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "writes in place, which tracers and dispatch modes may not follow"
    return None


# ------------------------------------------------------------------------------------------------------------- the call
def attention(call: Call) -> Tensor:
    """softmax(scale · QKᵀ + mask, without what methods drop) V, (B, H, Nq, e_v)."""
    with without_autocast(call.q):
        if call.source is None and call.methods:
            call = dataclasses.replace(call, source=Source(draw_seed(call.q)))
        drawn = draw(call.methods, call.source, call.q)
        k, v = perturbed_keys(call, drawn), call.v
        if (groups := call.q.shape[1] // k.shape[1]) > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        # A mask without a gradient need not go through autograd; what is added to logits is made of it below.
        bias = call.attn_mask if call.attn_mask is not None and call.attn_mask.requires_grad else None
        work, q = plan_work(call, drawn), call.q
        if work.tiles.step[0] > 1:  # samples of a tile must lie one behind the other, in backward as well
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out: Tensor = InTiles.apply(q, k, v, bias, work)
        return perturbed_heads(out, drawn)


class InTiles(torch.autograd.Function):
    """Attention in tiles, with its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, work: Work) -> Tensor:
        out, found, weights = work.forward(q, k, v, any(ctx.needs_input_grad) and work.keeps_weights(q, v))
        # What is large is autograd's to keep, so that checkpoints and offloading reach it.
        masks = work.drops.masks
        ctx.kept = len(masks.large)
        ctx.work = work.with_masks(masks.with_large([None] * ctx.kept)) if any_of(masks.large) else work
        ctx.lost = [each.lost for each in found]
        ctx.save_for_backward(q, k, v, bias, weights, *masks.large, *(each.struck for each in found))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weights, *kept = ctx.saved_tensors
        large, struck = kept[: ctx.kept], kept[ctx.kept :]
        work: Work = ctx.work
        if any_of(large):
            work = work.with_masks(work.drops.masks.with_large(large))
        needed = ctx.needs_input_grad[:4]
        with without_autocast(q):
            if torch.is_grad_enabled() or _is_mapped(dout):
                return (*_gradients_by_reference(work, dout, q, k, v, bias, needed), None)
            found = [Found(*each) for each in zip(ctx.lost, struck, strict=True)]
            return (*work.backward(dout, q, k, v, bias, found, weights, needed), None)


def _is_mapped(x: Tensor) -> bool:
    """Whether something is mapped over a tensor: by torch.func, or by `torch.autograd.grad` with is_grads_batched."""
    return torch._C._are_functorch_transforms_active() or is_legacy_batchedtensor(x)


def any_of(tensors: Sequence[Tensor | None]) -> bool:
    """Whether there is one."""
    return any(each is not None for each in tensors)


def _gradients_by_reference(
    work: Work, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients as a graph of their own: for second derivatives, and where torch.func maps over them."""
    from attemper.ops.dispatch import attend

    again = torch.is_grad_enabled()
    with torch.enable_grad():
        q, k, v = (x.view_as(x) if again and x.requires_grad else x.detach().requires_grad_() for x in (q, k, v))
        if bias is not None:
            bias = bias.view_as(bias) if again else bias.detach().requires_grad_()
        out = attend(work.plain_call(q, k, v, bias), "reference")
        wanted = [x for x, need in zip((q, k, v, bias), needed, strict=True) if need and x is not None]
        found = iter(torch.autograd.grad(out, wanted, dout, create_graph=again))
    return tuple(next(found) if need else None for need in needed)


def plan_work(call: Call, drawn: Drawn) -> Work:
    """What is done to every tile of a call."""
    mask, causal = call.mask_and_causal
    shape, ahead = call.shape, 0 if causal else None
    if causal and mask is not None:
        mask, ahead = without_future(mask, *shape[2:], call.at, call.q.device), None
    added = None if mask is None else _as_numbers(mask)
    reach = None if added is None or mask is None or mask.dtype == torch.bool else reach_of(added)
    unreachable = None
    if reach is not None and added is not None:
        unreachable = torch.zeros_like(added).masked_fill_(added <= reach, -torch.inf)
    drops: list[KeyDrop] = []
    largest, after = None, None
    for method, stream in drawn:
        if is_outside(method):
            continue
        if _kind(method, call) == "keys":
            rate = method.independent_drop
            whole = None if rate is None else Words.of(stream, shape, rate)
            drops.append(KeyDrop(whole, None if whole is not None else kept_by(method, stream, shape)))
        elif (drop := method.largest_drop(shape[3])) is not None:
            largest = Largest(drop, Words.of(stream, shape, drop.p, drop.shared), unreachable)
        elif (p := method.inverted_drop) is not None:
            after = WeightDrop(p, Words.of(stream, shape, p), unreachable)
    inside = tuple(Perturbation() if is_outside(method) else method for method in call.methods)  # each keeps its lane
    all_drops = Drops(Masks(added, reach, ahead, tuple(drops)), largest, after)
    return Work(tiling(shape, ahead), call.scale, all_drops, inside, call.source)


def _as_numbers(mask: Tensor) -> Tensor:
    """A mask of four axes that is added to logits."""
    mask = mask.detach()[(None,) * (4 - mask.dim())]
    if mask.dtype != torch.bool:
        return mask.to(torch.float32)
    return zeros(*mask.shape).masked_fill_(~mask, -torch.inf)


def kept_by(method: Perturbation, stream: Stream, shape: tuple[int, int, int, int]) -> Tensor:
    """Which keys a method keeps, as `KeyDrop` takes it; made in parts, which need less memory."""
    tiles = tiling(shape).tiles
    part = _kept_in(method, stream, shape, tiles[0])
    if len(tiles) > 1:
        # Where all queries or heads share a mask it is made once, in tiles of its own shape.
        samples, keys = shape[0], shape[3]
        heads, queries = (1 if part.shape[axis] < tiles[0].sizes[axis] else shape[axis] for axis in (1, 2))
        shared = (samples, heads, queries, keys)
        kept = torch.empty(shared, dtype=torch.bool, device="cpu")
        for tile in tiling(shared).tiles:
            kept[tile.rows] = _kept_in(method, stream, shape, tile)
        part = kept
    return part if part.shape[2] > 1 else _as_numbers(part)


def _kept_in(method: Perturbation, stream: Stream, shape: tuple[int, int, int, int], tile: Tile) -> Tensor:
    at = stream.at
    samples, heads, queries = (each.start for each in tile.rows)
    there = at._replace(
        sample=at.sample + samples, head=at.head + heads, query=at.query + queries, heads=at.heads or shape[1]
    )
    kept = method.kept_keys(tile.sizes, stream.placed(there))
    assert kept is not None
    return kept
