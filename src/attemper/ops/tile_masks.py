"""What a tile's rows lose: keys that masks hide and methods drop, the largest logits, and weights behind softmax.

A mask is made in three passes over a tile in int32, in place: the product of the words, its comparison with the
threshold, which gives 0 or 1, and the product with the bits of the number that stands for "dropped". All is computed in
float32.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.ops.call import OUT_OF_REACH
from attemper.ops.perturbation import LargestDrop
from attemper.ops.stream import Stream, signed, threshold
from attemper.ops.tiles import Tile, flat

FAR = 1e38
"""Takes a logit that was found to be the largest out of the search for the next."""
LOWEST = -1e37
"""Below every logit, and above those that were taken out."""
MOST_ROUNDS = 24
"""From here on sorting rows is faster than looking for their largest logit again and again."""


def bits(number: float) -> int:
    """The bits of a float32 as a signed number."""
    return signed(int.from_bytes(struct.pack("<f", number), "little"))


NEG_INF = bits(-float("inf"))


@dataclass(frozen=True)
class Words:
    """The stream of a method in a call: rows (B · H, Nq, 1) or (B, 1, Nq, 1), columns (Nk,)."""

    rows: Tensor
    columns: Tensor
    below: int
    """A product that is less than this is dropped."""

    @classmethod
    def of(cls, stream: Stream, shape: tuple[int, int, int, int], p: float, shared: bool = False) -> Words:
        """shared: whether all heads draw alike."""
        batch, heads, queries, keys = shape
        if shared:
            heads, stream = 1, stream.for_all_heads()
        rows = stream.row_words(batch, heads, queries)[..., None]
        return cls(rows if shared else flat(rows), stream.column_words(keys), threshold(p))

    def dropped(self, tile: Tile, into: Tensor) -> Tensor:
        """1 where the stream drops and 0 elsewhere, int32, in the memory of `into`."""
        words = into.view(torch.int32)
        torch.mul(tile.of_queries(self.rows), self.columns[tile.keys], out=words)
        return words.lt_(self.below)


@dataclass(frozen=True)
class KeyDrop:
    """A method that drops keys before softmax: by words of the stream, or by what it made of them.

    kept: (B, H or 1, Nq or 1, Nk), boolean; or, where all queries share it, the float32 that is added.
    """

    words: Words | None
    kept: Tensor | None = None

    def draw(self, tile: Tile, into: Tensor) -> Tensor:
        """0 where a key is kept and −inf where it is dropped."""
        if self.words is not None:
            return self.words.dropped(tile, into).mul_(NEG_INF).view(torch.float32)
        assert self.kept is not None
        kept = tile.of_logits(self.kept)
        if kept.dtype != torch.bool:
            by_head(into, tile).copy_(kept)
            return into
        words = into.view(torch.int32)
        by_head(words, tile).copy_(kept.view(torch.uint8))
        return words.sub_(1).bitwise_and_(NEG_INF).view(torch.float32)


def by_head(x: Tensor, tile: Tile) -> Tensor:
    """A view of a tile with its samples and heads apart."""
    apart: Tensor = x.unflatten(0, tile.sizes[:2])
    return apart


@dataclass(frozen=True)
class Lost:
    """Rows of a tile, boolean (G, queries, 1), None where there are none.

    spared: for each method in turn, those that would lose all of their keys to it, and are left as they are. empty:
    those that have no key at all.
    """

    spared: tuple[Tensor | None, ...]
    empty: Tensor | None


@dataclass(frozen=True)
class Masks:
    """What a call adds to its logits.

    added: the call's own mask as numbers, of four axes, each that of the logits or 1; None: it has none.
    reach: what its entries must be above to be in reach of their row; None: all of them are that are not −inf.
    ahead: with causal attention, how many keys the first query sees beyond key 0; None: it is not causal.
    drops: in the order in which they act.
    """

    added: Tensor | None
    reach: Tensor | None
    ahead: int | None
    drops: tuple[KeyDrop, ...]

    @property
    def large(self) -> tuple[Tensor | None, ...]:
        """The tensors of it that may be as large as the logits."""
        return self.added, *(drop.kept for drop in self.drops)

    def with_large(self, large: Sequence[Tensor | None]) -> Masks:
        """The same with other tensors in their place, or none."""
        added, *kept = large
        drops = tuple(KeyDrop(drop.words, each) for drop, each in zip(self.drops, kept, strict=True))
        return dataclasses.replace(self, added=added, drops=drops)

    @property
    def hides(self) -> bool:
        """Whether there may be rows without any key."""
        return self.added is not None or self.ahead is not None

    def build(self, tile: Tile, free: list[Tensor], known: Lost | None) -> tuple[Tensor | None, Lost]:
        """The mask of a tile, None where nothing is added, and what rows lost. Takes what it fills from `free`.

        Rows without any key have a mask of 0, so that softmax gives numbers, which are then to be set to zero.
        known: the rows, from the last time.
        """
        mask = self._own(tile, free.pop(0)) if self.hides else None
        spared = []
        for number, drop in enumerate(self.drops):
            joined = drop.draw(tile, free.pop(0))
            if mask is not None:
                joined.add_(mask)
                free.append(mask)
            lost = self._lost(tile, joined) if known is None else known.spared[number]
            if lost is not None:
                joined = joined.masked_fill_(lost, 0.0) if mask is None else torch.where(lost, mask, joined, out=joined)
            spared.append(lost)
            mask = joined
        if mask is None or not self.hides:
            return mask, Lost(tuple(spared), None)
        empty = some(mask.amax(-1, keepdim=True) == -torch.inf) if known is None else known.empty
        return mask if empty is None else mask.masked_fill_(empty, 0.0), Lost(tuple(spared), empty)

    def _own(self, tile: Tile, mask: Tensor) -> Tensor:
        if self.added is not None:
            by_head(mask, tile).copy_(tile.of_logits(self.added))
            return mask
        assert self.ahead is not None
        return mask.copy_(mask.new_full(tile.shape[1:], -torch.inf).triu_(tile.queries.start + self.ahead + 1))

    def _lost(self, tile: Tile, masked: Tensor) -> Tensor | None:
        """The rows of a mask of which no key is within reach."""
        top = masked.amax(-1, keepdim=True)
        if self.reach is None:
            return some(top == -torch.inf)
        return some((by_head(top, tile) <= tile.of_logits(self.reach)).flatten(0, 1))


def some(rows: Tensor) -> Tensor | None:
    """The rows, or None where there are none."""
    return rows if rows.any() else None


def reach_of(added: Tensor) -> Tensor | None:
    """What entries of a mask must be above to be in reach of their row's largest; None: all finite ones are."""
    reach = added.amax(-1, keepdim=True) - OUT_OF_REACH
    return reach if ((added <= reach) & (added > -torch.inf)).any() else None


