"""Runs of an experiment side by side, each in a process of its own: small networks leave most of a GPU idle."""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from attemper.lab.experiments.kept import Kept
from attemper.lab.experiments.runs import ArmRun, run_arm
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.registry import open_task
from attemper.lab.threads import share_of_cores

_task: Task | None = None
"""What the runs of this process are on: opened once, not with every run."""

Finished = Callable[[ArmRun, Mapping[str, Any]], None]


def run_side_by_side(
    runs: Sequence[ArmRun], jobs: int, data: Path | None, kept: Kept, device: torch.device, finished: Finished
) -> None:
    """Do all runs, `jobs` at a time, and call `finished` after each. The first error ends what has not begun.

    data: the folder that their task is opened from.
    """
    spawned = multiprocessing.get_context("spawn")  # neither torch's threads nor CUDA survive a fork
    begin = runs[0].task, data, share_of_cores(jobs)
    with ProcessPoolExecutor(min(jobs, len(runs)), spawned, _begin, begin) as pool:
        waiting: dict[Future[dict[str, Any]], ArmRun] = {pool.submit(_run, one, kept, device): one for one in runs}
        try:
            while waiting:
                for each in wait(waiting, return_when=FIRST_COMPLETED).done:
                    finished(waiting.pop(each), each.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin(task: str, data: Path | None, threads: int) -> None:
    global _task  # noqa: PLW0603
    _task = open_task(task, data)
    torch.set_num_threads(threads)


def _run(one: ArmRun, kept: Kept, device: torch.device) -> dict[str, Any]:
    assert _task is not None
    return kept.write(one, run_arm(one, _task, kept.working(one), device, lambda line: None))
