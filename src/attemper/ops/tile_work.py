"""Forward and backward of attention, one tile after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attemper.ops.call import Call
from attemper.ops.perturbation import Perturbation
from attemper.ops.stream import Source
from attemper.ops.tile_masks import Largest, Lost, Masks, WeightDrop, by_head
from attemper.ops.tiles import WORKSPACE, Tile, Tiling, empty, flat, shaped, zeros


@dataclass(frozen=True)
class Drops:
    """What the rows of a call lose. largest: the method that drops largest logits; after: that which drops weights."""

    masks: Masks
    largest: Largest | None
    after: WeightDrop | None

    @property
    def buffers(self) -> int:
        """How many tiles of memory it takes: logits and weights, and what methods need."""
        if self.largest is not None and self.largest.unreachable is not None:
            return 4
        return 2 if self.largest is None and self.after is None else 3


@dataclass(frozen=True)
class Found:
    """What was found out about a tile in forward. struck: the flat places of the largest logits that were dropped."""

    lost: Lost
    struck: Tensor | None


@dataclass(frozen=True)
class Weighed:
    """The weights of a tile.

    factors: what they are multiplied with behind softmax; None: with nothing. free: memory of the tile's shape.
    """

    weights: Tensor
    factors: Tensor | None
    free: Tensor
    found: Found


@dataclass(frozen=True)
class Work:
    """What is done to every tile of a call. methods, source: of what acts inside of softmax."""

    tiles: Tiling
    scale: float
    drops: Drops
    methods: tuple[Perturbation, ...]
    source: Source | None

    def keeps_weights(self, q: Tensor, v: Tensor) -> bool:
        """Whether backward finds the weights, and need not make them again: if Q, K, V and output take more memory."""
        keys, width = self.tiles.shape[3], 3 * q.shape[-1] + v.shape[-1]
        return not self.tiles.repeats_keys and self.drops.after is None and 4 * keys <= width * q.element_size()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: bool) -> tuple[Tensor, tuple[Found, ...], Tensor | None]:
        """(B, H, Nq, e_v), in memory as (B, Nq, H, e_v); what was found out about each tile; and the weights.

        keep: whether these are wanted, (B · H, Nq, Nk).
        """
        batch, heads, queries, width = *q.shape[:3], v.shape[-1]
        out = q.new_empty(batch, queries, heads, width).transpose(1, 2)
        memory = WORKSPACE.buffers(self.tiles.elements, self.drops.buffers)
        result = [empty(self.tiles.rows * width)]
        kept = empty(batch * heads, queries, k.shape[2]) if keep else None
        found, q, k, v = [], flat(q), flat(k), flat(v)
        for tile in self.tiles.tiles:
            into = None if kept is None else tile.of_queries(kept)
            weighed = self._weigh(tile, tile.of_queries(q).float(), tile.of_keys(k).float(), memory, None, into)
            found.append(weighed.found)
            weights = weighed.weights if weighed.factors is None else weighed.weights.mul_(weighed.factors)
            (product,) = shaped(result, (*tile.shape[:2], width))
            torch.bmm(weights, tile.of_keys(v).float(), out=product)
            out[tile.rows] = by_head(product, tile)
        return out, tuple(found), kept

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        found: Sequence[Found],
        kept: Tensor | None,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v and bias, of which only those that are wanted are made. kept: the weights."""
        create = zeros if self.tiles.repeats_keys else empty
        dq = empty(*q.shape) if wanted[0] else None
        dk, dv = (create(*x.shape) if wants else None for x, wants in ((k, wanted[1]), (v, wanted[2])))
        added = self.drops.masks.added
        dbias = zeros(*added.shape) if wanted[3] and added is not None else None
        into_q, into_k, into_v = (None if grad is None else flat(grad) for grad in (dq, dk, dv))
        beta, dtype = int(self.tiles.repeats_keys), q.dtype
        memory = WORKSPACE.buffers(self.tiles.elements, self.drops.buffers)
        dout, q, k, v = flat(dout), flat(q), flat(k), flat(v)
        for tile, known in zip(self.tiles.tiles, found, strict=True):
            queries, keys, d = tile.of_queries(q).float(), tile.of_keys(k).float(), tile.of_queries(dout).float()
            if kept is None:
                weighed = self._weigh(tile, queries, keys, memory, known)
                weights, factors, logits = weighed.weights, weighed.factors, weighed.free
            else:
                weights, factors, logits = tile.of_queries(kept), None, shaped(memory[:1], tile.shape)[0]
            if into_v is not None:
                used = weights if factors is None else torch.mul(weights, factors, out=logits)
                tile.of_keys(into_v).baddbmm_(used.mT, d, beta=beta)
            if into_q is None and into_k is None and dbias is None:
                continue
            torch.bmm(d, tile.of_keys(v).float().mT, out=logits)
            if factors is not None:
                logits.mul_(factors)
            torch._softmax_backward_data(logits, weights, -1, torch.float32, grad_input=logits)
            if known.struck is not None:
                logits.view(-1).index_fill_(0, known.struck, 0.0)
            if into_q is not None:
                tile.of_queries(into_q).baddbmm_(logits, keys, beta=0, alpha=self.scale)
            if into_k is not None:
                tile.of_keys(into_k).baddbmm_(logits.mT, queries, beta=beta, alpha=self.scale)
            if dbias is not None:
                part = tile.of_logits(dbias)
                part += by_head(logits, tile).sum_to_size(part.shape)
        if dbias is not None and bias is not None:
            dbias = dbias.view(bias.shape).to(bias.dtype)
        return (*(None if grad is None else grad.to(dtype) for grad in (dq, dk, dv)), dbias)

    def _weigh(
        self,
        tile: Tile,
        queries: Tensor,
        keys: Tensor,
        memory: list[Tensor],
        known: Found | None,
        into: Tensor | None = None,
    ) -> Weighed:
        """Everything from a tile's queries and keys, float32, to its weights.

        known: what was found out in forward. into: where to write the weights; None: into what is free.
        """
        free = shaped(memory, tile.shape)
        mask, lost = self.drops.masks.build(tile, free, None if known is None else known.lost)
        logits = free.pop() if mask is None else mask
        logits.baddbmm_(queries, keys.mT, beta=int(mask is not None), alpha=self.scale)
        largest, after, struck = self.drops.largest, self.drops.after, None
        if largest is not None and known is None:
            struck = largest.strike(tile, logits, free)
        elif largest is not None and known is not None and known.struck is not None:
            logits.view(-1).index_fill_(0, known.struck, largest.fill)
        factors = None if after is None else after.factors(tile, logits, free)
        weights = torch.softmax(logits, -1, out=free[-1] if into is None else into)
        if lost.empty is not None:
            weights.masked_fill_(lost.empty, 0.0)
        return Weighed(weights, factors, logits, Found(lost, struck) if known is None else known)

    def with_masks(self, masks: Masks) -> Work:
        """The same with other masks."""
        return replace(self, drops=replace(self.drops, masks=masks))

    def plain_call(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Call:
        """The call of what acts inside of softmax, on these tensors."""
        masks = self.drops.masks
        mask = masks.added if bias is None else bias
        if mask is not None and bias is None:
            mask = mask.to(q.dtype)
        return Call(q, k, v, mask, masks.ahead is not None, self.scale, self.methods, self.source)
