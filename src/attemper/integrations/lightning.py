"""Tempering in Lightning's Trainer, by a callback."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from attemper.errors import ParameterError, PenaltyError, RecipeWarning
from attemper.integrations.companion import SAMPLES, Companion
from attemper.methods.base import Method
from attemper.probes.watching import samples_in
from attemper.recipe import describe

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    from lightning.pytorch import Callback
else:  # the same under its other name: a trainer of one takes no callbacks of the other
    from pytorch_lightning import Callback


class TemperCallback(Companion, Callback):
    """Tempers a `LightningModule`, or a part of it, and goes along with its training.

    Penalties get the factor of the loss under accumulation and loss scaling; rates follow the course of training, also
    behind a resumed checkpoint; rates, penalties and probes are logged. A recipe that compares passes needs one line in
    `training_step`: `Tempered.of(self).loss(lambda: self(x), lambda out: criterion(out, y))`.

    module: the name of the part that is tempered, such as "model"; "" is the whole. None: the only child that has
        parameters, else the whole.
    recipe, probes, probe_every, probe_batch, options: see `Companion`. Where probe_batch is None, the first samples of
        the first batch are probed; of a batch (x, y), x.

    >>> TemperCallback("dropkey(0.1, until=0.5) + explicit(v=1e-3)").recipe[0].name
    'dropkey'
    """

    def __init__(
        self,
        recipe: str | Method | Sequence[Method] | None = None,
        *,
        module: str | None = None,
        probes: Sequence[str] = (),
        probe_every: int | None = None,
        probe_batch: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(recipe, probes=probes, probe_every=probe_every, probe_batch=probe_batch, **options)
        self.module = module

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Temper the module in every stage: cb, graying and skipless act in tests and predictions, too."""
        tempered = self.temper(self._part(pl_module), automatic=self.comparison is None)
        if tempered.control.auto_penalty:
            tempered.loss_scale = lambda: loss_factor(trainer, pl_module)

    def _part(self, pl_module: nn.Module) -> nn.Module:
        if self.module is not None:
            try:
                return pl_module.get_submodule(self.module)
            except AttributeError:
                children = ", ".join(name for name, _ in pl_module.named_children()) or "none"
                raise ParameterError(
                    f"{type(pl_module).__name__} has no module '{self.module}'; its own are: {children}. Modules that "
                    "configure_model makes are not there yet: temper them in configure_model by attemper.apply, and "
                    "give the callback no recipe"
                ) from None
        weighty = [child for child in pl_module.children() if any(True for _ in child.parameters())]
        own = any(True for _ in pl_module.parameters(recurse=False))
        return weighty[0] if len(weighty) == 1 and not own else pl_module

    # -------------------------------------------------------------------------------------------------- while training
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.timed:
            epochs = trainer.max_epochs if trainer.max_steps == -1 else None
            self.progress(trainer.global_step, trainer.estimated_stepping_batches, epochs)
        if self.probes and not self.tables:
            if self.probe_batch is None:
                self.probe_batch = beginning(batch)
            self._probe(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if not trainer.barebones and step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self.figures(), on_step=True, on_epoch=False)
        if self.probes and self.due(step) and step not in self.tables:
            self._probe(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.probes and self.probe_every is None:
            self._probe(trainer)

    def _probe(self, trainer: Any) -> None:
        figures = self.probe(trainer.global_step, self.probe_batch)
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

    # ------------------------------------------------------------------------------------------------------ checkpoints
    def state_dict(self) -> dict[str, Any]:
        """The recipe, in words."""
        return {"recipe": describe(self.tempered.methods)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Say where a checkpoint was trained with another recipe."""
        before, now = state_dict.get("recipe"), describe(self.tempered.methods)
        if before is not None and before != now:
            warnings.warn(
                f"the checkpoint was trained with '{before}'; this run has '{now}'", RecipeWarning, stacklevel=2
            )


def loss_factor(trainer: Any, pl_module: Any) -> float:
    """What Lightning multiplies the loss of a training step with before it goes backward."""
    if trainer.strategy.handles_gradient_accumulation:
        raise PenaltyError(
            f"{type(trainer.strategy).__name__} scales losses itself, and a callback cannot see how. Use "
            "loss = Tempered.of(self).loss(lambda: self(x), lambda out: criterion(out, y)) in training_step."
        )
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    scale = 1.0 if scaler is None else float(scaler.get_scale())
    return scale / trainer.accumulate_grad_batches if pl_module.automatic_optimization else scale


def beginning(batch: Any) -> Any:
    """What a model takes of the first samples of a training batch."""
    if isinstance(batch, list | tuple):
        batch = batch[0]
    count = samples_in(batch)

    def cut(part: Any) -> Any:
        return part[:SAMPLES] if hasattr(part, "dim") and part.dim() and len(part) == count else part

    return {name: cut(part) for name, part in batch.items()} if isinstance(batch, dict) else cut(batch)
