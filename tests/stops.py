"""Trainings that end before a batch is learnt from: by an error, or because the process is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from torch import Tensor

from attemper.lab.training.learner import Learner

Learn = Callable[[Learner, Tensor, Tensor], None]


class StopError(Exception):
    pass


def learning_until(batch: int, end: Callable[[], None]) -> Learn:
    """`Learner.learn`, which calls `end` before the so many-th batch, counted from now."""
    learn, begun = Learner.learn, [0]

    def counting(self: Learner, inputs: Tensor, targets: Tensor) -> None:
        begun[0] += 1
        if begun[0] == batch:
            end()
        learn(self, inputs, targets)

    return counting


def stop_at(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The so many-th batch raises `StopError`."""

    def end() -> None:
        raise StopError

    monkeypatch.setattr(Learner, "learn", learning_until(batch, end))


def die_at(batch: int) -> None:
    """Have this process killed when it begins its so many-th batch."""
    Learner.learn = learning_until(batch, lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[method-assign]
