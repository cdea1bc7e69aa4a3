"""Rates: of every block, and over the course of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal, Self

from attemper.errors import ParameterError
from attemper.methods.base import Method, Place, check_choice, check_rate, render_value

Moment = int | float
"""A point of training: a float is the share of it that has passed, an int counts epochs, from the end if negative."""


class Timed(Method):
    """A method whose rate may change in the course of training. Progress is told by `Tempered.progress`.

    A dataclass that is one has these fields, by their names alone:

    until: when it stops acting. start: when it begins. A float is a share of training, an int counts epochs, and a
        negative one counts them from the end.
    ramp: how long the rate takes to rise from zero behind `start`, and to fall to zero before `until`; where only
        `until` is given, it falls and does not rise.
    """

    until: Moment | None
    start: Moment | None
    ramp: Moment | None

    def check_times(self) -> None:
        """Raise where the times make no sense."""
        for name in ("until", "start", "ramp"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _check_moment(name, getattr(self, name)))
        if type(self.start) is type(self.until) and self.start is not None and self.until is not None:
            if self.start >= self.until and (self.start < 0) == (self.until < 0):
                raise ParameterError(f"start={self.start} must come before until={self.until}")

    @property
    def is_timed(self) -> bool:
        """Whether its rate depends on how far training is."""
        return not (self.until is None and self.start is None and self.ramp is None)

    def factor(self, fraction: float | None, epochs: float | None = None) -> float:
        """What the rate is multiplied with, from 0 to 1.

        fraction: how much of training has passed, from 0 to 1; None: nobody said so yet, which is the beginning.
        epochs: how long training is, which times in epochs need.

        >>> from attemper.methods import DropKey
        >>> early = DropKey(0.1, until=0.5, ramp=0.5)
        >>> [early.factor(fraction) for fraction in (0.0, 0.25, 0.5, 1.0)]
        [1.0, 0.5, 0.0, 0.0]
        """
        if not self.is_timed:
            return 1.0
        rises, falls = self.start is not None or self.until is None, self.until is not None
        if fraction is None:
            return 0.0 if self.start or (rises and self.ramp) else 1.0
        begin = 0.0 if self.start is None else self._share("start", self.start, epochs)
        end = 1.0 if self.until is None else self._share("until", self.until, epochs)
        if begin >= end:
            raise ParameterError(
                f"{self.name} would never act: start={self.start} does not come before until={self.until} in a "
                f"training of {epochs} epochs"
            )
        length = 0.0 if self.ramp is None else self._share("ramp", self.ramp, epochs)
        if (rises + falls) * length > end - begin + 1e-9:
            raise ParameterError(
                f"ramp={self.ramp} of {self.name} is too long: it would not reach its rate between {begin:.4g} and "
                f"{end:.4g} of training"
            )
        if fraction < begin or (fraction >= end and self.until is not None):
            return 0.0
        if length == 0:
            return 1.0
        up = (fraction - begin) / length if rises else 1.0
        down = (end - fraction) / length if falls else 1.0
        return min(1.0, up, down)

    def _share(self, name: str, moment: Moment, epochs: float | None) -> float:
        if isinstance(moment, float):
            return moment
        if epochs is None:
            raise ParameterError(
                f"{name}={moment} of {self.name} counts epochs, and how many there are was not said: "
                f"tempered.progress(fraction, epochs=…) does. A share of training is a float, such as {name}=0.3"
            )
        share = (moment if moment >= 0 else epochs + moment) / epochs
        return share if name == "ramp" else min(max(share, 0.0), 1.0)

    def during(self, fraction: float | None, epochs: float | None = None) -> Self:
        """The method as it acts at one moment of training (see `factor`), without times of its own."""
        if not self.is_timed:
            return self
        return self.at_times(until=None, start=None, ramp=None).times(self.factor(fraction, epochs))

    def stilled(self) -> Self:
        """The method with all of its rates at zero."""
        return self.at_times(until=None, start=None, ramp=None).times(0.0)

    def at_times(self, **times: Moment | None) -> Self:
        """The same method with other times: until, start, ramp."""
        return dataclasses.replace(self, **times)

    def times(self, factor: float) -> Self:
        """The same method with its rates multiplied by a factor from 0 to 1."""
        raise NotImplementedError

    @property
    def level(self) -> float | None:
        """What `times` multiplies, for people to read, once it is known; None: it is learnt, or differs from block to
        block."""
        raise NotImplementedError


def _check_moment(name: str, value: object) -> Moment:
    """A time as it may stand in a recipe, or an error that names the parameter."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    least = 0.0 if name == "start" else 1e-9
    if isinstance(value, float) and least <= value <= 1:
        return value
    if whole and (value == 0) <= (name == "start") and (value >= 0 or name != "ramp"):  # type: ignore[operator]
        return value  # type: ignore[return-value]
    allowed = "[0, 1]" if name == "start" else "(0, 1]"
    counts = "from 1 on" if name == "ramp" else "of epochs, from the end if negative"
    raise ParameterError(f"{name} must be a share of training in {allowed}, or a whole number {counts}; got {value!r}")


START = 0.1
"""Where a learnt rate begins."""

Schedule = str | tuple[float, ...] | Callable[[int, int], float]


