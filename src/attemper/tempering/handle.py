"""The handle to a tempered model: loss, penalties, rates, what acts where, and the way back."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from attemper.errors import NoSiteError, ParameterError
from attemper.methods.kinds import Learnable, LossTerm
from attemper.methods.rates import Timed
from attemper.recipe import describe
from attemper.tempering.attention import AttentionAction
from attemper.tempering.ledger import Entry, Ticket
from attemper.tempering.offsets import Samples
from attemper.tempering.outputs import frozen_batch_norm, logits_of
from attemper.tempering.penalties import When
from attemper.tempering.replay import Replay
from attemper.tempering.root import applied_by, total_of
from attemper.tempering.saving import save
from attemper.tempering.skips import OutsideAction
from attemper.tempering.subclassing import is_made, is_tempered, restore, state_of

PREFIX = "attemper"
"""The one name under which methods add parameters to a model's state dict."""

Share = Tensor | float | Callable[[], Tensor | float]


@dataclass(frozen=True)
class Row:
    """One method at one site."""

    site: str
    """The module's name in the model."""
    module: str
    """Its class."""
    block: int
    """The block that it belongs to, counted through the whole network."""
    method: str
    rate: float | None
    """The probability of dropping here; of blur, sigma; None for a method that has neither."""
    recipe: str
    """The method as it acts here."""


@dataclass(frozen=True)
class PenaltyRow:
    """One term of the penalty."""

    site: str
    block: int
    method: str
    component: str
    value: float
    """What it adds to the loss, its strength included."""


