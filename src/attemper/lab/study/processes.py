"""Runs in processes of this machine: one per core, or as many per GPU as its memory has room for."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from attemper.errors import AttemperError
from attemper.lab.errors import DeviceLostError, StudyError
from attemper.lab.study.interrupts import ignore_interrupts, shielded
from attemper.lab.study.live import View
from attemper.lab.study.study import Study
from attemper.lab.study.workers import DeathCounter, WorkerConfig
from attemper.lab.tasks.notifications import Silent, listening
from attemper.lab.threads import cores, share_of_cores
from attemper.lab.training.leaving import exit_code, noting

START: Final = "spawn"
"""How processes begin: anew rather than forked, since torch's threads and CUDA's state do not survive a fork."""
PATIENCE = 25.0
"""Seconds that a worker has to write a checkpoint and leave its run when it is stopped. Schedulers give thirty."""

LOST_DEVICE = 70
"""With what a worker ends that can no longer use its GPU."""
MOST_WORKERS = 1_024
MOST_PER_GPU = 8
"""More processes than that wait for each other on one GPU."""
MARGIN = 1.3
"""Memory that a run is given, over the peak of those that were measured: other recipes, fragmentation."""
CONTEXT = 768 * 1024**2
"""Bytes that CUDA takes per process before anything is computed."""


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
            if value is not None and value > MOST_WORKERS:
                raise StudyError(f"{name} is {value}; one machine runs at most {MOST_WORKERS:,} processes of a study.")
        if self.workers is not None and self.per_gpu is not None:
            raise StudyError("workers and per_gpu both say how many processes there are; give one of them.")

    def pool(self, study: Study, view: View) -> ProcessPool:
        """Worker processes for the missing runs."""
        memory = gpu_memory()
        if self.per_gpu is not None and not memory:
            raise StudyError(f"per_gpu is {self.per_gpu}, and this machine has no GPU; give workers instead.")
        return ProcessPool(study, view, self, memory)

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
    """One process and the connection to it."""

    process: Any
    pipe: Connection

    def read(self) -> list[tuple[str, str]]:
        """Its messages since the last time."""
        messages = []
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                messages.append(self.pipe.recv())
        return messages

    def request_stop(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send("stop")


class ProcessPool:
    """The worker processes of one study on this machine.

    The place of a worker says which GPU it has: place n is on GPU n modulo their number. So a pool that grows or
    shrinks does so on all GPUs alike.
    """

    def __init__(self, study: Study, view: View, how: Processes, memory: list[int]) -> None:
        self._study, self._view, self._how, self._memory = study, view, how, memory
        self._workers: list[Worker] = []
        self._stopping: list[Worker] = []
        self._deaths = DeathCounter(study)
        self._results = -1
        """How many there were when the size was last decided."""
        self._size = 0
        """The most that were at work together; they share the cores."""

    def start(self) -> None:
        self._resize()

    def _resize(self) -> None:
        """Start or stop workers, so that as many are at work as fit by what is known now."""
        results = self._study.results()
        if len(results) == self._results:
            return
        self._results = len(results)
        found = (result.get("timing", {}).get("peak_memory") for result in results.values())
        peaks = [int(peak) for peak in found if isinstance(peak, int | float)]
        room, todo = self._how.size(self._memory, peaks), len(self._study.missing())
        self._size = max(self._size, min(room, todo))
        while len(self._workers) < min(room, todo):
            with shielded():
                self._workers.append(self._start_worker(len(self._workers)))
        while len(self._workers) > room:  # a run has shown that fewer fit: its run keeps a checkpoint
            worker = self._workers.pop()
            worker.request_stop()
            self._stopping.append(worker)

    def _start_worker(self, place: int) -> Worker:
        gpus = len(self._memory)
        device = f"cuda:{place % gpus}" if gpus else None
        config = WorkerConfig.of(self._study, threads=share_of_cores(self._size), device=device)
        context = multiprocessing.get_context(START)
        pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, config), name=f"attemper-worker-{place}")
        process.start()
        theirs.close()
        return Worker(process, pipe)

    def poll(self) -> None:
        for place, worker in enumerate(self._workers):
            for kind, text in worker.read():
                if kind == "fatal":
                    raise StudyError(text)
                self._view.note(text)
            if worker.process.exitcode not in (None, 0):
                self._note_death(worker.process.exitcode)
                worker.pipe.close()
                with shielded():
                    self._workers[place] = self._start_worker(place)
        self._resize()

    def _note_death(self, code: int) -> None:
        stopped = code == exit_code(signal.SIGTERM)
        reason = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        reason = "was told to end by SIGTERM and has left a checkpoint" if stopped else reason
        reason = "can no longer use its GPU" if code == LOST_DEVICE else reason
        self._deaths.count(reason)
        self._view.note(f"a worker {reason}; another one takes its place")

    def stop(self) -> None:
        workers, self._workers, self._stopping = self._workers + self._stopping, [], []
        try:
            for worker in workers:
                worker.request_stop()
            until = time.monotonic() + PATIENCE
            for worker in workers:
                worker.process.join(max(0.0, until - time.monotonic()))
        finally:  # a second Ctrl-C leads here as well
            for worker in workers:
                if worker.process.exitcode is None:
                    self._view.note("a worker did not leave in time and was killed; its last checkpoint holds")
                    worker.process.kill()
                    worker.process.join()
                worker.pipe.close()


def serve(pipe: Connection, config: WorkerConfig) -> None:
    """What a worker process does, from start to end."""
    ignore_interrupts()  # Ctrl-C goes to the whole group; the parent decides what to do
    with noting(signal.SIGTERM) as signals:  # as does what schedulers send; here it also means this worker alone
        torch.set_num_threads(config.threads)
        stop = threading.Event()
        threading.Thread(target=_listen, args=(pipe, stop), daemon=True).start()
        _work(pipe, config, lambda: bool(signals) or stop.is_set())
    if signals:
        sys.exit(exit_code(signals[0]))


def _work(pipe: Connection, config: WorkerConfig, stop: Callable[[], bool]) -> None:
    try:
        with listening(Silent()):  # the parent has opened the same data, and has shown its notes
            study = config.open()
            study.work(stop=stop, device=config.device, log=lambda text: pipe.send(("note", text)))
    except DeviceLostError:
        if not stop():
            sys.exit(LOST_DEVICE)
    except AttemperError as error:
        pipe.send(("fatal", str(error)))
    except Exception:
        pipe.send(("fatal", f"A worker failed outside of any run:\n{traceback.format_exc()}"))


def _listen(pipe: Connection, stop: threading.Event) -> None:
    """Wait for the request to stop. When the parent dies, its end of the pipe closes: then the process ends at once."""
    try:
        pipe.recv()
        stop.set()
    except (EOFError, OSError):
        os._exit(1)
