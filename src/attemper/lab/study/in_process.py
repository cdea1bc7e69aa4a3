"""Runs one after another in this very process: for models and data that no other process could import."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from attemper.lab.study.live import View
from attemper.lab.study.rank_team import showing
from attemper.lab.study.study import Study
from attemper.lab.training.leaving import noting


@dataclass(frozen=True)
class InProcess:
    """Does the runs of a study here. device: such as 'cuda:1'; none: a GPU where there is one."""

    device: str | None = None

    def pool(self, study: Study, view: View) -> OneWorker:
        """This process."""
        return OneWorker(study, view, self.device)


class OneWorker:
    """This process as the only worker of a study. Ctrl-C ends a run after a checkpoint."""

    def __init__(self, study: Study, view: View, device: str | None) -> None:
        self._study, self._view, self._device = study, view, device

    def start(self) -> None: ...

    def poll(self) -> None:
        """Do all that is missing."""
        signals: list[int] = []
        with showing(self._study, self._view), _noting_interrupts(signals):
            self._study.work(stop=lambda: bool(signals), device=self._device, log=self._view.note)
        if signals:
            raise KeyboardInterrupt

    def stop(self) -> None: ...


def _noting_interrupts(signals: list[int]) -> AbstractContextManager[Any]:
    """Signals reach the main thread alone; elsewhere, whoever started this one sees to them."""
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return noting(signal.SIGINT, into=signals)
