"""The explicit form of dropout of Arora et al. (2021), which leaves out what channels do together: a baseline."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from torch import Tensor

from attemper.methods.base import Method, Paper, Place, check_rate
from attemper.methods.explicit import Strength, check_strengths, own_square, strength_at
from attemper.methods.kinds import AttentionRecord, LayerRecord, Penalty


def arora(x: Tensor, weight: Tensor, p: float) -> Tensor:
    """p/(1−p) · Σ_j ‖W[:, j]‖² · mean over tokens of x_j²: x (B, N, d), weight (out, d)."""
    return p / (1 - p) * own_square(x, weight) / (x.shape[0] * x.shape[1])


@dataclasses.dataclass(frozen=True)
class AroraDropout(Method, Penalty):
    """The same penalty for each projection of Q, K, V and for both layers of the MLP.

    q, k, v, ff: the strength of each component: a number, or a list of one per block. 0 costs nothing.
    p: the dropout rate.
    """

    name: ClassVar[str] = "arora"
    summary: ClassVar[str] = "the explicit form of dropout without cross terms"
    paper: ClassVar[Paper] = Paper("Dropout: Explicit Forms and Capacity Control", "ICML 2021")
    named_only: ClassVar[bool] = True

    q: Strength = 0.0
    k: Strength = 0.0
    v: Strength = 0.0
    ff: Strength = 0.0
    p: float = 0.2

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", check_rate("p", self.p))
        check_strengths(self, COMPONENTS)

    def at(self, place: Place) -> AroraDropout:
        for component in COMPONENTS:
            strength_at(self, component, place)
        return self

    def wants_attention(self, place: Place) -> bool:
        return any(strength_at(self, component, place) for component in ("q", "k", "v"))

    def wants_mlp(self, place: Place) -> bool:
        return strength_at(self, "ff", place) > 0

    def attention_terms(self, record: AttentionRecord, place: Place) -> dict[str, Tensor]:
        parts = {"q": (record.query, record.w_q), "k": (record.key, record.w_k), "v": (record.value, record.w_v)}
        return {
            component: strength * arora(x, weight, self.p)
            for component, (x, weight) in parts.items()
            if (strength := strength_at(self, component, place))
        }

    def mlp_terms(self, which: Literal["ff1", "ff2"], record: LayerRecord, place: Place) -> dict[str, Tensor]:
        strength = strength_at(self, "ff", place)
        return {which: strength * arora(record.x, record.weight, self.p)} if strength else {}


COMPONENTS = ("q", "k", "v", "ff")
