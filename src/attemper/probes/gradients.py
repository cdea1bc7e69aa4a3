"""Gradients: how much they vary between mini-batches, and which parameters a penalty pushes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import NoSiteError, ParameterError
from attemper.tempering import Tempered
from attemper.tempering.outputs import frozen_batch_norm
from attemper.tempering.records import actions_of


@dataclass(frozen=True)
class GradientRow:
    """The gradient of one parameter over mini-batches."""

    parameter: str
    mean_norm: float
    """Length of the mean gradient."""
    variance: float
    """Trace of the gradient's covariance: the mean squared distance from the mean gradient, unbiased."""

    @property
    def noise_scale(self) -> float:
        """Variance over the squared length of the mean: how many batches would have to be averaged."""
        return self.variance / self.mean_norm**2 if self.mean_norm else float("inf")


def gradient_variance(
    model: nn.Module, loss: Callable[[Any], Tensor], batches: Iterable[Any]
) -> tuple[GradientRow, ...]:
    """The gradient's mean and variance over mini-batches, one row per parameter, in the mode that the model is in.

    Nothing is left behind: `.grad`, batch norms and random generators stay as they are.

    loss: the training loss of one batch, such as `lambda b: tempered.loss(lambda: model(b[0]), …)`.
    batches: at least two.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ParameterError(f"{type(model).__name__} has no parameter that wants a gradient")
    parameters = [p for _, p in named]
    means = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    squares = [torch.zeros((), dtype=torch.float64, device=p.device) for p in parameters]
    count = 0
    with untouched(model):
        for batch in batches:
            gradients = torch.autograd.grad(loss(batch), parameters, allow_unused=True, materialize_grads=True)
            count += 1
            for at, gradient in enumerate(gradients):  # Welford: no difference of large sums
                away = gradient.double() - means[at]
                means[at] += away / count
                squares[at] += (away * (gradient.double() - means[at])).sum()
    if count < 2:
        raise ParameterError(f"a variance needs at least two batches; got {count}")
    return tuple(
        GradientRow(name, float(mean.norm()), float(square) / (count - 1))
        for (name, _), mean, square in zip(named, means, squares, strict=True)
    )


@dataclass(frozen=True)
class PushRow:
    """How hard one term of a penalty pulls at one parameter."""

    term: str
    """Method and component, such as 'explicit.v'."""
    parameter: str
    norm: float
    """Length of the term's gradient, its strength included."""


def penalty_push(tempered: Tempered, forward: Callable[[], Any]) -> tuple[PushRow, ...]:
    """Which parameters the penalties of a recipe push, strongest first; those that they leave alone are not listed.

    forward: runs the model, such as `lambda: model(x)`. It runs once, in training mode, and leaves nothing behind.
    """
    model, control = tempered.model, tempered.control
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    ledger, automatic = control.ledger, control.auto_penalty
    outer = ledger.open_scope()
    control.auto_penalty = False
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        with untouched(model):
            out = forward()
        terms: dict[str, Tensor] = {}
        for entry in ledger.take_own()[0]:
            name = f"{entry.method}.{entry.component}"
            terms[name] = terms[name] + entry.term if name in terms else entry.term
        del out
        if not terms:
            raise NoSiteError("no method of this recipe adds a penalty; explicit and arora do")
        rows = [row for name, value in terms.items() for row in _pushed(name, value, named)]
    finally:
        ledger.scope = outer
        control.auto_penalty = automatic
        for module, training in modes:
            module.training = training
    return tuple(sorted(rows, key=lambda row: -row.norm))


def _pushed(term: str, value: Tensor, named: list[tuple[str, nn.Parameter]]) -> Iterator[PushRow]:
    gradients = torch.autograd.grad(value, [p for _, p in named], retain_graph=True, allow_unused=True)
    for (name, _), gradient in zip(named, gradients, strict=True):
        if gradient is not None:
            yield PushRow(term, name, float(gradient.double().norm()))


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A stretch of passes with gradients after which batch norms and random generators stand where they stood.

    Rates that depend on how far training is stay where they are; nobody has to say so here.
    """
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), frozen_batch_norm(model), torch.enable_grad():
        controls = {id(action.control): action.control for action in actions_of(model)}.values()
        before = [control.looking for control in controls]
        for control in controls:
            control.looking = True
        try:
            yield
        finally:
            for control, looking in zip(controls, before, strict=True):
                control.looking = looking
