"""The explicit form of dropout of Arora et al. (2021), which leaves out what channels do together: a baseline."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from torch import Tensor

from attemper.methods.base import Method, Paper, Place, check_rate
from attemper.methods.explicit import own_square
from attemper.methods.kinds import AttentionRecord, LayerRecord, Part, Penalty
from attemper.methods.reductions import Reduction, check_reduction, reduced, sums_over_samples
from attemper.methods.strengths import Strength, check_strengths, strength_at


def arora(x: Tensor, weight: Tensor, p: float, reduction: Reduction = "mean") -> Tensor:
    """p/(1−p) · Σ_j ‖W[:, j]‖² · mean over tokens of x_j²: x (B, N, d), weight (out, d).

    reduction: as for explicit dropout, so that the other three are the same multiples of the mean.
    """
    return reduced(2 * (p / (1 - p) * own_square(x, weight)), x.shape[0], x.shape[1], reduction)


@dataclasses.dataclass(frozen=True)
class AroraDropout(Method, Penalty):
    """The same penalty for each projection of Q, K, V and for both layers of the MLP.

    q, k, v, ff1, ff2: the strength of each component: a number, or a list of one per block. 0 costs nothing.
    ff: sets ff1 and ff2.
    p: the dropout rate.
    reduction: by what a term is divided, with the choices of explicit dropout: "mean", "sum", "literal", "authors".
    """

    name: ClassVar[str] = "arora"
    summary: ClassVar[str] = "the explicit form of dropout without cross terms"
    paper: ClassVar[Paper] = Paper("Dropout: Explicit Forms and Capacity Control", "ICML 2021")
    named_only: ClassVar[bool] = True

    q: Strength = 0.0
    k: Strength = 0.0
    v: Strength = 0.0
    ff: Strength = 0.0
    ff1: Strength = 0.0
    ff2: Strength = 0.0
    p: float = 0.2
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", check_rate("p", self.p))
        check_reduction(self.reduction)
        check_strengths(self, COMPONENTS)

    def at(self, place: Place) -> AroraDropout:
        for component in COMPONENTS:
            strength_at(self, component, place)
        return self

    @property
    def sums(self) -> bool:
        return sums_over_samples(self.reduction)

    @property
    def normalisation(self) -> str:
        return self.reduction

    def wants_attention(self, place: Place) -> bool:
        return any(strength_at(self, component, place) for component in ("q", "k", "v"))

    def wants_mlp(self, place: Place) -> bool:
        return any(strength_at(self, component, place) for component in ("ff1", "ff2"))

    def takes(self, part: Part, place: Place) -> bool:
        return strength_at(self, part, place) > 0

    def attention_terms(self, record: AttentionRecord, place: Place) -> dict[str, Tensor]:
        parts = {"q": (record.query, record.w_q), "k": (record.key, record.w_k), "v": (record.value, record.w_v)}
        return {
            component: strength * arora(x, weight, self.p, self.reduction)
            for component, (x, weight) in parts.items()
            if (strength := strength_at(self, component, place))
        }

    def mlp_terms(self, which: Literal["ff1", "ff2"], record: LayerRecord, place: Place) -> dict[str, Tensor]:
        strength = strength_at(self, which, place)
        return {which: strength * arora(record.x, record.weight, self.p, self.reduction)} if strength else {}


COMPONENTS = ("q", "k", "v", "ff", "ff1", "ff2")