@dataclasses.dataclass(frozen=True)
class Scheduled(Timed):
    """A method with a drop rate that may differ from block to block.

    p: the probability of dropping, 0 ≤ p < 1.
    schedule: "constant"; "decreasing", p·(L − l)/L at block l of L; "increasing", its mirror image; a list of L rates;
        or a function of (l, L) that gives the rate.
    match: what p is of a schedule: its largest rate ("max") or its mean over the blocks ("mean").
    until, start, ramp: when it acts in the course of training (see `Timed`).
    """

    learnable: ClassVar[bool] = False
    """Whether p may be "learn", for a rate that is learnt with the weights."""

    p: float = 0.1
    schedule: Schedule = "constant"
    match: Literal["max", "mean"] = "max"
    until: Moment | None = dataclasses.field(default=None, kw_only=True)
    start: Moment | None = dataclasses.field(default=None, kw_only=True)
    ramp: Moment | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not (self.learnable and self.learns):
            object.__setattr__(self, "p", check_rate("p", self.p))
        self.check_times()
        check_choice("match", self.match, ("max", "mean"))
        if isinstance(self.schedule, list | tuple):
            rates = tuple(check_rate(f"schedule[{i}]", rate) for i, rate in enumerate(self.schedule))
            object.__setattr__(self, "schedule", rates)
        elif not callable(self.schedule):
            if not isinstance(self.schedule, str) or self.schedule not in SHAPES:
                raise ParameterError(
                    f"schedule must be one of {', '.join(SHAPES)}, a list of rates or a function of (l, L); "
                    f"got {self.schedule!r}"
                )

    @property
    def learns(self) -> bool:
        """Whether p is learnt with the weights (see `Learnable`)."""
        return isinstance(self.p, str) and self.p == "learn"

    @property
    def idle(self) -> bool:
        if isinstance(self.schedule, tuple):
            return not any(self.schedule)
        return self.p == 0 and isinstance(self.schedule, str)

    @property
    def per_block(self) -> tuple[str, ...]:
        """The parameters that still have a value for every block (see `Perturbation`)."""
        return () if self.schedule == "constant" else ("schedule",)

    def rates(self, blocks: int) -> list[float]:
        """The rate of every block.

        >>> from attemper.methods import DropKey
        >>> DropKey(0.4, schedule="decreasing").rates(2)
        [0.4, 0.2]
        >>> [round(rate, 6) for rate in DropKey(0.3, schedule="decreasing", match="mean").rates(2)]
        [0.4, 0.2]
        """
        if isinstance(self.schedule, tuple):
            if len(self.schedule) != blocks:
                raise ParameterError(
                    f"schedule of {self.name} must have one rate per block: the model has {blocks} blocks, "
                    f"the list has {len(self.schedule)} rates"
                )
            return list(self.schedule)
        if not isinstance(self.schedule, str):
            return [check_rate(f"schedule({l}, {blocks})", self.schedule(l, blocks)) for l in range(blocks)]
        shape = [SHAPES[self.schedule](l, blocks) for l in range(blocks)]
        total = max(shape) if self.match == "max" else sum(shape) / blocks
        p = START if self.learns else self.p
        rates = [p * part / total for part in shape]
        if max(rates) >= 1:
            raise ParameterError(
                f"p={self.p} with schedule={self.schedule}, match={self.match} over {blocks} blocks needs a rate of "
                f"{max(rates):.4g} in one of them; rates must be below 1"
            )
        return rates

    def at(self, place: Place) -> Self:
        rate = self.rates(place.blocks)[place.block]
        here = dataclasses.replace(self, p=rate, schedule="constant", match="max")
        return here.at_times(until=None, start=None, ramp=None) if self.is_timed else here

    @property
    def level(self) -> float | None:
        return None if self.learns else self.p

    def with_rate(self, rate: float) -> Self:
        """The same method with p = rate. A schedule given as a list or function is scaled, so that its largest rate
        (or its mean, by `match`) becomes the new one."""
        rate = check_rate("rate", rate)
        if isinstance(self.schedule, str):
            return dataclasses.replace(self, p=rate)
        given = self.schedule.schedule if isinstance(self.schedule, Rescaled) else self.schedule
        return dataclasses.replace(self, p=rate, schedule=Rescaled(given, self.match, rate))

    def times(self, factor: float) -> Self:
        if isinstance(self.schedule, str):
            return dataclasses.replace(self, p=self.p * factor)
        if isinstance(self.schedule, tuple):
            return dataclasses.replace(self, schedule=tuple(rate * factor for rate in self.schedule))
        return dataclasses.replace(self, schedule=Multiplied(self.schedule, factor))


@dataclasses.dataclass(frozen=True)
class Rescaled:
    """A schedule of given rates, scaled to a new largest or mean rate."""

    schedule: tuple[float, ...] | Callable[[int, int], float]
    match: Literal["max", "mean"]
    rate: float

    def __str__(self) -> str:
        given = render_value(self.schedule)
        return f"{given} scaled to {self.match} {self.rate}"

    def __call__(self, block: int, blocks: int) -> float:
        given = self.schedule
        rates = given if isinstance(given, tuple) else [given(l, blocks) for l in range(blocks)]
        if len(rates) != blocks:
            raise ParameterError(f"schedule has {len(rates)} rates, the model has {blocks} blocks")
        total = max(rates) if self.match == "max" else sum(rates) / blocks
        return 0.0 if total == 0 else self.rate * rates[block] / total


@dataclasses.dataclass(frozen=True)
class Multiplied:
    """A schedule that is a function, with its rates multiplied by a factor."""

    schedule: Callable[[int, int], float]
    factor: float

    def __call__(self, block: int, blocks: int) -> float:
        return self.schedule(block, blocks) * self.factor


SHAPES: dict[str, Callable[[int, int], int]] = {
    "constant": lambda l, blocks: 1,
    "decreasing": lambda l, blocks: blocks - l,
    "increasing": lambda l, blocks: l + 1,
}
