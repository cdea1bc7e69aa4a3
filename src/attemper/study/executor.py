"""Working on a study with several processes of this machine, and noticing when one of them dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from attemper.errors import AttemperError
from attemper.study.engine import Engine
from attemper.study.errors import StoppedError, StudyError
from attemper.study.live import SilentView, View
from attemper.study.plan import Plan
from attemper.study.status import Status, status_of
from attemper.study.study import Study
from attemper.tasks.telling import Nobody, listening

__all__ = ["default_workers", "work"]

LOOK = 0.25
"""Seconds between two looks at the workers and the folder."""
PATIENCE = 10.0
"""Seconds that a worker has to leave its run when it is asked to."""
MOST_DEATHS = 10
"""So many workers may die in a row without anything having come of it."""


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers() -> int:
    """One process per GPU, or per core where there is none."""
    return torch.cuda.device_count() or cores()


def work(study: Study, *, workers: int | None = None, view: View | None = None) -> Status:
    """Do whatever is missing with so many processes, and say how far it came.

    A run that fails, or whose process dies, is tried again; what fails too often is given up, and the rest goes on.
    Ctrl-C stops the processes cleanly and raises `StoppedError`. Other processes, here or on other machines, may work
    on the same folder at the same time; their runs are waited for.
    """
    if workers is not None and workers < 1:
        raise StudyError(f"workers is {workers}; at least 1 is needed.")
    view = view or SilentView()
    for note in study.prepare():
        view.note(note)
    todo = len(study.missing())
    crew = Crew(study, min(workers or default_workers(), todo), view)
    try:
        crew.start()
        while study.missing():
            crew.look()
            view.show(status_of(study))
            time.sleep(LOOK)
        crew.look()
    except KeyboardInterrupt:
        crew.stop()
        raise stopped(study) from None
    finally:
        crew.stop()
    study.sweep()
    status = status_of(study)
    view.show(status)
    return status


def stopped(study: Study) -> StoppedError:
    """What to say after Ctrl-C."""
    done, total = len(study.results()), len(study.runs)
    return StoppedError(f"Stopped with {done} of {total} runs done. Nothing is lost: run the same command to go on.")


@dataclass(frozen=True)
class Orders:
    """What a worker process needs to know."""

    folder: Path
    plan: Plan
    root: Path | None
    engine: Engine
    stale_after: float
    attempts: int
    threads: int
    device: str | None


@dataclass
class Worker:
    """One process and the line to it."""

    process: Any
    line: Connection

    def read(self) -> list[tuple[str, str]]:
        """What it has said since the last time."""
        said = []
        with contextlib.suppress(EOFError, OSError):
            while self.line.poll():
                said.append(self.line.recv())
        return said


class Crew:
    """The worker processes of one study on this machine."""

    def __init__(self, study: Study, size: int, view: View) -> None:
        self._study, self._size, self._view = study, size, view
        self._workers: list[Worker] = []
        self._deaths, self._state = 0, (0, 0)

    def start(self) -> None:
        self._workers = [self._hire(index) for index in range(self._size)]

    def _hire(self, index: int) -> Worker:
        study, gpus = self._study, torch.cuda.device_count()
        orders = Orders(
            folder=study.folder,
            plan=study.plan,
            root=study.root,
            engine=study.engine,
            stale_after=study.claims.stale_after,
            attempts=study.attempts,
            threads=max(1, cores() // self._size),
            device=f"cuda:{index % gpus}" if gpus else None,
        )
        # Started anew rather than forked: torch's threads and CUDA's state do not survive a fork.
        context = multiprocessing.get_context("spawn")
        line, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, orders), name=f"attemper-worker-{index}")
        process.start()
        theirs.close()
        return Worker(process, line)

    def look(self) -> None:
        """Pass on what the workers say, and replace those that died."""
        for index, worker in enumerate(self._workers):
            for kind, text in worker.read():
                if kind == "fatal":
                    raise StudyError(text)
                self._view.note(text)
            if worker.process.exitcode not in (None, 0):
                self._count_death(worker.process.exitcode)
                worker.line.close()
                self._workers[index] = self._hire(index)

    def _count_death(self, code: int) -> None:
        state = (len(self._study.results()), sum(self._study.store.attempts().values()))
        self._deaths = self._deaths + 1 if state == self._state else 1
        self._state = state
        reason = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if self._deaths > MOST_DEATHS:
            raise StudyError(f"{self._deaths} workers died one after another without a run done; the last {reason}.")
        self._view.note(f"a worker {reason}; another one takes its place")

    def stop(self) -> None:
        """Ask everybody to leave, and see to it that they do."""
        crew, self._workers = self._workers, []
        try:
            for worker in crew:
                with contextlib.suppress(OSError):
                    worker.line.send("stop")
            until = time.monotonic() + PATIENCE
            for worker in crew:
                worker.process.join(max(0.0, until - time.monotonic()))
        finally:  # a second Ctrl-C leads here as well
            for worker in crew:
                if worker.process.exitcode is None:
                    worker.process.kill()
                    worker.process.join()
                worker.line.close()


def serve(line: Connection, orders: Orders) -> None:
    """The whole life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent tells us what to do
    torch.set_num_threads(orders.threads)
    stop = threading.Event()
    threading.Thread(target=_listen, args=(line, stop), daemon=True).start()
    try:
        study = Study(
            orders.folder,
            orders.plan,
            orders.root,
            engine=orders.engine,
            change_plan=True,
            stale_after=orders.stale_after,
            attempts=orders.attempts,
        )
        with listening(Nobody()):  # whoever sent us has opened the same data, and has told about it
            study.work(stop=stop.is_set, device=orders.device, say=lambda text: line.send(("note", text)))
    except AttemperError as error:
        line.send(("fatal", str(error)))
    except Exception:
        line.send(("fatal", f"A worker failed outside of any run:\n{traceback.format_exc()}"))


def _listen(line: Connection, stop: threading.Event) -> None:
    """Hear when to stop; a parent that is gone cannot say so, but its end of the line closes."""
    try:
        line.recv()
        stop.set()
    except (EOFError, OSError):
        os._exit(1)
