"""Whether a run can work at all, found out before any training starts."""

import dataclasses

import torch

from attemper.errors import AttemperError, ParameterError
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.notifications import note
from attemper.lab.training.learner import Learner
from attemper.lab.training.randomness import preserved_random_state
from attemper.lab.training.spec import RunSpec


def check_run(spec: RunSpec, task: Task) -> None:
    """Raise unless the data can be split, and the model can be built, tempered and run forward and backward.

    One step is made on two inputs of noise, on the CPU: a recipe that does not fit raises there at the latest.
    """
    task.augmentation(spec.budget.augment)
    task.split(spec.seed, spec.budget.validation)
    plain = dataclasses.replace(spec.budget, compile=False, precision="float32")  # neither says what fits
    with preserved_random_state():
        learner = Learner(dataclasses.replace(spec, budget=plain), task, torch.device("cpu"))
        if learner.start is not None:
            note(str(learner.start))
        learner.to_training()
        learner.tempered.progress(0.0, spec.budget.epochs)
        inputs, targets = task.shape.example(2)
        try:
            learner.learn(inputs, targets)
        except AttemperError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:  # whatever a model checks by
            raise ParameterError(
                f"'{spec.model}' with '{spec.recipe}' does not run on inputs of {task.shape}: {error}"
            ) from error