# --------------------------------------------------------------------------------------------------- the largest logits
@dataclass(frozen=True)
class Largest:
    """A method that drops some of the largest logits of every row.

    unreachable: −inf where the call's mask puts keys out of reach, 0 elsewhere, of the mask's axes; None: nowhere.
    """

    drop: LargestDrop
    words: Words
    unreachable: Tensor | None

    @property
    def fill(self) -> float:
        """What becomes of a logit that is dropped."""
        return 0.0 if self.drop.fill == "zero" else -torch.inf

    def strike(self, tile: Tile, logits: Tensor, buffers: list[Tensor]) -> Tensor:
        """Drop them in place, and give their places in the flat tile."""
        scores = logits
        if self.unreachable is not None:
            scores, *buffers = buffers
            torch.add(by_head(logits, tile), tile.of_logits(self.unreachable), out=by_head(scores, tile))
        found = self._find(scores, buffers[0], buffers[1])
        places = self.words.dropped(tile, buffers[0]).mul_(found).view(-1).nonzero().squeeze(-1)
        flat = logits.view(-1)
        before = flat[places]
        flat.index_fill_(0, places, self.fill)
        if self.drop.fill == "zero":
            return places
        if scores is not logits:
            scores.view(-1).index_fill_(0, places, -torch.inf)
        lost = scores.amax(-1) == -torch.inf
        if not lost.any():
            return places
        back = lost.view(-1)[places.div(logits.shape[-1], rounding_mode="floor")]
        flat[places[back]] = before[back]
        return places[~back]

    def _find(self, scores: Tensor, rest: Tensor, found: Tensor) -> Tensor:
        """Not 0 where scores are among the largest of their row, and not −inf: int32 in the memory of `found`."""
        count = min(self.drop.count, scores.shape[-1])
        if count > MOST_ROUNDS:
            cut = scores.topk(count, -1).values[..., -1:].clamp_(min=LOWEST)
            return torch.ge(scores, cut, out=found).view(torch.int32)
        rest.copy_(scores)
        for _ in range(count - 1):
            torch.ge(rest, rest.amax(-1, keepdim=True), out=found)
            rest.sub_(found, alpha=FAR)
        cut = rest.amax(-1, keepdim=True).clamp_(min=LOWEST)
        torch.ge(scores, cut, out=found)
        more = found.sum(-1) > count
        if more.any():  # equal logits were taken for one
            cut[more] = scores[more].topk(count, -1).values[..., -1:].clamp_(min=LOWEST)
            torch.ge(scores, cut, out=found)
        return found.view(torch.int32)


# ------------------------------------------------------------------------------------------------------ behind softmax
@dataclass(frozen=True)
class WeightDrop:
    """Dropout of weights that divides what is left by 1 − p, and leaves rows alone that would lose everything.

    unreachable: see `Largest`.
    """

    p: float
    words: Words
    unreachable: Tensor | None

    def factors(self, tile: Tile, logits: Tensor, buffers: list[Tensor]) -> Tensor:
        """0 or 1 / (1 − p) for every weight, 1 in rows that are left alone. logits: −inf where there is no weight."""
        dropped = self.words.dropped(tile, buffers[0])
        left = torch.mul(dropped, NEG_INF, out=buffers[1].view(torch.int32)).view(torch.float32).add_(logits)
        if self.unreachable is not None:
            by_head(left, tile).add_(tile.of_logits(self.unreachable))
        lost = left.amax(-1, keepdim=True) == -torch.inf
        factors = dropped.sub_(1).bitwise_and_(bits(1 / (1 - self.p))).view(torch.float32)
        return factors.masked_fill_(lost, 1.0) if lost.any() else factors
