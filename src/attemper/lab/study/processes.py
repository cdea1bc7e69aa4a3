"""Runs in processes of this machine: one per core, or as many per GPU as its memory has room for."""

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
from typing import Any, Final

import torch

from attemper.errors import AttemperError
from attemper.lab.errors import StudyError
from attemper.lab.study.executor import Deaths, Orders
from attemper.lab.study.live import View
from attemper.lab.study.study import Study
from attemper.lab.tasks.notifications import Nobody, listening

__all__ = ["Processes", "cores", "gpu_memory", "runs_per_gpu"]

START: Final = "spawn"
"""How processes begin: anew rather than forked, since torch's threads and CUDA's state do not survive a fork."""
PATIENCE = 10.0
"""Seconds that a worker has to leave its run when it is asked to."""

MOST_PER_GPU = 8
"""More processes than that wait for each other on one GPU."""
MARGIN = 1.3
"""Memory that a run is given, over the peak of those that were measured: other recipes, fragmentation."""
CONTEXT = 768 * 1024**2
"""Bytes that CUDA takes per process before anything is computed."""


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_memory() -> list[int]:
    """Bytes of every GPU of this machine."""
    return [int(torch.cuda.get_device_properties(gpu).total_memory) for gpu in range(torch.cuda.device_count())]


def runs_per_gpu(peak: int, memory: int, most: int = MOST_PER_GPU) -> int:
    """How many runs of so large a peak fit on a GPU side by side, one at least.

    >>> runs_per_gpu(peak=2 * 1024**3, memory=16 * 1024**3)
    4
    """
    return max(1, min(most, int(0.95 * memory / (MARGIN * peak + CONTEXT))))


@dataclass(frozen=True)
class Processes:
    """Does the runs of a study in processes of this machine.

    workers: how many; none: one per core, or on GPUs `per_gpu` on each.
    per_gpu: runs side by side on one GPU; none: one, until the first run has shown what it takes, then as many as fit.
    """

    workers: int | None = None
    per_gpu: int | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "per_gpu"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StudyError(f"{name} is {value}; at least 1 is needed.")
        if self.workers is not None and self.per_gpu is not None:
            raise StudyError("workers and per_gpu both say how many processes there are; give one of them.")

    def crew(self, study: Study, view: View) -> ProcessCrew:
        """Worker processes for whatever is missing."""
        memory = gpu_memory()
        if self.per_gpu is not None and not memory:
            raise StudyError(f"per_gpu is {self.per_gpu}, and this machine has no GPU; say how many workers instead.")
        return ProcessCrew(study, view, self, memory)

    def size(self, memory: list[int], peaks: list[int]) -> int:
        """How many processes there shall be.

        memory: bytes of every GPU. peaks: bytes that finished runs took of one.
        """
        if self.workers is not None:
            return self.workers
        if not memory:
            return cores()
        if self.per_gpu is not None:
            return self.per_gpu * len(memory)
        if not peaks:
            return len(memory)
        most = max(1, min(MOST_PER_GPU, cores() // len(memory)))  # every process needs a core that feeds its GPU
        return len(memory) * runs_per_gpu(max(peaks), min(memory), most)


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

    def ask_to_leave(self) -> None:
        with contextlib.suppress(OSError):
            self.line.send("stop")


class ProcessCrew:
    """The worker processes of one study on this machine.

    The place of a worker says which GPU it has: place n is on GPU n modulo their number. So a crew that grows or
    shrinks does so on all GPUs alike.
    """

    def __init__(self, study: Study, view: View, how: Processes, memory: list[int]) -> None:
        self._study, self._view, self._how, self._memory = study, view, how, memory
        self._workers: list[Worker] = []
        self._leaving: list[Worker] = []
        self._deaths = Deaths(study)
        self._results = -1
        """When the size was last thought about."""
        self._size = 0
        """The most that were at work together; they share the cores."""

    def start(self) -> None:
        self._resize()

    def _resize(self) -> None:
        """Hire and dismiss, so that as many are at work as fit by what is known now."""
        results = self._study.results()
        if len(results) == self._results:
            return
        self._results = len(results)
        found = (result.get("timing", {}).get("peak_memory") for result in results.values())
        peaks = [int(peak) for peak in found if isinstance(peak, int | float)]
        room, todo = self._how.size(self._memory, peaks), len(self._study.missing())
        self._size = max(self._size, min(room, todo))
        while len(self._workers) < min(room, todo):
            self._workers.append(self._hire(len(self._workers)))
        while len(self._workers) > room:  # a run has shown that fewer fit: whoever leaves keeps a checkpoint
            worker = self._workers.pop()
            worker.ask_to_leave()
            self._leaving.append(worker)

    def _hire(self, place: int) -> Worker:
        gpus = len(self._memory)
        orders = Orders.of(
            self._study,
            threads=max(1, cores() // self._size),
            device=f"cuda:{place % gpus}" if gpus else None,
        )
        context = multiprocessing.get_context(START)
        line, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, orders), name=f"attemper-worker-{place}")
        process.start()
        theirs.close()
        return Worker(process, line)

    def look(self) -> None:
        for place, worker in enumerate(self._workers):
            for kind, text in worker.read():
                if kind == "fatal":
                    raise StudyError(text)
                self._view.note(text)
            if worker.process.exitcode not in (None, 0):
                self._note_death(worker.process.exitcode)
                worker.line.close()
                self._workers[place] = self._hire(place)
        self._resize()

    def _note_death(self, code: int) -> None:
        reason = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._deaths.count(reason)
        self._view.note(f"a worker {reason}; another one takes its place")

    def stop(self) -> None:
        crew, self._workers, self._leaving = self._workers + self._leaving, [], []
        try:
            for worker in crew:
                worker.ask_to_leave()
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
        with listening(Nobody()):  # whoever sent us has opened the same data, and has told about it
            study = orders.open()
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
