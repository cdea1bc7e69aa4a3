"""Tempering in the Trainer of Hugging Face Transformers: a callback, and a trainer for what a callback cannot reach."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from attemper.errors import ConflictError, PenaltyError
from attemper.integrations.companion import Companion, first_samples, on_device
from attemper.recipe import describe
from attemper.tempering import Tempered
from attemper.tempering.automatic import predicts_next, watch_divisor
from attemper.tempering.outputs import IGNORED
from attemper.tempering.records import added_parameters


class TemperCallback(Companion, TrainerCallback):
    """Tempers the model of a `Trainer`, and goes along with its training.

    Penalties get the factor of the loss, whatever it is divided or multiplied with; rates follow the course of
    training, also behind a resumed checkpoint; rates, penalties and probes are logged beside the loss.

    recipe, probes, probe_every, probe_batch, options: see `Companion`.

    >>> TemperCallback("dropkey(0.1, until=0.5) + explicit(v=1e-3)").recipe[0].name
    'dropkey'
    """

    by_trainer = False
    """Whether a `TemperMixin` computes the loss."""

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if not self.by_trainer and self.comparison is not None:
            raise ConflictError(self._needs_trainer())
        self.start(given["model"], args)

    def start(self, model: nn.Module, args: TrainingArguments) -> Tempered:
        """Temper a model of the trainer's, before its optimiser is built."""
        tempered = self.temper(model, automatic=not self.by_trainer)
        if self.comparison is not None and not self.by_trainer:
            raise ConflictError(self._needs_trainer())
        if tempered.control.auto_penalty and tempered.control.loss_scale is None:
            tempered.loss_scale = self._outside(args)
        return tempered

    def _needs_trainer(self) -> str:
        return (
            f"{self.comparison} compares passes, and a callback cannot run the model twice. Use TemperTrainer of "
            "attemper.integrations.transformers in the place of Trainer, or class MyTrainer(TemperMixin, Trainer)."
        )

    def _outside(self, args: TrainingArguments) -> Any:
        """The factor of a loss that is computed outside of the model: 1, or an error where nobody can see it."""

        def factor() -> float:
            if args.gradient_accumulation_steps == 1 and not args.fp16:
                return 1.0
            raise PenaltyError(
                f"the penalties of '{describe(self.tempered.methods)}' need the factor of the loss, and a callback "
                "cannot see it where the loss is computed outside of the model (label_smoothing_factor, "
                "compute_loss_func) while gradients are accumulated or scaled. Use TemperTrainer of "
                "attemper.integrations.transformers in the place of Trainer, or class MyTrainer(TemperMixin, Trainer)."
            )

        return factor

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        model = given["model"]
        if self.handle is None or all(module is not self.handle.model for module in model.modules()):
            # model_init made a new one
            tempered = self.start(model, args)
            if added_parameters(model):
                raise ConflictError(
                    f"'{describe(tempered.methods)}' adds parameters, and with model_init the optimiser is built "
                    "before a callback sees the model: use TemperTrainer of attemper.integrations.transformers"
                )
        self._tell(args, state, given)
        if self.probes:
            if self.probe_batch is None:
                self.probe_batch = first_samples(given["train_dataloader"])
            self._probe(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self._tell(args, state, given)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.probes and self.due(state.global_step):
            self._probe(state)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.probes and self.probe_every is None:
            self._probe(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Add what is known to the line of the training loss, in the trainer's history and for callbacks behind."""
        if logs is None or "loss" not in logs:
            return
        figures = self.figures()
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def report(self, figures: dict[str, float], state: TrainerState) -> None:
        """Log what the probes saw."""
        state.log_history.append({"epoch": state.epoch, "step": state.global_step} | figures)

    def _tell(self, args: TrainingArguments, state: TrainerState, given: dict[str, Any]) -> None:
        self.progress(state.global_step, state.max_steps, epochs_of(args, state, given.get("train_dataloader")))

    def _probe(self, state: TrainerState) -> None:
        device = next(self.tempered.model.parameters()).device
        self.report(self.probe(state.global_step, on_device(self.probe_batch, device)), state)


def epochs_of(args: TrainingArguments, state: TrainerState, loader: Any) -> float | None:
    """How long training is in epochs; None: it is not known how long an epoch is."""
    if args.max_steps <= 0:
        return float(args.num_train_epochs)
    try:
        return float(state.max_steps / math.ceil(len(loader) / args.gradient_accumulation_steps))
    except (TypeError, ZeroDivisionError):
        return None


class TemperMixin:
    """Lets a trainer compute a tempered loss: comparisons of passes, and penalties whatever its loss is computed from.

    It stands before the trainer's class, `class MyTrainer(TemperMixin, Trainer)`, and needs a `TemperCallback` among
    the callbacks, or a model that is tempered already. Evaluation is as without it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        callbacks = list(kwargs.get("callbacks") or ())
        own = next((each for each in callbacks if isinstance(each, TemperCallback)), None)
        if own is None:
            own = TemperCallback()
            callbacks.append(own)
        own.by_trainer = True
        self.companion: TemperCallback = own
        kwargs["callbacks"] = callbacks
        super().__init__(*args, **kwargs)
        own.report = lambda figures, state: self.log(figures)  # type: ignore[method-assign]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The trainer's own, with rates and penalties beside the training loss for every tracker."""
        if "loss" in logs:
            logs = logs | self.companion.figures()
        super().log(logs, start_time)  # type: ignore[misc]

    @property
    def tempered(self) -> Tempered:
        """The handle to the model."""
        return self.companion.tempered

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model, tempered before an optimiser is built."""
        model: nn.Module = super().call_model_init(trial)  # type: ignore[misc]
        self.companion.start(model, self.args)  # type: ignore[attr-defined]
        return model

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The trainer's own loss and what the recipe adds to it, at the trainer's scale."""
        plain: Any = super().compute_loss  # type: ignore[misc]
        if not model.training:
            return plain(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        labels = self._labels(inputs)
        passes: list[tuple[Any, Tensor]] = []

        def forward() -> Any:
            with watch_divisor(num_items_in_batch, self.tempered.control):
                loss, outputs = plain(model, dict(inputs), return_outputs=True, num_items_in_batch=num_items_in_batch)
            passes.append((outputs, loss))
            return outputs

        def loss_of(outputs: Any) -> Tensor:
            return next(loss for each, loss in passes if each is outputs)

        loss = self.tempered.loss(
            forward,
            loss_of,
            counted=self._counted(inputs, labels),
            share=lambda: self._share(labels, num_items_in_batch),
        )
        return (loss, passes[0][0]) if return_outputs else loss

    def _labels(self, inputs: dict[str, Any]) -> Tensor | None:
        """The labels that count, as the trainer counts them."""
        shifted, labels = inputs.get("shift_labels"), inputs.get("labels")
        if isinstance(shifted, Tensor) or not isinstance(labels, Tensor):
            return shifted
        return labels[..., 1:] if predicts_next(self.tempered.model) else labels

    def _counted(self, inputs: dict[str, Any], labels: Tensor | None) -> Tensor | None:
        """Which predictions are compared; None: all."""
        if labels is None or labels.dim() < 2 or labels.is_floating_point():
            return None
        counted = labels.ne(IGNORED)
        if "shift_labels" not in inputs and predicts_next(self.tempered.model):  # the last token predicts nothing
            counted = torch.cat([counted, counted.new_zeros(*counted.shape[:-1], 1)], -1)
        return counted

    def _share(self, labels: Tensor | None, items: Tensor | int | None) -> Tensor | float:
        """The part of an optimiser's step that a batch is, where its loss comes with that factor already.

        Otherwise the trainer divides the whole loss by the number of batches, and what was added with it.
        """
        trainer: Any = self
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = trainer.model_accepts_loss_kwargs and items is not None
            scaled = scaled or trainer.compute_loss_func is not None
        if not scaled:
            return 1.0
        share: Tensor | float = 1.0
        if items is not None and labels is not None and self.tempered.control.divides is not False:
            share = labels.ne(IGNORED).sum() / items
        if items is not None and trainer.args.average_tokens_across_devices and trainer.args.n_gpu <= 1:
            share = share * (trainer.accelerator.num_processes // trainer.get_tp_size())
        return share


class TemperTrainer(TemperMixin, Trainer):
    """A `Trainer` that computes a tempered loss: for consistency, and for losses outside of the model."""
