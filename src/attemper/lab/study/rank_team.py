"""A study under `torchrun` or `accelerate launch`: all ranks train every run together.

The main rank claims runs, stores results, measures costs and summarises. The others do nothing but train what it names.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attemper.lab.errors import StudyError
from attemper.lab.study.engine import Engine, Progress, Task
from attemper.lab.study.executor import Executor, stopped
from attemper.lab.study.live import View
from attemper.lab.study.locks import check_locks
from attemper.lab.study.status import status_of
from attemper.lab.study.study import Study
from attemper.lab.study.summary import Summary
from attemper.lab.training.leaving import Leave
from attemper.lab.training.ranks import Ranks
from attemper.lab.training.spec import Budget, RunSpec

REFRESH = 0.25
"""Seconds between two updates of the view."""

Job = tuple[RunSpec, Path]
"""A run, and the folder that its checkpoints go to."""


class RankTeamEngine:
    """The main rank's engine: before it performs a run, it sends the run to the others."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self.engine, self.ranks = engine, ranks

    def open_task(self, text: str, root: Path | None) -> Task:
        return self.engine.open_task(text, root)

    def with_hashes(self, budget: Budget, task: Task, model: str) -> Budget:
        return self.engine.with_hashes(budget, task, model)

    def check(self, spec: RunSpec, task: Task) -> None:
        self.engine.check(spec, task)

    def run(self, spec: RunSpec, task: Task, *, folder: Path, progress: Progress, device: str | None) -> dict[str, Any]:
        job = self.ranks.from_main(lambda: (spec, folder))
        with regrouping(self.ranks):
            return perform(self.engine, job, task, progress, device)

    def costs(self, recipes: Sequence[str], task: Task, model: str, budget: Budget) -> dict[str, dict[str, Any]]:
        return self.engine.costs(recipes, task, model, budget)


def follow(engine: Engine, text: str, root: Path | None, ranks: Ranks) -> Summary:
    """What every rank but the main one does: train the runs that the main rank sends, until it sends the summary.

    A run that fails is the main rank's to record; this one stands by for the next.
    """
    task = engine.open_task(text, root)
    while not isinstance(received := ranks.from_main(nothing), dict):
        with contextlib.suppress(Exception, Leave), regrouping(ranks):
            perform(engine, received, task, progress=lambda event: None, device=None)
    return received


def nothing() -> Any:
    """What a rank other than the main one sends."""


def perform(engine: Engine, job: Job, task: Task, progress: Progress, device: str | None) -> dict[str, Any]:
    """This rank's part of a run."""
    spec, folder = job
    return engine.run(spec, task, folder=folder, progress=progress, device=device)


@contextlib.contextmanager
def regrouping(ranks: Ranks) -> Iterator[None]:
    """Context manager: a run inside it fails on all ranks if it fails on one; all are then ready for the next."""
    try:
        with ranks.failing_together():
            yield
    except (KeyboardInterrupt, SystemExit, Leave):
        raise
    except BaseException:
        ranks.form()
        raise


def send_summary(ranks: Ranks, summary: Summary) -> Summary:
    """Send the summary to the other ranks, which ends `follow` there."""
    return ranks.from_main(lambda: summary)


def work_together(
    study: Study,
    view: View,
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Do whatever is missing of a study, run by run, with all ranks, until `stop` says so."""
    if workers is not None or executor is not None:
        asked = getattr(executor, "workers", workers)
        given = "an executor was given" if asked is None else f"workers is {asked}"
        raise StudyError(f"{given}; under torchrun or accelerate launch all processes train each run.")
    for note in study.prepare():
        view.note(note)
    check_locks(study.claims.folder)  # other teams may work on the same folder
    with showing(study, view):
        study.work(stop=stop, log=view.note)
    if stop() and study.missing():
        raise stopped(study)
    study.sweep()
    view.show(status_of(study))


@contextlib.contextmanager
def showing(study: Study, view: View) -> Iterator[None]:
    """Context manager: inside it, the view shows a few times a second how far the study is."""
    over = threading.Event()

    def show() -> None:
        while not over.wait(REFRESH):
            view.show(status_of(study))

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
