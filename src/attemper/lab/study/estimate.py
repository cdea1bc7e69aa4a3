"""From a short probe to hours and memory of a whole plan, here and on other numbers of GPUs. Arithmetic only."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attemper.lab.study.plan import Plan
from attemper.lab.study.probing import Measured, Probe, Sizes
from attemper.lab.training.cost import WARM_UP as COST_WARM_UP
from attemper.lab.training.loop import CHECKPOINT_EVERY, CHECKPOINT_SHARE, CHECKPOINT_WITHIN

COST_ROUNDS = 20
"""Steps per recipe with which a study measures what a training step costs, once all runs are done."""


@dataclass(frozen=True)
class RecipeEstimate:
    """One row of a plan."""

    name: str
    runs: int
    milliseconds: float
    """Per batch."""
    images_per_second: float
    seconds: float
    """Of one run."""
    memory: int | None
    """Bytes of GPU memory that a run takes at its peak; None on a CPU."""


@dataclass(frozen=True)
class Scale:
    """The plan on so many workers at a time."""

    gpus: int | None
    """That they share; None: this machine, as it was probed."""
    workers: int
    busy: int
    """Of them, so many have something to do at all: a run is one worker's."""
    seconds: float
    """From the first start to the last result."""


@dataclass(frozen=True)
class Estimate:
    """What a plan will take, as far as a probe can tell."""

    device: str
    recipes: tuple[RecipeEstimate, ...]
    runs: int
    run_seconds: float
    """All runs, one after another."""
    hours: float
    """Of a GPU, or where there is none of a worker: what a scheduler charges for. Runs that share a GPU share them."""
    start: float
    """Seconds until a worker is ready."""
    costs: float
    """Seconds of measuring what a step costs with each recipe, at the end of a study."""
    resident: int
    """Bytes of main memory per worker."""
    here: Scale
    """On this machine, with as many workers as were probed."""
    elsewhere: tuple[Scale, ...]
    """On other numbers of such GPUs."""
    at_most: Scale | None = None
    """Here, if seeds are added until decided and no recipe is before it has all that it may have; else None."""


def estimate(plan: Plan, found: Probe, gpus: Iterable[int] = ()) -> Estimate:
    """Hours and memory of a plan.

    gpus: other numbers of GPUs like the probed one, as many runs on each as were probed side by side.
    """
    seconds = {recipe: run_seconds(plan, found.sizes, each) for recipe, each in found.recipes.items()}
    by_configuration = {
        recipe: seconds[entry.configurations[0]] for entry in plan.recipes for recipe in entry.configurations
    }
    runs = [by_configuration[run.recipe] for run in plan.runs()]
    return Estimate(
        device=found.device,
        recipes=tuple(
            RecipeEstimate(
                name=entry.name,
                runs=len(plan.configurations(entry)) * len(plan.seeds),
                milliseconds=1e3 * found.recipes[entry.configurations[0]].batch,
                images_per_second=found.sizes.batch_size / found.recipes[entry.configurations[0]].batch,
                seconds=seconds[entry.configurations[0]],
                memory=found.recipes[entry.configurations[0]].memory,
            )
            for entry in plan.recipes
        ),
        runs=len(runs),
        run_seconds=sum(runs),
        hours=sum(runs) / 3600 / found.per_gpu,
        start=found.start,
        costs=sum(each.setup + (COST_WARM_UP + COST_ROUNDS) * each.batch for each in found.recipes.values()),
        resident=found.resident,
        here=_scale(runs, None, found.workers, found.start),
        elsewhere=tuple(_scale(runs, number, number * found.per_gpu, found.start) for number in gpus),
        at_most=_at_most(plan, seconds, found),
    )


def _at_most(plan: Plan, seconds: Mapping[str, float], found: Probe) -> Scale | None:
    """The plan with all seeds that may be added, each for one configuration of a row."""
    if plan.max_seeds is None:
        return None
    rows = [(seconds[entry.configurations[0]], len(plan.configurations(entry))) for entry in plan.recipes]
    first, added = len(plan.seeds), plan.max_seeds - len(plan.seeds)
    runs = [each for each, configurations in rows for _ in range(configurations * first + added)]
    return _scale(runs, None, found.workers, found.start)


def _scale(runs: Sequence[float], gpus: int | None, workers: int, start: float) -> Scale:
    return Scale(gpus, workers, min(workers, len(runs)), start + makespan(runs, workers))


def run_seconds(plan: Plan, sizes: Sizes, each: Measured) -> float:
    """How long one run takes.

    Every epoch has its batches, an evaluation on validation and a copy of the weights. A checkpoint is written at the
    end of an epoch, but not more often than every few seconds, and every few minutes inside of one. At the end come the
    test set and some training images.
    """
    epochs = plan.budget.epochs
    epoch = sizes.batches * each.batch + sizes.validation * each.evaluation + each.keeping
    trained = epochs * epoch
    inside = sizes.batches * each.batch // max(CHECKPOINT_WITHIN, each.saving / CHECKPOINT_SHARE)
    checkpoints = min(epochs, 1 + trained / CHECKPOINT_EVERY) + epochs * inside
    end = (sizes.measured + sizes.test) * each.evaluation
    return each.setup + trained + checkpoints * each.saving + end


def makespan(runs: Iterable[float], workers: int) -> float:
    """How long workers take for runs that each begins as soon as it is free, in their order.

    >>> makespan([3, 3, 3, 3], 2), makespan([1, 1, 4], 2), makespan([5], 8)
    (6.0, 5.0, 5.0)
    """
    free = [0.0] * workers
    for seconds in runs:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)
