"""DropAttention: drop attention weights after softmax. Zehui et al., 2019; inverted: ordinary attention dropout."""

import dataclasses
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.base import Method, Paper, check_choice, check_flag
from attemper.methods.dropkey import DropKey
from attemper.methods.learning import LearnableRate, SoftKeep
from attemper.ops.perturbation import Stage, WordDrop, drop_logits, inverted_weights
from attemper.ops.stream import Stream


def dropattention(
    weights: Tensor,
    keep: Tensor,
    p: float,
    *,
    rescale: str = "normalize",
    detach: bool = False,
    allowed: Tensor | None = None,
) -> Tensor:
    """Attention weights with some set to zero, (B, H, Nq, Nk).

    keep: boolean, broadcastable to the weights, True = kept.
    rescale: "normalize" makes rows sum to 1 again; "inverted" divides by 1 − p.
    detach: no gradient through the row sum of "normalize", as the original is said to write it.
    allowed: the keys that may have weight; a row that would lose all of them is left as it is.

    >>> weights = torch.tensor([[[[0.5, 0.3, 0.2]]]])
    >>> dropattention(weights, torch.tensor([True, True, False]), 0.5).tolist()
    [[[[0.625, 0.375, 0.0]]]]
    """
    if rescale == "inverted":
        return inverted_weights(weights, keep, p, allowed)
    intact = ~(keep if allowed is None else keep & allowed).any(-1, keepdim=True)
    kept = weights * (keep | intact)
    total = kept.sum(-1, keepdim=True)
    # Where all that is left underflowed to zero there is nothing to renormalise: such a row is left as it is, too.
    intact = intact | (total == 0)
    total = torch.where(intact, 1.0, total)
    return torch.where(intact, weights, kept / (total.detach() if detach else total))


def window_keep(starts: Tensor, w: int) -> Tensor:
    """Boolean, True = kept, from `starts` (…, keys), True where a dropped run of w keys begins."""
    runs = F.pad(starts.to(torch.float32).flatten(0, -2)[:, None], (w - 1, 0))
    return (F.max_pool1d(runs, w, stride=1)[:, 0] == 0).view(starts.shape)


