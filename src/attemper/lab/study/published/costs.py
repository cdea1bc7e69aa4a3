"""What a table costs on an H200, from probes that were made there and are stored beside the figures.

A probe is of one model; of another one the time of a batch follows by floating-point operations from the probe that is
nearest by them. The arithmetic from there is that of `attemper plan estimate`.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from attemper.lab.call_syntax import parse_call
from attemper.lab.study.estimate import estimate
from attemper.lab.study.plan import Plan
from attemper.lab.study.probing import Measured, Probe, Sizes
from attemper.lab.study.published.table import Size, Table
from attemper.lab.training.data import MEASURED

FORWARD_SHARE = 1 / 3
"""Of a training step, by operations: the backward pass has twice as many as the forward pass."""
SAME = 0.001
"""Models whose operations differ by less are one: only the last layer has other classes."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One stored probe."""

    name: str
    model: str
    kind: str
    samples_per_second: float
    date: str
    how: str
    whole: bool
    """Whether validation and test are in it."""
    ratios: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """What a plan takes on the machine of the stored probes."""

    gpu_hours: float
    probe: Stored
    scaled: float | None
    """Operations of the plan's model over those of the probe's; None: the probe is of this model."""

    @property
    def text(self) -> str:
        """In a few words, an estimate by operations marked as such."""
        hours = f"{self.gpu_hours:,.1f}" if self.gpu_hours < 10 else f"{self.gpu_hours:,.0f}"
        hours = "under 0.1" if self.gpu_hours < 0.05 else hours
        return f"{hours} GPU-h" + ("" if self.scaled is None else " ~")


@functools.cache
def stored() -> dict[str, Any]:
    """The stored probes, as their file has them."""
    path = resources.files("attemper.lab.study.published").joinpath("data/h200.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def probes() -> tuple[Stored, ...]:
    """The stored probes."""
    return tuple(Stored(**each) for each in stored()["probes"])


def cost_of(table: Table, scale: str = "full") -> Cost | None:
    """What a scale of a table takes on one H200; None where no probe is of such data or such a model.

    >>> from attemper.lab.study.published import find_table
    >>> cost_of(find_table("explicit-cifar10")).probe.name
    'vit-cifar'
    """
    if not table.can_run:
        return None
    size = table.size(scale)
    task = parse_call(size.task)[0]
    model = f"{size.model} @ {task}"
    operations, samples = stored()["forward"], stored()["samples"]
    if model not in operations or task not in samples:
        return None
    nearest = _nearest(model, "images" if task.startswith(("cifar", "folder")) else "sequences")
    scaled = operations[model] / operations[nearest.model]
    runs = size.seeds * len(size.lr)
    hours = 0.0
    for row in table.rows:
        trained = scaled * ratio_of(row.recipe, nearest)
        one = _hours(size, samples[task], nearest, trained, scaled)
        hours += runs * len(row.configurations(size.strengths)) * one
    return Cost(hours, nearest, None if abs(scaled - 1) < SAME else scaled)


def _nearest(model: str, kind: str) -> Stored:
    operations = stored()["forward"]
    fitting = [each for each in probes() if each.kind == kind]
    return min(fitting, key=lambda each: abs(math.log(operations[each.model] / operations[model])))


def _hours(size: Size, samples: list[int], nearest: Stored, trained: float, evaluated: float) -> float:
    """Of one run: the stored probe as one of this size, with `none` in the place of its recipe.

    trained, evaluated: what a batch, and an image in eval mode, take relative to the probe's none.
    """
    budget = {"epochs": size.epochs, **size.budget}
    plan = Plan.from_dict(
        {"task": size.task, "model": size.model, "seeds": 1, "budget": budget, "recipes": ["none"], "lr": [size.lr[0]]}
    )
    pool, test = samples
    validation = round(pool * plan.budget.validation)
    train, batch = pool - validation, plan.budget.batch_size
    sizes = Sizes(
        batches=math.ceil(train / batch),
        batch_size=batch,
        validation=validation,
        measured=min(train, MEASURED),
        test=test,
    )
    each = Measured(
        setup=0.0,
        batch=batch * trained / nearest.samples_per_second,
        evaluation=0.0 if nearest.whole else FORWARD_SHARE * evaluated / nearest.samples_per_second,
        keeping=0.0,
        saving=0.0,
        memory=None,
    )
    return estimate(plan, Probe(0.0, sizes, {"none": each}, resident=0, workers=1, device=stored()["device"])).hours


def ratio_of(recipe: str, nearest: Stored) -> float:
    """How much longer than none a recipe takes by a probe, method by method; what was not measured counts as nothing.

    Methods are read by name alone: to build them all, as `parse` does, takes seconds for some.

    >>> ratio_of("cb + blur", probes()[1]) == 1.19 * 1.141
    True
    """
    passes: dict[str, float] = stored()["passes"]
    names = [part.partition("(")[0].strip() for part in recipe.split(" + ")]
    return math.prod(nearest.ratios.get(name, passes.get(name, 1.0)) for name in names)


def basis(cost: Cost) -> str:
    """On what an estimate rests, in a sentence."""
    scaled = "" if cost.scaled is None else f", times {cost.scaled:.2g} by the operations of a forward pass"
    machine = f"{stored()['device']}, torch {stored()['versions']['torch']}, {cost.probe.date}"
    return f"from {cost.probe.name}{scaled}. {machine}: {cost.probe.how}"
