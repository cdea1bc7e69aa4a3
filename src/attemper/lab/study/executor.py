"""Working on a study until no run is missing, with processes of this machine or on a Ray cluster."""

import time
from typing import Protocol

from attemper.lab.errors import StoppedError, StudyError
from attemper.lab.study.live import SilentView, View
from attemper.lab.study.locks import check_locks
from attemper.lab.study.processes import Processes
from attemper.lab.study.status import Status, status_of
from attemper.lab.study.study import Study

POLL = 0.25
"""Seconds between two polls of the workers and the folder."""


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
    """The error after Ctrl-C or SIGTERM."""
    done, total = len(study.results()), len(study.runs)
    return StoppedError(
        f"Stopped with {done} of {total} runs done. Nothing is lost: run the same command to go on; runs in hand have "
        "left checkpoints."
    )
