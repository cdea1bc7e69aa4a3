"""Whoever is told to leave writes a checkpoint first, says so, and ends with the code of the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attemper.lab.errors import StoppedError
from attemper.lab.study.executor import work
from attemper.lab.study.status import status_of
from attemper.lab.study.study import Study
from attemper.lab.tasks.registry import open_task
from attemper.lab.training import loop
from attemper.lab.training.checkpoint import CHECKPOINT, load_checkpoint
from attemper.lab.training.leaving import Leave, ending_as, interrupted_by, noting
from attemper.lab.training.loop import run
from attemper.lab.training.ranks import joined
from attemper.lab.training.spec import Budget, RunSpec
from endings import assert_same_end, timeless
from study_fakes import FakeEngine, make_plan
from study_runs import Recorder, worked
from teams import team

pytestmark = pytest.mark.usefixtures("quick_workers", "one_thread")

TASK = "digits(train=60, test=30)"
MODEL = "vit-digits(depth=1, width=16, heads=2, mlp=16)"
EVERYTHING = {"ema": 0.9, "accumulate": 2, "batch_size": 5, "augment": "crop-flip(1)+mixup"}


def spec(**budget: Any) -> RunSpec:
    chosen = Budget(**{"epochs": 2, "lr": 3e-3, "warmup_epochs": 1, **EVERYTHING, **budget})
    return RunSpec(task=TASK, model=MODEL, recipe="dropkey(0.2) + droppath(0.1)", seed=3, budget=chosen)


def leaving_at(number: int) -> Callable[[dict[str, Any]], None]:
    """A progress callback that wants to leave at its so many-th event."""
    left = [number]

    def progress(event: dict[str, Any]) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Leave

    return progress


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event at every batch, of training and of measuring; checkpoints at no other time than when a run is left."""
    monkeypatch.setattr(loop, "REPORT_EVERY", -1.0)
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 1e9)


# ----------------------------------------------------------------------------------------------------------------- runs
def test_a_run_left_at_any_moment_ends_with_the_same_bits(tmp_path: Path, reports: None) -> None:
    task, chosen = open_task(TASK), spec(epochs=1)
    whole = run(chosen, task, folder=tmp_path / "whole")
    places = []
    for number in range(1, 100, 2):
        try:
            run(chosen, task, folder=tmp_path / str(number), progress=leaving_at(number))
            break
        except Leave as leave:
            places.append(leave.place)
        torch.manual_seed(number)  # another process would start from other random numbers
        assert timeless(run(chosen, task, folder=tmp_path / str(number))) == timeless(whole)
        assert_same_end(tmp_path / str(number), tmp_path / "whole")
    assert {"batch 2 of 8 in epoch 1", "batch 4 of 8 in epoch 1"} <= set(places), "between two steps of the optimiser"
    assert places.count("batch 8 of 8 in epoch 1") > 1, "during validation, which is measured anew"
    assert places[-1] == "the end of its training", "while the test set was measured"


def test_a_run_without_a_folder_is_left_without_a_checkpoint(reports: None) -> None:
    with pytest.raises(Leave) as caught:
        run(spec(), open_task(TASK), progress=leaving_at(2))
    assert caught.value.place == ""


def train(folder: Path, number: int) -> Any:
    loop.REPORT_BATCHES, loop.CHECKPOINT_EVERY = 2, 1e9
    with joined() as ranks:
        try:
            result = run(spec(), open_task(TASK), folder=folder, progress=leaving_at(number), device="cpu")
            return timeless(result)
        except Leave as leave:
            return "left", ranks.rank, leave.place


@pytest.mark.slow
def test_all_ranks_leave_together_after_one_checkpoint(tmp_path: Path) -> None:
    whole = team(2, train, tmp_path / "whole", 1000)
    assert team(2, train, tmp_path / "cut", 2) == [("left", rank, "batch 4 of 8 in epoch 1") for rank in (0, 1)]
    assert team(2, train, tmp_path / "cut", 3) == [("left", rank, "the end of epoch 1") for rank in (0, 1)]
    assert team(2, train, tmp_path / "cut", 1000) == whole
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


