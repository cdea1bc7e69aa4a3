"""Evaluating runs: at their end, on the one reading of the test set, or later from their folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attemper
from attemper.errors import ParameterError
from attemper.lab.errors import DataError
from attemper.lab.evaluation.measure import evaluate, gap
from attemper.lab.evaluation.suites import parse_suites
from attemper.lab.models.registry import build_model
from attemper.lab.models.weights import load_weights
from attemper.lab.tasks.base import InputShape, Task
from attemper.lab.tasks.classification import Metrics
from attemper.lab.tasks.own.task import OwnImages, OwnTask
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.source import Source
from attemper.lab.training.data import RunData
from attemper.lab.training.learner import Learner
from attemper.lab.training.spec import RunSpec
from attemper.lab.training.weights import read_run


def normalisation(task: Task) -> Callable[[Tensor], Tensor]:
    """From pixels in [0, 1] to what the task's models take."""
    return lambda pixels: task.to_input(255 * pixels)


def check_suites(spec: RunSpec, task: Task) -> None:
    """Raise unless the suites that a run asks for exist, and its task has what they need."""
    if not spec.evaluate:
        return
    parse_suites(spec.evaluate)
    if not isinstance(task.shape, InputShape):
        raise ParameterError(f"evaluate is {','.join(spec.evaluate)!r}; these suites need images, not '{task.name}'.")
    if isinstance(task, OwnTask) and not isinstance(task, OwnImages):
        raise ParameterError(
            f"evaluate is {','.join(spec.evaluate)!r}; these suites need images in bytes, and '{task.name}' has "
            "numbers, whose range they do not know. Give uint8 images."
        )


def examine(
    learner: Learner, task: Task, source: Source, spec: RunSpec, train: Metrics, alive: Callable[[], None]
) -> tuple[Metrics, dict[str, Any]]:
    """The metrics that every run has, and the suites of this one, from one reading of the source.

    train: the metrics on the training images. alive: called now and then, so that the run can be stopped.
    """
    with learner.evaluating() as model:
        found = evaluate(
            model,
            source,
            normalise=normalisation(task),
            suites=spec.evaluate,
            seed=spec.seed,
            progress=lambda share: alive(),
        )
    found["gap"] = gap({"accuracy": train["accuracy"], "nll": train["loss"]}, found)
    return {"accuracy": found["accuracy"], "loss": found["nll"]}, found


@dataclass(frozen=True)
class FinishedRun:
    """What a run left behind, ready to be evaluated."""

    spec: RunSpec
    task: Task
    model: nn.Module
    """Tempered with the run's recipe, with the chosen weights, in eval mode."""

    @property
    def images(self) -> InputShape:
        """The images that the model takes; a run on anything else cannot be evaluated here."""
        shape = self.task.shape
        if not isinstance(shape, InputShape):
            raise ParameterError(f"'{self.task.name}' has no images; only runs on images are evaluated.")
        return shape

    @property
    def normalise(self) -> Callable[[Tensor], Tensor]:
        return normalisation(self.task)

    def training_part(self) -> Source:
        """The training images that the generalisation gap is measured on, the same as in the run itself."""
        device = next(self.model.parameters()).device
        return RunData(self.spec, self.task, device).measured_train()


def load_run(folder: str | Path, *, root: Path | None = None, device: torch.device | str | None = None) -> FinishedRun:
    """The model of a finished run, from the folder that was given to `attemper train`.

    root: where this machine keeps its data; it must be the data that the run saw.
    """
    folder = Path(folder)
    weights, spec, fingerprint = read_run(folder)
    task = open_task(spec.task, root)
    if task.fingerprint != fingerprint:
        raise DataError(
            f"The data of {spec.task} is not what the run in '{folder}' was trained on (its fingerprint was "
            f"{fingerprint} and is {task.fingerprint})."
        )
    model = build_model(spec.model, task.shape, trained=False)
    attemper.apply(model, spec.recipe)
    load_weights(model, weights, of=f"{spec.model} with '{spec.recipe}'")
    return FinishedRun(spec, task, model.to(device or "cpu").eval())
