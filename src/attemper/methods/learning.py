"""Rates that are learnt with the weights: dropping is softened, so that a gradient reaches the rate.

The concrete relaxation of Gal, Hron and Kendall ("Concrete Dropout", NeurIPS 2017). With u uniform in (0, 1), an entry
is dropped at rate p where u < p. The soft form drops the share

    z = sigmoid((logit p − logit u) / t)

of it, t the temperature; for t → 0 it is the mask that a constant rate p draws from the same stream. An entropy term in
the loss keeps p away from zero, where dropping nothing would always fit the training data best.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.base import Place, check_choice, check_number
from attemper.methods.kinds import Learnable
from attemper.methods.rates import Scheduled
from attemper.ops.perturbation import Perturbation, Stage
from attemper.ops.stream import Offsets, Stream

LEAST, MOST = 1e-6, 0.9
"""The bounds of a learnt rate."""
TEMPERATURE = 0.1
"""Of the relaxation, as in Concrete Dropout."""
SPEED = 10.0
"""How much faster the logit of a rate moves than its parameter: Adam moves every parameter by about its learning rate
in a step, which suits weights and would leave a rate nearly where it was. Our choice."""
ENTROPY = 0.01
"""Strength of the entropy term: our choice."""
CLOSEST = 2.0**-24
"""How close to 0 and 1 the uniform numbers come, so that their logits are finite in float32."""


def bounded(value: Tensor, most: float, least: float = LEAST) -> Tensor:
    """The rate of a parameter that is free to be any number: in (least, most)."""
    share = torch.sigmoid(SPEED * value.to(torch.promote_types(value.dtype, torch.float32)))
    return (least + (most - least) * share).clamp(max=most)  # which rounding may pass


def unbounded(rate: float, most: float, least: float = LEAST) -> float:
    """The parameter that gives a rate: the inverse of `bounded`.

    >>> round(float(bounded(torch.tensor(unbounded(0.3, 0.9)), 0.9)), 6)
    0.3
    """
    share = torch.tensor((rate - least) / (most - least), dtype=torch.float64)
    return float(torch.logit(share)) / SPEED


def soft_drop(stream: Stream, shape: tuple[int, int, int, int], rate: Tensor, like: Tensor) -> Tensor:
    """(B, H, Nq, Nk): the logit of what is dropped of every entry, above 0 where more than half of it is.

    rate: (), or (H,) for a rate of every head. like: gives the type of the numbers.
    """
    u = (stream.products(*shape).to(like.dtype) + (2.0**31 + 0.5)) / 2.0**32
    u = u.clamp(CLOSEST, 1 - CLOSEST)
    rate = rate.to(like.dtype)
    rate = rate.view(-1, 1, 1) if rate.dim() else rate
    return (torch.logit(rate) - torch.logit(u)) / TEMPERATURE


@dataclasses.dataclass(frozen=True)
class SoftKeep:
    """What a learnt rate leaves of every entry of the logits or weights.

    log: log of the share that is kept, broadcastable to (B, H, Nq, Nk).
    dropped: boolean, where less than half of it is kept.
    rate: broadcastable to it.
    """

    log: Tensor
    dropped: Tensor
    rate: Tensor

    @property
    def share(self) -> Tensor:
        return self.log.exp()

    def lost(self, allowed: Tensor | None, among: Tensor | None = None) -> Tensor:
        """Boolean (…, Nq, 1): rows that would lose all of their allowed keys, and are left as they are.

        among: boolean, the keys that are in question; None: all.
        """
        dropped = self.dropped if among is None else self.dropped & among
        return (dropped if allowed is None else dropped | ~allowed).all(-1, keepdim=True)


@dataclasses.dataclass(frozen=True, eq=False)
class SoftDrop(Perturbation):
    """A method with a learnt rate, in one attention call."""

    method: LearnableRate
    rate: Tensor = dataclasses.field(repr=False)  # its digits are on a device, for which a message would have to wait
    """() or (H,)."""

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def stages(self) -> tuple[Stage, ...]:  # type: ignore[override]
        return self.method.stages

    @property
    def order(self) -> int:  # type: ignore[override]
        return self.method.order

    @property
    def tells_heads(self) -> bool:
        return self.rate.dim() > 0 or self.method.tells_heads

    @property
    def uneven_rows(self) -> str | None:
        return self.method.uneven_rows

    def fitted(self, keys: int) -> Self:
        method = self.method.fitted(keys)
        return self if method is self.method else dataclasses.replace(self, method=method)

    def drawn(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor:
        """The share of every entry that is kept: float32, broadcastable to (B, H, Nq, Nk)."""
        return self.keep(torch.empty(shape, dtype=torch.float32, device=stream.seed.device), stream).share

    def keep(self, like: Tensor, stream: Stream) -> SoftKeep:
        """What is kept of logits or weights (B, H, Nq, Nk)."""
        batch, heads, queries, keys = like.shape
        rate = self._rate_of(heads, stream.at)
        drawn = self.method.drawn_shape((batch, heads, queries, keys))
        drop = soft_drop(self.method.drawn_from(stream), drawn, rate, like)
        rate = rate.view(-1, 1, 1) if rate.dim() else rate
        return SoftKeep(F.logsigmoid(-drop), drop.detach() > 0, rate.to(like.dtype))

    def _rate_of(self, heads: int, at: Offsets) -> Tensor:
        """The rate, or those of the heads of a call, which may be a part of all heads."""
        if self.rate.dim() == 0:
            return self.rate
        rates = self.rate[at.head : at.head + heads] if self.rate.shape[0] == at.heads else self.rate
        if rates.shape[0] != heads:
            raise ParameterError(
                f"each=head gave {self.method.name} {self.rate.shape[0]} rates, and this attention has {heads} heads"
            )
        return rates

    def perturb_logits(self, logits: Tensor, allowed: Tensor | None, stream: Stream) -> tuple[Tensor, Tensor | None]:
        return self.method.soften_logits(logits, allowed, self.keep(logits, stream)), allowed

    def perturb_weights(self, weights: Tensor, allowed: Tensor | None, stream: Stream) -> Tensor:
        if "weights" not in self.stages:
            return weights
        return self.method.soften_weights(weights, allowed, self.keep(weights, stream))


@dataclasses.dataclass(frozen=True)
class LearnableRate(Scheduled, Perturbation, Learnable):
    """A drop rate that may be learnt: p=learn.

    each: what has a learnt rate of its own: every attention ("block"), or every head of it ("head").
    entropy: the strength of the term −entropy · H(p) that keeps a learnt rate from zero; it is a part of the loss.

    A learnt rate begins at 0.1, or at what the schedule gives: its shape with 0.1 for p, or its list of rates.
    """

    learnable: ClassVar[bool] = True
    p: float | Literal["learn"] = 0.1  # type: ignore[assignment]
    each: Literal["block", "head"] = dataclasses.field(default="block", kw_only=True)
    entropy: float = dataclasses.field(default=ENTROPY, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("each", self.each, ("block", "head"))
        object.__setattr__(self, "entropy", check_number("entropy", self.entropy))
        if not self.learns:
            if self.each != "block" or self.entropy != ENTROPY:
                raise ParameterError("each and entropy belong to p=learn, and p is a number")
            return
        if self.ramp is not None:
            raise ParameterError("ramp multiplies a rate, and a learnt one (p=learn) takes its own way")
        if isinstance(self.schedule, tuple):
            for rate in self.schedule:
                _check_start(rate)
        if (reason := self.cannot_learn) is not None:
            raise ParameterError(f"p=learn needs {reason}")

    @property
    def rate(self) -> float:
        """p where it is a number."""
        if isinstance(self.p, str):
            raise ParameterError(
                f"{self.name}(learn) learns its rate in a tempered model (attemper.apply); here there is no parameter"
            )
        return self.p

    @property
    def cannot_learn(self) -> str | None:
        """What it would need to learn its rate; None: nothing."""
        return None

    @property
    def adds_to_loss(self) -> bool:
        return self.learns and self.entropy > 0

    def at(self, place: Place) -> Self:
        if not self.learns:
            return super().at(place)
        here = dataclasses.replace(self, schedule="constant", match="max")
        return here.at_times(until=None, start=None, ramp=None)

    def with_rate(self, rate: float) -> Self:
        """The same at a constant rate."""
        return super(LearnableRate, self._constant()).with_rate(rate) if self.learns else super().with_rate(rate)

    def times(self, factor: float) -> Self:
        if not self.learns:
            return super().times(factor)
        return self if factor == 1 else self._constant()

    def _constant(self) -> Self:
        return dataclasses.replace(self, p=0.0, schedule="constant", match="max", each="block", entropy=ENTROPY)

    # ------------------------------------------------------------------------------------------------- the parameter
    def first_value(self, place: Place, heads: int | None) -> Tensor:
        rate = _check_start(self.rates(place.blocks)[place.block])
        start = torch.tensor([unbounded(rate, MOST)], dtype=torch.float32)  # of one dimension: FSDP2 takes no scalars
        if self.each == "block":
            return start
        if heads is None:
            raise ParameterError(
                f"each=head needs to know how many heads {place.where} has, which it does not tell; use each=block"
            )
        return start.repeat(heads)

    def value_shown(self, value: Tensor) -> Tensor:
        return bounded(value, MOST)

    def with_value(self, value: Tensor) -> Perturbation:
        rate = bounded(value, MOST)
        return SoftDrop(self, rate.reshape(()) if rate.numel() == 1 else rate)

    def value_term(self, value: Tensor) -> Tensor:
        """−entropy · H(p), the mean over heads."""
        p = bounded(value, MOST)
        # Not by torch.special.entr, which CUDA compiles when it first runs: a graph that is being captured cannot wait.
        term: Tensor = self.entropy * (p * p.log() + (1 - p) * (1 - p).log()).mean()
        return term

    # ------------------------------------------------------------------------------------------------ what is softened
    def drawn_shape(self, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """How many numbers are drawn in a call of this (B, H, Nq, Nk)."""
        return shape

    def drawn_from(self, stream: Stream) -> Stream:
        """Where these numbers come from, in a call that is a part of a larger one, too."""
        return stream

    def soften_logits(self, logits: Tensor, allowed: Tensor | None, keep: SoftKeep) -> Tensor:
        """Logits of which a share is dropped; those of a row that would lose all of its keys stay."""
        return logits + keep.log.masked_fill(keep.lost(allowed), 0.0)

    def soften_weights(self, weights: Tensor, allowed: Tensor | None, keep: SoftKeep) -> Tensor:
        """The same for the weights that softmax gives."""
        return weights


def _check_start(rate: float) -> float:
    if not LEAST < rate < MOST:
        raise ParameterError(f"a learnt rate begins between 0 and {MOST}; its schedule gives {rate}")
    return rate