class Tempered(Replay):
    """The handle to a tempered model."""

    @classmethod
    def of(cls, model: nn.Module) -> Tempered:
        """The handle to a model that is tempered already: a copy, or one that was loaded from a file."""
        for module in model.modules():
            if is_tempered(module) and state_of(module).actions:
                return cls(model, state_of(module).actions[0].control)
        raise NoSiteError(f"this {type(model).__name__} is not tempered; attemper.apply(model, recipe) does that")

    @property
    def left_alone(self) -> dict[str, str]:
        """Modules that look like attention and are not tempered, with the reason."""
        return self.control.left_alone

    # ----------------------------------------------------------------------------------------------------- the loss
    def loss(
        self,
        forward: Callable[[], Any],
        criterion: Callable[[Any], Tensor],
        counted: Tensor | None = None,
        weight: Tensor | None = None,
        share: Share = 1.0,
    ) -> Tensor:
        """The training loss: the task's own, the penalties, and the comparison of passes if the recipe has one.

        forward: runs the model and returns its output: a tensor, a dict with "logits", or a Transformers output.
        criterion: turns that output into a scalar.
        counted: for logits (B, N, classes) of sequences, boolean (B, N): False at padding, which is not compared.
        weight: a factor of the loss and of the comparison, but not of the penalties: where several processes share a
            batch, and one has more predictions that count than another.
        share: a factor of what the methods add, and of nothing else: the one that `criterion` has given the loss
            already, such as the part of an optimiser's step that this batch is; or a function that gives it, called
            behind the first pass.
        """
        comparison = next((method for method in self.methods if isinstance(method, LossTerm)), None)
        ledger = self.control.ledger
        outer = ledger.open_scope()
        try:
            if not self.model.training:
                return _weighted(criterion(forward()), weight)
            if comparison is None or comparison.strength == 0:
                return self._with_penalty(_weighted(criterion(forward()), weight), share)
            return self._compared(comparison, forward, criterion, counted, weight, share)
        finally:
            ledger.scope = outer

    def _compared(
        self,
        comparison: LossTerm,
        forward: Callable[[], Any],
        criterion: Callable[[Any], Tensor],
        counted: Tensor | None,
        weight: Tensor | None,
        share: Share,
    ) -> Tensor:
        ledger, passes = self.control.ledger, comparison.passes
        ledger.embedded = []
        try:
            outputs = [forward()]
            penalised = self._with_penalty(_weighted(criterion(outputs[0]) / passes, weight), share)
            ledger.muted = True
            with frozen_batch_norm(self.model):
                outputs += [forward() for _ in range(passes - 1)]
        finally:
            ledger.muted, ledger.embedded = False, None
        logits = [logits_of(out) for out in outputs]
        added = _shared(comparison.strength * comparison.compare_all(logits, _fitting(counted, logits[0])), share)
        for out in outputs[1:]:
            added = criterion(out) / passes + added
        return penalised + _weighted(added, weight)

    def _with_penalty(self, loss: Tensor, share: Share) -> Tensor:
        entries, tickets = self.control.ledger.take_own()
        return loss + _shared(self._taken(entries, tickets), share) if entries else loss

    def penalty(self) -> Tensor:
        """What the forward passes since the last call added to the loss: a scalar, zero where no method adds any.

        A pass counts as long as its output lives, or a loss that was computed from it. Call it before backward.
        """
        ledger = self.control.ledger
        dropped = ledger.leaves_out()
        entries, tickets = ledger.take()
        if dropped and self.control.tracks(self.model.training):
            warnings.warn(
                f"penalty() leaves out passes whose outputs are gone ({dropped}). Call it while the output, or a loss "
                "that was computed from it, is still there; tempered.loss does.",
                stacklevel=2,
            )
        if entries:
            return self._taken(entries, tickets)
        tensor = next(iter(self.model.parameters()), None)
        return torch.zeros((), device=None if tensor is None else tensor.device)

    def _taken(self, entries: list[Entry], tickets: list[Ticket]) -> Tensor:
        penalty = total_of(entries, self.control.ledger)
        if not torch.compiler.is_compiling():
            self.control.ledger.watch_on(penalty.device)
            applied_by(penalty, tickets)
        return penalty

    def penalties(self) -> list[PenaltyRow]:
        """The terms of the penalty, one row per block and component: those not yet taken, else those taken last."""
        entries = self.control.ledger.untaken() or self.control.ledger.last
        return [PenaltyRow(e.site, e.block, e.method, e.component, float(e.term.detach())) for e in entries]

    @property
    def loss_scale(self) -> float | Callable[[], float]:
        """With auto_penalty and a loss computed outside of the model: the factor that the loop gives its loss.

        A number or a function without arguments: 1/steps under gradient accumulation, `scaler.get_scale` under loss
        scaling. Where the model returns its own loss, as Transformers' models do, it is not needed.
        """
        return 1.0 if self.control.loss_scale is None else self.control.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float | Callable[[], float]) -> None:
        self.control.loss_scale = scale

    @property
    def batch_share(self) -> float:
        """Where several processes share a batch: the part of it that this one sees, 1/4 for one of four alike.

        Penalties that are sums over the samples are divided by it, so that the mean over the processes, each weighted
        with its share, is the penalty of the whole batch. Those that are means need nothing.
        """
        return self.control.batch_share

    @batch_share.setter
    def batch_share(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ParameterError(f"batch_share must be above 0 and at most 1; got {share!r}")
        self.control.batch_share = share

    def samples(self, first: int | None, count: int = 0) -> None:
        """Say which samples of the whole batch the next passes of this process have, where processes share a batch.

        first: the number of the first of them in the whole batch; None takes back what was said.
        count: how many there are.

        Needed where processes have different numbers of samples. Otherwise process r of those that share the batch has
        the samples from r · count on.
        """
        if first is None:
            self.control.samples = None
            return
        for name, value, least in (("first", first, 0), ("count", count, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ParameterError(f"{name} must be a whole number of at least {least}; got {value!r}")
        self.control.samples = Samples(first, count)

    # ---------------------------------------------------------------------------------------------------- on and off
    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Context manager: inside it the model computes what it did before, in training mode too."""
        with self._when("never"):
            yield

    @contextlib.contextmanager
    def stochastic(self) -> Iterator[None]:
        """Context manager: inside it the methods act in eval mode too; nothing else leaves eval mode."""
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it would pass by the tempered modules
        try:
            with self._when("always"):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    @contextlib.contextmanager
    def _when(self, when: When) -> Iterator[None]:
        before = self.control.when
        self.control.when = when
        try:
            yield
        finally:
            self.control.when = before

    def average(self, forward: Callable[[], Tensor], passes: int) -> Tensor:
        """The mean of `passes` stochastic passes, which closes the gap between training and test.

        forward: runs the model and returns predictions, such as `lambda: model(x).softmax(-1)`. Put the model in eval
            mode before: the methods act all the same, and nothing else does.
        """
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ParameterError(f"passes must be a number of passes, at least 1; got {passes!r}")
        if (reason := self.draws_nothing()) is not None:
            warnings.warn(f"all passes of average() are equal: {reason}", stacklevel=2)
        with self.stochastic():
            total = forward()
            for _ in range(passes - 1):
                total = total + forward()
        return total / passes

    def save(self, folder: str | Path) -> None:
        """Write the weights, the recipe and its options into a folder, from which `attemper.load` restores them.

        The folder gets `model.safetensors` and `attemper.json`, each of them whole or not at all. Those of an earlier
        `save` are replaced; weights that something else has put there are refused.
        """
        save(self.model, self.control, Path(folder))

    def remove(self) -> None:
        """Make the model what it was before: same classes, same attributes, same outputs in training and eval."""
        for module in list(self.model.modules()):
            if is_tempered(module) or is_made(module):  # others make layers of the class that they find
                restore(module)
        if PREFIX in self.model._modules:
            del self.model._modules[PREFIX]

    # ------------------------------------------------------------------------------------------------------- in words
    def summary(self) -> list[Row]:
        """Which method acts where, at which rate: one row per site and method."""
        rows = []
        for name, module, action in self._actions():
            place = getattr(action, "place", None)
            if place is None:
                continue
            if isinstance(action, AttentionAction):
                here = [*action.perturbations, *action.penalties, *action.weight_maps]
            else:
                here = [cast(Any, action).method]
            site, where = name, module
            if isinstance(action, OutsideAction):  # what it stands on only runs the block
                site, where = place.name, self.model.get_submodule(place.name)
            for method in here:
                value = action.value_of(method) if isinstance(action, AttentionAction) else None
                rate = method.level if isinstance(method, Timed) else None
                if value is not None:
                    rate = float(cast(Learnable, method).value_shown(value.detach()).mean())
                row = Row(site, type(where).__name__, place.block, method.name, rate, str(method))
                if row not in rows:
                    rows.append(row)
        return rows

    def __str__(self) -> str:
        rows = self.summary()
        if not any(is_tempered(module) for module in self.model.modules()):
            return f"{type(self.model).__name__}: not tempered"
        by_site: dict[str, dict[str, Row]] = {}
        for row in rows:
            by_site.setdefault(row.site, {})[row.method] = row
        names = [method.name for method in self.methods if any(row.method == method.name for row in rows)]
        table = [["block", "site", "module", *names]]
        for site, here in by_site.items():
            cells = [_cell(here.get(name)) for name in names]
            first = next(iter(here.values()))
            table.append([str(first.block), site or "(root)", first.module, *cells])
        lines = [f"{type(self.model).__name__} tempered with {describe(self.methods)}"]
        lines += ["", *_aligned(table)] if rows else []
        lines += [f"left alone: {name}, since {reason}" for name, reason in self.left_alone.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Tempered {type(self.model).__name__}: {describe(self.methods)}>"


def _weighted(loss: Tensor, weight: Tensor | None) -> Tensor:
    return loss if weight is None else weight * loss


def _shared(added: Tensor, share: Share) -> Tensor:
    share = share() if callable(share) else share
    return added if isinstance(share, float) and share == 1 else added * share


def _fitting(counted: Tensor | None, logits: Tensor) -> Tensor | None:
    """Which predictions count; raise where that does not fit them."""
    if counted is None:
        return None
    if counted.dtype != torch.bool or counted.shape != logits.shape[:-1]:
        raise ParameterError(
            f"counted must be boolean, one value for every prediction; got {counted.dtype} {tuple(counted.shape)} for "
            f"logits {tuple(logits.shape)}"
        )
    return counted


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return "yes" if row.rate is None else f"{row.rate:.4g}"


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