@dataclasses.dataclass(frozen=True)
class DropAttention(LearnableRate):
    """Drop attention weights after softmax.

    p, schedule, match: how much, in which block (see `Scheduled`); p=learn learns it (see `LearnableRate`).
    unit: "element" drops single weights; "column" drops a key for all queries of a head.
    w: with unit="column", runs of w keys are dropped, each starting with rate p/w.
    rescale: "inverted" divides by 1 − p, as every framework's dropout does; "normalize" makes rows sum to 1 again,
    which
        is DropKey after softmax.
    detach: with "normalize", no gradient through the row sum, as the original is said to write it.
    """

    name: ClassVar[str] = "dropattention"
    summary: ClassVar[str] = "drop attention weights after softmax, by element or by key"
    paper: ClassVar[Paper] = Paper("DropAttention", "2019")
    stochastic: ClassVar[bool] = True
    order: ClassVar[int] = 1
    stages: ClassVar[tuple[Stage, ...]] = ("logits", "weights")

    unit: Literal["element", "column"] = "element"
    w: int = 1
    rescale: Literal["normalize", "inverted"] = "inverted"
    detach: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("unit", self.unit, ("element", "column"))
        check_choice("rescale", self.rescale, ("normalize", "inverted"))
        if isinstance(self.w, bool) or not isinstance(self.w, int) or self.w < 1:
            raise ParameterError(f"w must be an integer of at least 1, got {self.w!r}")
        if self.w > 1 and self.unit != "column":
            raise ParameterError(f"w={self.w} drops runs of keys and needs unit=column; unit is {self.unit}")
        check_flag("detach", self.detach)
        if self.detach and self.rescale != "normalize":
            raise ParameterError("detach=true needs rescale=normalize: there is no row sum to detach otherwise")

    @property
    def plainest(self) -> Method:
        if not self._in_logits or self.unit != "element" or self.learns:
            return self
        same = ("p", "schedule", "match", "until", "start", "ramp")
        return DropKey(**{name: getattr(self, name) for name in same})

    def drawn(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor:
        return self.keep(shape, stream)

    def keep(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor:
        """Which weights are kept in a call of this (B, H, Nq, Nk): boolean, broadcastable to it."""
        batch, heads, _, keys = shape
        if self.unit == "element":
            return stream.keep(shape, self.rate)
        columns, stream = (batch, heads, 1, keys), stream.for_all_queries()
        if self.w == 1:
            return stream.keep(columns, self.rate)
        if self.w > keys:
            raise ParameterError(f"w={self.w} is larger than the number of keys, {keys}; give w up to that")
        return window_keep(~stream.keep(columns, self.rate / self.w), self.w)

    def fitted(self, keys: int) -> Self:
        return dataclasses.replace(self, w=keys) if self.w > keys else self

    @property
    def _in_logits(self) -> bool:
        # Zeroing weights and dividing by what is left is the same as dropping logits before softmax, forward and
        # backward, and there it cannot underflow.
        return self.rescale == "normalize" and not self.detach

    @property
    def cannot_learn(self) -> str | None:
        return None if self.w == 1 else f"w=1, single keys; w is {self.w}"

    def drawn_shape(self, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        batch, heads, queries, keys = shape
        return batch, heads, queries if self.unit == "element" else 1, keys

    def drawn_from(self, stream: Stream) -> Stream:
        return stream if self.unit == "element" else stream.for_all_queries()

    def soften_logits(self, logits: Tensor, allowed: Tensor | None, keep: SoftKeep) -> Tensor:
        return super().soften_logits(logits, allowed, keep) if self._in_logits else logits

    def soften_weights(self, weights: Tensor, allowed: Tensor | None, keep: SoftKeep) -> Tensor:
        if self._in_logits:
            return weights
        kept = weights * keep.share
        total = kept.sum(-1, keepdim=True) if self.rescale == "normalize" else 1 - keep.rate
        intact = keep.lost(allowed) | (total == 0)
        total = torch.where(intact, 1.0, total.detach() if self.detach else total)
        return torch.where(intact, weights, kept / total)

    @property
    def tells_heads(self) -> bool:
        return False

    @property
    def uneven_rows(self) -> str | None:
        if self.rescale == "normalize":
            return None
        return "dropattention(rescale=inverted) leaves them uneven, which rescale=normalize does not"

    @property
    def independent_drop(self) -> float | None:
        drops_each = self._in_logits and self.unit == "element" and not self.learns
        return self.rate if drops_each else None

    @property
    def drops_keys(self) -> bool:
        return self._in_logits and not self.learns

    @property
    def inverted_drop(self) -> float | None:
        drops_each = self.rescale == "inverted" and self.unit == "element" and not self.learns
        return self.rate if drops_each else None

    @property
    def word_drop(self) -> WordDrop | None:
        if self.learns or self.w > 1:
            return None
        what: Literal["keys", "weights", "detached"] = "weights"
        if self.rescale == "normalize":
            what = "detached" if self.detach else "keys"
        return WordDrop(self.rate, what, self.unit == "column")

    def kept_keys(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor | None:
        return self.keep(shape, stream) if self.drops_keys else None

    def perturb_logits(self, logits: Tensor, allowed: Tensor | None, stream: Stream) -> tuple[Tensor, Tensor | None]:
        if not self._in_logits:
            return logits, allowed
        batch, heads, queries, keys = logits.shape
        return drop_logits(logits, self.keep((batch, heads, queries, keys), stream), allowed)

    def perturb_weights(self, weights: Tensor, allowed: Tensor | None, stream: Stream) -> Tensor:
        if self._in_logits:
            return weights
        batch, heads, queries, keys = weights.shape
        keep = self.keep((batch, heads, queries, keys), stream)
        return dropattention(weights, keep, self.rate, rescale=self.rescale, detach=self.detach, allowed=allowed)
