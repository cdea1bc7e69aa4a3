"""What a run depends on beside its description and its data: weights of others, and source of one's own."""

import dataclasses

from attemper.lab.call_syntax import is_own
from attemper.lab.models.naming import is_pretrained
from attemper.lab.models.own import code_hash
from attemper.lab.tasks.base import Shape, Task
from attemper.lab.training.initial import starting_weights
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.teacher import budget_with_teacher_hash


def with_hashes(spec: RunSpec, task: Task) -> RunSpec:
    """The run with every hash that its key depends on; one that needs none is given back as it is."""
    return dataclasses.replace(spec, budget=budget_with_hashes(spec.budget, spec.model, task.shape))


def budget_with_hashes(budget: Budget, model: str, shape: Shape) -> Budget:
    """The budget with the hashes that are not there yet."""
    budget = budget_with_teacher_hash(budget, shape)
    if budget.init_hash is None and (budget.init is not None or is_pretrained(model)):
        budget = dataclasses.replace(budget, init_hash=starting_weights(budget, model).hash)
    if budget.code_hash is None and is_own(model):
        budget = dataclasses.replace(budget, code_hash=code_hash(model))
    return budget
