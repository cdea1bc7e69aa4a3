"""TensorBoard: one folder of event files per run, `tensorboard --logdir` shows them side by side."""

import re
from collections.abc import Mapping
from typing import Any

from attemper.lab.tracking.base import TrackedRun

FLUSH = 10
"""Seconds after which curves are on disk at the latest."""


class TensorBoard:
    """Writes scalars, and the run's configuration as a table of text, under `tensorboard/` of the study's folder."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make: Any = SummaryWriter
        self._step = 0

    def start(self, run: TrackedRun, step: int) -> None:
        folder = run.folder / "tensorboard" / f"{readable(run.name)}-{run.key[:6]}"
        resumed = folder.exists()
        # purge_step hides what an earlier process logged beyond the checkpoint that the run goes on from.
        self._writer = self._make(str(folder), purge_step=step if resumed else None, flush_secs=FLUSH)
        if not resumed:
            self._writer.add_text("run", table(run.config), 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, values: Mapping[str, float]) -> None:
        self.log(values, self._step)
        self._writer.close()


def readable(name: str) -> str:
    """A run's name as a folder's.

    >>> readable("dropkey(0.1, schedule=decreasing) + cb, seed 3")
    'dropkey-0.1-schedule-decreasing-cb-seed-3'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[:100]


def table(config: Mapping[str, Any]) -> str:
    """The configuration in Markdown."""
    rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in config.items()]
    return "\n".join(["| | |", "|---|---|", *rows])
