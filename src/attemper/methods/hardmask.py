"""Hard attention masking: drop some of the largest logits of every row. AttentionDrop, 2025."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.base import Paper, Place, check_choice, value_at
from attemper.methods.learning import LearnableRate, SoftKeep
from attemper.ops.perturbation import LargestDrop, drop_logits
from attemper.ops.stream import Stream


def largest(logits: Tensor, k: int, allowed: Tensor | None = None) -> Tensor:
    """Boolean, True at the k largest allowed logits of every row, and at those that equal the least of them.

    Rows with fewer allowed keys offer all of them.

    >>> largest(torch.tensor([[0.3, 0.1, 0.2]]), 2).tolist()
    [[True, False, True]]
    """
    scores = logits.detach() if allowed is None else logits.detach().masked_fill(~allowed, -torch.inf)
    found = scores >= scores.topk(k, -1).values[..., -1:]
    return found if allowed is None else found & allowed


Count = int | float
"""How many logits of a row: a number, or a fraction of the keys."""


def check_count(name: str, value: object) -> Count:
    """`value`, a number of keys or a fraction of them; raise otherwise."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not whole and not (isinstance(value, float) and 0 < value < 1):
        raise ParameterError(
            f"{name} must be an integer of at least 1, or a fraction of the keys in (0, 1); got {value!r}"
        )
    assert isinstance(value, int | float)
    return value


@dataclasses.dataclass(frozen=True)
class HardMask(LearnableRate):
    """Multiply each of the k largest logits of a row by 0 or 1.

    p, schedule, match: how often 0, in which block (see `Scheduled`); p=learn learns it (see `LearnableRate`).
    k: how many logits of a row are in question: a number, or a fraction of the keys, below 1; or a list of one of
        these per block. Attention of a model that has fewer keys has all of them in question.
    fill: "zero" sets a dropped logit to zero, so that its key keeps the weight exp(0), as the abstract says;
        "neg_inf" drops the key altogether.
    share: "none" draws anew for every (sample, head, query, key); "heads" draws once for all heads, each of which then
        applies the draw to its own k largest logits.
    """

    name: ClassVar[str] = "hardmask"
    summary: ClassVar[str] = "zero some of the largest logits of every row"
    paper: ClassVar[Paper] = Paper("AttentionDrop (hard attention masking)", "2025")
    stochastic: ClassVar[bool] = True

    k: Count | tuple[Count, ...] = 5
    fill: Literal["zero", "neg_inf"] = "zero"
    share: Literal["none", "heads"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("fill", self.fill, ("zero", "neg_inf"))
        check_choice("share", self.share, ("none", "heads"))
        if isinstance(self.k, list | tuple):
            object.__setattr__(self, "k", tuple(check_count(f"k[{i}]", count) for i, count in enumerate(self.k)))
        else:
            check_count("k", self.k)

    def at(self, place: Place) -> Self:
        return dataclasses.replace(super().at(place), k=value_at(self, "k", place))

    @property
    def per_block(self) -> tuple[str, ...]:
        lists = ("k",) if isinstance(self.k, tuple) else ()
        return lists if self.schedule == "constant" else ("schedule", *lists)

    def fitted(self, keys: int) -> Self:
        return dataclasses.replace(self, k=keys) if not isinstance(self.k, tuple) and self.k > keys else self

    @property
    def tells_heads(self) -> bool:
        return self.share == "heads"

    def count(self, keys: int) -> int:
        """How many logits of a row of `keys` are in question."""
        if isinstance(self.k, tuple):
            raise ParameterError(f"{self} has a k per block; at(place) gives that of one of them")
        if isinstance(self.k, float):
            return max(1, round(self.k * keys))
        if self.k > keys:
            raise ParameterError(
                f"k={self.k} is more than the number of keys, {keys}; give k up to that, or a fraction of the keys"
            )
        return self.k

    def largest_drop(self, keys: int) -> LargestDrop | None:
        return None if self.learns else LargestDrop(self.rate, self.count(keys), self.fill, self.share == "heads")

    def drawn_shape(self, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        batch, heads, queries, keys = shape
        return batch, 1 if self.share == "heads" else heads, queries, keys

    def drawn_from(self, stream: Stream) -> Stream:
        return stream.for_all_heads() if self.share == "heads" else stream

    def soften_logits(self, logits: Tensor, allowed: Tensor | None, keep: SoftKeep) -> Tensor:
        hit = largest(logits, self.count(logits.shape[-1]), allowed)
        if self.fill == "zero":
            return torch.where(hit, logits.masked_fill(~hit, 0.0) * keep.share, logits)  # −inf · 0 has no gradient
        return logits + keep.log.masked_fill(~hit | keep.lost(allowed, hit), 0.0)

    def drawn(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor:
        """Which logits would be kept if they were among the largest: boolean, broadcastable to (B, H, Nq, Nk)."""
        return self.drawn_from(stream).keep(self.drawn_shape(shape), self.rate)

    def perturb_logits(self, logits: Tensor, allowed: Tensor | None, stream: Stream) -> tuple[Tensor, Tensor | None]:
        batch, heads, queries, keys = logits.shape
        keep = self.drawn((batch, heads, queries, keys), stream)
        hit = largest(logits, self.count(keys), allowed) & ~keep
        if self.fill == "zero":
            return logits.masked_fill(hit, 0.0), allowed
        return drop_logits(logits, ~hit, allowed)