# -------------------------------------------------------------------------------------------------------------- studies
def test_a_run_that_a_study_stops_is_given_back_and_is_no_failure(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(["none"], seeds=1), engine=FakeEngine())
    study.prepare()
    asked = iter([False, False, True])
    study.work(stop=lambda: next(asked, True))
    assert study.results() == {}
    assert study.store.attempts() == {}
    assert study.claims.holders(study.runs) == {}
    study.work()
    assert len(study.results()) == 1


class Terminator(Recorder):
    """Sends SIGTERM, once, as soon as something runs: to this process, or to a worker alone."""

    def __init__(self, to_worker: bool) -> None:
        super().__init__()
        self.to_worker, self.sent = to_worker, False

    def show(self, status: Any) -> None:
        if status.running and not self.sent:
            self.sent = True
            os.kill(status.running[0].pid if self.to_worker else os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_sigterm_stops_a_study_with_its_own_code(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(), engine=FakeEngine(pause=0.5))
    with (
        pytest.raises(StoppedError, match=r"SIGTERM: Stopped with \d of 9 runs done") as caught,
        interrupted_by(signal.SIGTERM) as told,
        ending_as(told),
    ):
        work(study, workers=1, view=Terminator(to_worker=False))
    assert caught.value.code == 128 + 15
    assert status_of(study).running == ()
    assert study.store.attempts() == {}


def test_a_worker_that_is_told_to_end_leaves_its_run_to_another(tmp_path: Path) -> None:
    view = Terminator(to_worker=True)
    study = Study(tmp_path / "told", make_plan(["none"], seeds=2), engine=FakeEngine(tmp_path / "log", pause=0.2))
    status = work(study, workers=1, view=view)
    assert status.done == status.total
    assert "a worker was told to end by SIGTERM and has left a checkpoint; another one takes its place" in view.notes
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == len(set(lines)), "it goes on from its checkpoint, and no run is made twice"
    quiet = worked(tmp_path / "quiet", make_plan(["none"], seeds=2))
    assert {key: result["weights"] for key, result in study.results().items()} == {
        key: result["weights"] for key, result in quiet.results().items()
    }


# -------------------------------------------------------------------------------------------------------------- signals
def ended_by(act: Callable[[], None]) -> int:
    """The signal that ends a process which does this."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def tell(times: int) -> None:
    with noting(signal.SIGTERM) as told:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM]


def tell_a_fork() -> None:
    with noting(signal.SIGTERM) as told:
        died = ended_by(lambda: os.kill(os.getpid(), signal.SIGTERM))
        os.kill(os.getpid(), died if told == [] else signal.SIGKILL)
        assert told == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_signal_is_noted_and_the_second_ends_the_process_at_once() -> None:
    assert ended_by(lambda: tell(1)) == 0
    assert ended_by(lambda: tell(2)) == signal.SIGTERM
    assert ended_by(tell_a_fork) == signal.SIGTERM, "processes that were forked inside end at the first"


def test_handlers_are_what_they_were_before() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with noting(signal.SIGTERM, signal.SIGINT):
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before
    with noting(signal.SIGINT):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_train_ends_after_a_checkpoint_with_a_message_and_the_code_of_the_signal(
    tmp_path: Path, number: int, code: int
) -> None:
    words = ["train", "--task", "digits", "--model", MODEL, "--batch-size", "2", "--folder", str(tmp_path / "one")]
    process = subprocess.Popen(
        [sys.executable, "-m", "attemper", *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    until = time.monotonic() + 120
    while not (tmp_path / "one" / "run.json").exists() and time.monotonic() < until:
        assert process.poll() is None, "it ended before it was stopped"
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"stopped by {signal.Signals(number).name}. Its checkpoint in {tmp_path / 'one'} stands at batch" in said
    assert "Traceback" not in said
    state = load_checkpoint(tmp_path / "one")
    assert state is not None
    assert state["story"]["batch"] > 0
    assert (tmp_path / "one" / CHECKPOINT).exists()
