"""Run an experiment, whole or in parts, and put what was found together: one entry per arm."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from attemper.errors import ParameterError
from attemper.lab.experiments.catalogue import MODELS, Experiment, choose_arms, find_experiment
from attemper.lab.experiments.kept import Kept
from attemper.lab.experiments.runs import IMAGES, ArmRun, run_arm
from attemper.lab.experiments.side_by_side import run_side_by_side
from attemper.lab.experiments.summary import summarise
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.notifications import LogCallback
from attemper.lab.training.check import check_run
from attemper.lab.training.loop import choose_device
from attemper.lab.training.spec import Budget

MOST_SEEDS = 1_000
MOST_JOBS = 64


def run_experiment(
    name: str,
    task: Task,
    *,
    budget: Budget,
    seeds: int = 3,
    arms: Sequence[str] = (),
    only_seeds: Sequence[int] = (),
    models: Mapping[str, str] = MODELS,
    out: Path | None = None,
    device: torch.device | str | None = None,
    jobs: int = 1,
    data: Path | None = None,
    log: LogCallback = lambda line: None,
) -> dict[str, Any]:
    """Train the arms under every seed, look into them, and give plain data.

    arms, only_seeds: the part to run now; nothing: all of it. What is put together is whatever is finished.
    models: what the arms' placeholders stand for; those that are not given are the ones for digits.
    out: where every finished run is kept, and found again by the same command; None: nowhere.
    jobs: runs at a time; more than one are processes of their own, which open the task by its name, from data.
    log: called with a line per finished run, and now and then between.
    """
    experiment = find_experiment(name)
    _check_seeds(seeds, only_seeds)
    _check_jobs(jobs)
    wanted = {arm.name for arm in choose_arms(experiment, arms)}
    plan = [
        ArmRun(name, arm, seed, task.name, budget, {**MODELS, **models})
        for seed in range(seeds)
        for arm in experiment.arms
    ]
    now = [one for one in plan if one.arm.name in wanted and (not only_seeds or one.seed in only_seeds)]
    with _kept(out, name, task) as kept:
        missing = [one for one in now if kept.read(one) is None]
        for arm in dict.fromkeys(one.arm for one in missing):  # all of them before any is trained
            check_run(next(one for one in missing if one.arm == arm).spec(), task)
        done = Counted(missing, len(now), log)
        if jobs == 1 or not missing:
            for one in missing:
                done.finished(one, kept.write(one, run_arm(one, task, kept.working(one), choose_device(device), log)))
        else:
            run_side_by_side(missing, jobs, data, kept, choose_device(device), done.finished)
        found = _all_found(plan, kept)
    if not found:
        raise ParameterError(f"No run of '{name}' is finished.")
    return summarise(experiment, found) | {
        "experiment": name,
        **asked(experiment, task, budget, models),
        "metric": task.primary,
        "images": IMAGES,
        "missing": [one.label for one in plan if one not in found],
    }


def asked(experiment: Experiment, task: Task, budget: Budget, models: Mapping[str, str]) -> dict[str, Any]:
    """The settings that all runs of an experiment have in common."""
    words = dict.fromkeys(arm.model.partition("(")[0] for arm in experiment.arms)
    named = {word: {**MODELS, **models}[word] for word in words}
    return {"task": task.name, "models": named, "budget": budget.to_dict()}


def _check_seeds(seeds: int, only: Sequence[int]) -> None:
    if not 1 <= seeds <= MOST_SEEDS:
        raise ParameterError(f"seeds is {seeds}; it must be from 1 to {MOST_SEEDS:,}.")
    if outside := [seed for seed in only if not 0 <= seed < seeds]:
        raise ParameterError(f"There is no seed {outside[0]}: there are {seeds}, from 0 to {seeds - 1}.")


@contextlib.contextmanager
def _kept(out: Path | None, name: str, task: Task) -> Iterator[Kept]:
    """Context manager: where finished runs are kept; for its length only, where they shall not last."""
    if out is not None:
        yield Kept(out / f"{name}-runs", task.fingerprint)
        return
    with TemporaryDirectory() as folder:
        yield Kept(Path(folder), task.fingerprint)


def _check_jobs(jobs: int) -> None:
    if not 1 <= jobs <= MOST_JOBS:
        raise ParameterError(f"jobs is {jobs}; it must be from 1 to {MOST_JOBS}.")


class Counted:
    """Says after every run how far an experiment is. wanted: how many runs there are, those finished before too."""

    def __init__(self, missing: Sequence[ArmRun], wanted: int, log: LogCallback) -> None:
        self.missing, self.wanted, self.log = len(missing), wanted, log
        self.done = 0
        self.begun = time.perf_counter()
        if before := wanted - len(missing):
            log(f"{before} of {wanted} runs are finished already.")

    def finished(self, one: ArmRun, found: Mapping[str, Any]) -> None:
        self.done += 1
        still = self.missing - self.done
        left = (time.perf_counter() - self.begun) / self.done * still
        score = "diverged" if found["test"] is None else f"{100 * found['test']:.2f} %"
        self.log(
            f"{one.label}: {score}, {found['seconds']:.0f} s ({self.wanted - still} of {self.wanted} runs"
            + (f", about {left / 60:.0f} min left)" if left else ")")
        )


def _all_found(plan: Sequence[ArmRun], kept: Kept) -> dict[ArmRun, dict[str, Any]]:
    """Every finished run: of this command, of those before it, and under seeds beyond those that were asked for."""
    further = sorted({seed for seed in kept.seeds() if all(one.seed != seed for one in plan)})
    first = [one for one in plan if one.seed == plan[0].seed]
    more = [dataclasses.replace(one, seed=seed) for seed in further for one in first]
    return {one: found for one in (*plan, *more) if (found := kept.read(one)) is not None}
