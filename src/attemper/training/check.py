"""Whether a run can work at all, found out before any training starts."""

from __future__ import annotations

import torch

from attemper.errors import AttemperError, ParameterError
from attemper.evaluation.suites import parse_suites
from attemper.tasks.augment import parse_augmentation
from attemper.tasks.base import Task
from attemper.training.learner import Learner
from attemper.training.randomness import borrowed
from attemper.training.spec import RunSpec

__all__ = ["check_run"]


def check_run(spec: RunSpec, task: Task) -> None:
    """Raise unless the data can be split, and the model can be built, tempered and run forward and backward.

    One step is made on two inputs of noise, on the CPU: a recipe that does not fit raises there at the latest.
    """
    parse_augmentation(spec.budget.augment)
    if spec.evaluate:
        parse_suites(spec.evaluate)
    task.split(spec.seed, spec.budget.validation)
    with borrowed():
        learner = Learner(spec, task.shape, torch.device("cpu"))
        learner.model.train()
        shape = task.shape
        inputs = torch.randn(2, shape.channels, shape.height, shape.width)
        targets = torch.arange(2) % shape.classes
        try:
            learner.learn(inputs, targets)
        except AttemperError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise ParameterError(
                f"'{spec.model}' with '{spec.recipe}' does not run on inputs of {shape.channels} × {shape.height} × "
                f"{shape.width} and of {shape.classes} classes: {error}"
            ) from error
