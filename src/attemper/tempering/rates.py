"""Rates of a live model: set by hand, and following the course of training."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any, cast

from torch import nn

from attemper.errors import NoSiteError, ParameterError, UnknownMethodError, suggestion
from attemper.methods.base import Method
from attemper.methods.kinds import Learnable
from attemper.methods.rates import Scheduled, Timed
from attemper.recipe import describe
from attemper.tempering.penalties import Control
from attemper.tempering.subclassing import Action, is_tempered, state_of


class Rates:
    """What the handle knows of rates."""

    def __init__(self, model: nn.Module, control: Control) -> None:
        self.model = model
        self.control = control

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods of the recipe, as they were written."""
        return self.control.methods

    def _actions(self) -> list[tuple[str, nn.Module, Action]]:
        """Every action once, with the outermost module that it stands round."""
        found: dict[int, tuple[str, nn.Module, Action]] = {}
        for name, module in self.model.named_modules():
            for action in state_of(module).actions if is_tempered(module) else ():
                found.setdefault(id(action), (name, module, action))
        return list(found.values())

    def set_rate(self, rate: float, method: str | None = None) -> None:
        """Set p of every stochastic method on the live model; schedules keep their shape.

        rate: the new p. Zero switches dropping off and costs nothing, as for the last epochs of a training.
        method: the name of the one method to set; None sets all.
        """
        names = [m.name for m in self.methods if isinstance(m, Scheduled)]
        self._check_tempered()
        if not names:
            raise UnknownMethodError(
                f"no method in '{describe(self.methods)}' has a rate; disabled() switches everything off for a while"
            )
        if method is not None and method not in names:
            raise UnknownMethodError(
                f"no method '{method}' with a rate in '{describe(self.methods)}'.{suggestion(method, names)}"
            )
        recipe = tuple(
            m.with_rate(rate) if isinstance(m, Scheduled) and method in (None, m.name) else m for m in self.methods
        )
        self.control.resting = False
        self._resolve(at_moment(recipe, self.control))
        self._forget_learnt(recipe)
        self.control.methods = recipe
        self.control.factors = factors_of(recipe, self.control)

    def rest(self) -> None:
        """Set every rate to zero, and blur's sigma, until `set_rate`: for a last stretch that trains what is tested."""
        if not self.control.resting:
            self._check_tempered()
            self.control.resting = True
            self._resolve(at_moment(self.methods, self.control))
            self.control.factors = factors_of(self.methods, self.control)

    def draws_nothing(self) -> str | None:
        """Why no method draws random numbers at its rate of now; None: one does."""
        if any(m.stochastic and not m.idle for m in at_moment(self.methods, self.control)):
            return None
        drawing = [m for m in self.methods if m.stochastic]
        if not drawing:
            return f"no method of '{describe(self.methods)}' draws random numbers"
        return f"the rates of '{describe(drawing)}' are 0 now; set_rate and progress change that"

    def _forget_learnt(self, recipe: Iterable[Method]) -> None:
        """Take parameters away that no method learns any more."""
        learning = {m.name for m in recipe if isinstance(m, Learnable) and m.learns}
        for _, _, action in self._actions():
            learnt: dict[str, str] = getattr(action, "learnt", {})
            for name in [name for name in learnt if name not in learning]:
                delattr(cast(Any, action).parameters, learnt.pop(name))

    def progress(self, fraction: float, epochs: float | None = None) -> None:
        """Say how far training is, for rates that depend on it (`until`, `start`, `ramp`); call it before every step.

        A recipe without such a rate needs no telling, and the call costs nothing then. Nor does it while no rate
        changes.

        fraction: how much of training has passed, from 0 to 1: `step / steps`.
        epochs: how long training is, for times that are given in epochs.

        >>> import attemper
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        >>> tempered = attemper.apply(layer, "dropkey(0.1, until=0.5)")
        >>> tempered.progress(0.6)
        >>> tempered.summary()[0].rate
        0.0
        """
        if not _is_number(fraction) or not 0 <= fraction <= 1:
            raise ParameterError(
                f"progress takes the share of training that has passed, a number from 0 to 1; got {fraction!r}"
            )
        if epochs is not None and not (_is_number(epochs) and epochs > 0):
            raise ParameterError(f"epochs must be how long training is, a number above 0; got {epochs!r}")
        if not any(isinstance(m, Timed) and m.is_timed for m in self.methods):
            return
        control = self.control
        length = control.epochs if epochs is None else epochs
        before = control.fraction, control.epochs
        control.fraction, control.epochs = float(fraction), None if length is None else float(length)
        try:
            factors = factors_of(self.methods, control)
        except ParameterError:
            control.fraction, control.epochs = before
            raise
        if factors != control.factors:
            self._check_tempered()
            self._resolve(at_moment(self.methods, control))
            control.factors = factors

    def begin(self) -> None:
        """Set the rates that depend on time to what they are at the beginning of training."""
        control = self.control
        control.factors = factors_of(self.methods, control)
        if control.factors:
            self._resolve(at_moment(self.methods, control))

    def _resolve(self, recipe: Iterable[Method]) -> None:
        """Let every action take over the rates of a recipe; a refusal leaves every site as it was."""
        by_name = {m.name: m for m in recipe}
        actions = [action for _, _, action in self._actions()]
        before = [dict(vars(action)) for action in actions]
        try:
            for action in actions:
                action.resolve(by_name)
        except BaseException:
            for action, state in zip(actions, before, strict=True):
                vars(action).update(state)
            raise

    def _check_tempered(self) -> None:
        if not any(is_tempered(module) for module in self.model.modules()):
            raise NoSiteError(f"this {type(self.model).__name__} is not tempered any more; apply a recipe to it first")


def _is_number(value: object) -> bool:
    """Whether it is a number, numpy's included; true and false are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def factors_of(methods: Iterable[Method], control: Control) -> dict[str, float]:
    """What every rate that depends on time is multiplied with now; at rest, all rates do."""
    timed = [m for m in methods if isinstance(m, Timed) and (m.is_timed or control.resting)]
    return {m.name: 0.0 if control.resting else m.factor(control.fraction, control.epochs) for m in timed}


def at_moment(methods: Iterable[Method], control: Control) -> tuple[Method, ...]:
    """The methods as they act now."""

    def now(method: Timed) -> Method:
        return method.stilled() if control.resting else method.during(control.fraction, control.epochs)

    return tuple(now(m) if isinstance(m, Timed) else m for m in methods)
