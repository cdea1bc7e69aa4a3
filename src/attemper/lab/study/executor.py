"""Working on a study until no run is missing, with processes of this machine or on a Ray cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from attemper.lab.errors import StoppedError, StudyError
from attemper.lab.study.engine import Engine
from attemper.lab.study.live import SilentView, View
from attemper.lab.study.locks import check_locks
from attemper.lab.study.plan import Plan
from attemper.lab.study.settings import Settings
from attemper.lab.study.status import Status, status_of
from attemper.lab.study.study import Study

__all__ = ["MOST_DEATHS", "DeathCounter", "Executor", "Pool", "WorkerConfig", "stopped", "work"]

POLL = 0.25
"""Seconds between two polls of the workers and the folder."""
MOST_DEATHS = 10
"""So many workers may die in a row without anything having come of it."""


class Pool(Protocol):
    """A pool of workers on one study. All they know of each other is what lies in its folder."""

    def start(self) -> None:
        """Start the workers."""
        ...

    def poll(self) -> None:
        """Pass their messages on to the view, and replace workers that died; called a few times a second."""
        ...

    def stop(self) -> None:
        """Stop all workers; runs that are not finished keep their checkpoints. Safe to call twice."""
        ...


class Executor(Protocol):
    """Where runs are done: `processes.Processes` or `ray_executor.RayCluster`."""

    def pool(self, study: Study, view: View) -> Pool:
        """A pool for the missing runs; raises if there can be none, before anything is written.

        view: shows the workers' messages.
        """
        ...


def work(
    study: Study, *, workers: int | None = None, view: View | None = None, executor: Executor | None = None
) -> Status:
    """Do the missing runs, and return how far the study is.

    workers: how many processes of this machine; none: as many as it has room for.
    executor: does the runs in their place, such as `RayCluster()`.

    A run that fails, or whose process dies, is tried again; what fails too often is given up, and the rest goes on.
    Ctrl-C stops the workers cleanly and raises `StoppedError`. Other processes, here or on other machines, may work
    on the same folder at the same time; their runs are waited for.
    """
    from attemper.lab.study.processes import Processes

    if executor is not None and workers is not None:
        raise StudyError("workers counts processes of this machine; an executor starts workers of its own.")
    executor = executor or Processes(workers)
    view = view or SilentView()
    pool = executor.pool(study, view)
    try:
        for note in study.prepare():
            view.note(note)
        check_locks(study.claims.folder)
        pool.start()
        while study.missing():
            pool.poll()
            view.show(status_of(study))
            time.sleep(POLL)
        pool.poll()
    except KeyboardInterrupt:
        pool.stop()
        raise stopped(study) from None
    finally:
        pool.stop()
    study.sweep()
    status = status_of(study)
    view.show(status)
    return status


def stopped(study: Study) -> StoppedError:
    """The error after Ctrl-C."""
    done, total = len(study.results()), len(study.runs)
    return StoppedError(f"Stopped with {done} of {total} runs done. Nothing is lost: run the same command to go on.")


@dataclass(frozen=True)
class WorkerConfig:
    """Everything that a worker needs to open the study, in whatever process or machine it is."""

    folder: Path
    plan: Plan
    root: Path | None
    engine: Engine
    settings: Settings
    stale_after: float
    attempts: int
    threads: int
    device: str | None

    @classmethod
    def of(cls, study: Study, *, threads: int, device: str | None) -> WorkerConfig:
        """The configuration of a worker on this study."""
        return cls(
            folder=study.folder.absolute(),
            plan=study.plan,
            root=study.root,
            engine=study.engine,
            settings=study.settings,
            stale_after=study.claims.stale_after,
            attempts=study.attempts,
            threads=threads,
            device=device,
        )

    def open(self) -> Study:
        """The study, opened in the worker."""
        return Study(
            self.folder,
            self.plan,
            self.root,
            engine=self.engine,
            settings=self.settings,
            change_plan=True,
            stale_after=self.stale_after,
            attempts=self.attempts,
        )


class DeathCounter:
    """Counts workers that die one after another while the study gets nowhere."""

    def __init__(self, study: Study) -> None:
        self._study, self._count, self._state = study, 0, (0, 0)

    def count(self, reason: str) -> None:
        """One more; raises when there is no point in going on. reason: such as 'was killed by signal 9'."""
        state = (len(self._study.results()), sum(self._study.store.attempts().values()))
        self._count = self._count + 1 if state == self._state else 1
        self._state = state
        if self._count > MOST_DEATHS:
            raise StudyError(f"{self._count} workers died one after another without a run done; the last {reason}.")
