"""Consistency between two stochastic passes: AttentionDrop (2025) and R-Drop (NeurIPS 2021)."""

import dataclasses
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.methods.base import Method, Paper, check_choice, check_number
from attemper.methods.kinds import LossTerm


def divergence(first: Tensor, second: Tensor, counted: Tensor | None = None) -> Tensor:
    """KL(softmax first ‖ softmax second) over the last axis, mean over everything else that counts: a scalar.

    counted: boolean, of the logits' shape without its last axis; None: everything counts.
    """
    dtype = torch.promote_types(first.dtype, torch.float32)
    p, q = F.log_softmax(first, -1, dtype=dtype), F.log_softmax(second, -1, dtype=dtype)
    each = (p.exp() * (p - q)).sum(-1)
    if counted is None:
        return each.mean()
    return each.masked_fill(~counted, 0.0).sum() / counted.sum().clamp_min(1)


@dataclasses.dataclass(frozen=True)
class Consistency(Method, LossTerm):
    """Run every batch twice and add strength · KL between the two predictions to the mean of the two losses.

    strength: λ.
    direction: "forward", KL(first ‖ second), as the paper; "symmetric", the mean of both directions.
    """

    name: ClassVar[str] = "consistency"
    summary: ClassVar[str] = "run twice and penalise the divergence of the two predictions"
    paper: ClassVar[Paper] = Paper("AttentionDrop (consistency)", "2025")

    strength: float = 1.0
    direction: Literal["forward", "symmetric"] = "forward"

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", check_number("strength", self.strength))
        check_choice("direction", self.direction, ("forward", "symmetric"))

    def compare(self, first: Tensor, second: Tensor, counted: Tensor | None = None) -> Tensor:
        forward = divergence(first, second, counted)
        return forward if self.direction == "forward" else (forward + divergence(second, first, counted)) / 2


@dataclasses.dataclass(frozen=True)
class RDrop(Method, LossTerm):
    """The same with the symmetric divergence, the mean of both directions.

    strength: the factor of the divergence.
    """

    name: ClassVar[str] = "rdrop"
    summary: ClassVar[str] = "run twice and penalise the symmetric divergence"
    paper: ClassVar[Paper] = Paper("R-Drop", "NeurIPS 2021")

    strength: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", check_number("strength", self.strength))

    def compare(self, first: Tensor, second: Tensor, counted: Tensor | None = None) -> Tensor:
        return (divergence(first, second, counted) + divergence(second, first, counted)) / 2
