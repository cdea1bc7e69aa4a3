"""Hard attention masking: drop some of the largest logits of every row. AttentionDrop, 2025."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.base import Paper, check_choice
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


@dataclasses.dataclass(frozen=True)
class HardMask(LearnableRate):
    """Multiply each of the k largest logits of a row by 0 or 1.

    p, schedule, match: how often 0, in which block (see `Scheduled`); p=learn learns it (see `LearnableRate`).
    k: how many logits of a row are in question: a number, or a fraction of the keys, below 1. Attention of a model that
        has fewer keys has all of them in question.
    fill: "zero" sets a dropped logit to zero, so that its key keeps the weight exp(0), as the abstract says;
        "neg_inf" drops the key altogether.
    """

    name: ClassVar[str] = "hardmask"
    summary: ClassVar[str] = "zero some of the largest logits of every row"
    paper: ClassVar[Paper] = Paper("AttentionDrop (hard attention masking)", "2025")
    stochastic: ClassVar[bool] = True

    k: int | float = 5
    fill: Literal["zero", "neg_inf"] = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("fill", self.fill, ("zero", "neg_inf"))
        whole = isinstance(self.k, int) and not isinstance(self.k, bool) and self.k >= 1
        if not whole and not (isinstance(self.k, float) and 0 < self.k < 1):
            raise ParameterError(
                f"k must be an integer of at least 1, or a fraction of the keys in (0, 1); got {self.k!r}"
            )

    def fitted(self, keys: int) -> Self:
        return dataclasses.replace(self, k=keys) if self.k > keys else self

    @property
    def tells_heads(self) -> bool:
        return False

    def count(self, keys: int) -> int:
        """How many logits of a row of `keys` are in question."""
        if isinstance(self.k, float):
            return max(1, round(self.k * keys))
        if self.k > keys:
            raise ParameterError(
                f"k={self.k} is more than the number of keys, {keys}; give k up to that, or a fraction of the keys"
            )
        return self.k

    def largest_drop(self, keys: int) -> LargestDrop | None:
        return None if self.learns else LargestDrop(self.rate, self.count(keys), self.fill)

    def soften_logits(self, logits: Tensor, allowed: Tensor | None, keep: SoftKeep) -> Tensor:
        hit = largest(logits, self.count(logits.shape[-1]), allowed)
        if self.fill == "zero":
            return torch.where(hit, logits * keep.share, logits)
        return logits + keep.log.masked_fill(~hit | keep.lost(allowed, hit), 0.0)

    def perturb_logits(self, logits: Tensor, allowed: Tensor | None, stream: Stream) -> tuple[Tensor, Tensor | None]:
        batch, heads, queries, keys = logits.shape
        keep = stream.keep((batch, heads, queries, keys), self.rate)
        hit = largest(logits, self.count(keys), allowed) & ~keep
        if self.fill == "zero":
            return logits.masked_fill(hit, 0.0), allowed
        return drop_logits(logits, ~hit, allowed)
