"""Consistency between stochastic passes: AttentionDrop (2025) and R-Drop (NeurIPS 2021)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.base import Method, Paper, check_choice, check_number
from attemper.methods.kinds import LossTerm


def divergence(first: Tensor, second: Tensor, counted: Tensor | None = None) -> Tensor:
    """KL(softmax first ‖ softmax second) over the last axis, mean over everything else that counts: a scalar.

    counted: boolean, of the logits' shape without its last axis; None: everything counts.
    """
    return _kl(_log_softmax(first), _log_softmax(second), counted)


def divergence_from_mean(logits: Sequence[Tensor], counted: Tensor | None = None, symmetric: bool = False) -> Tensor:
    """The mean over the passes of KL(p ‖ p̄), where p̄ is the mean of the passes' softmax p: a scalar.

    symmetric: the mean of KL(p ‖ p̄) and KL(p̄ ‖ p) instead. counted: as in `divergence`.
    """
    each = [_log_softmax(one) for one in logits]
    mean = torch.stack(each).logsumexp(0) - math.log(len(each))
    total = torch.stack([_kl(p, mean, counted) for p in each]).mean()
    return (total + torch.stack([_kl(mean, p, counted) for p in each]).mean()) / 2 if symmetric else total


def _log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _kl(p: Tensor, q: Tensor, counted: Tensor | None) -> Tensor:
    """The same from logarithms of probabilities."""
    each = (p.exp() * (p - q)).sum(-1)
    if counted is None:
        return each.mean()
    return each.masked_fill(~counted, 0.0).sum() / counted.sum().clamp_min(1)


MOST_PASSES = 1000


@dataclasses.dataclass(frozen=True)
class Consistency(Method, LossTerm):
    """Run every batch several times and add strength · the divergence of the predictions to the mean of the losses.

    strength: λ.
    direction: "forward", KL(first ‖ second), our reading of the paper; "symmetric", the mean of both directions.
    passes: how often a batch runs, at least 2. Of more than two, the divergence is that of each prediction from the
        mean of all of them, KL(p ‖ p̄), averaged.
    """

    name: ClassVar[str] = "consistency"
    summary: ClassVar[str] = "run twice, or more often, and penalise the divergence of the predictions"
    paper: ClassVar[Paper] = Paper("AttentionDrop (consistency)", "2025")

    strength: float = 1.0
    direction: Literal["forward", "symmetric"] = "forward"
    passes: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", check_number("strength", self.strength))
        check_choice("direction", self.direction, ("forward", "symmetric"))
        whole = isinstance(self.passes, int) and not isinstance(self.passes, bool)
        if not whole or not 2 <= self.passes <= MOST_PASSES:
            raise ParameterError(f"passes must be an integer from 2 to {MOST_PASSES}, got {self.passes!r}")

    def compare(self, first: Tensor, second: Tensor, counted: Tensor | None = None) -> Tensor:
        forward = divergence(first, second, counted)
        return forward if self.direction == "forward" else (forward + divergence(second, first, counted)) / 2

    def compare_all(self, logits: Sequence[Tensor], counted: Tensor | None = None) -> Tensor:
        if len(logits) == 2:
            return self.compare(logits[0], logits[1], counted)
        return divergence_from_mean(logits, counted, symmetric=self.direction == "symmetric")


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
