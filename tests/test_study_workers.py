"""Workers of a study: whichever of them are killed, stopped or lose their GPU, every run is done once."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import study_fakes
from attemper.errors import AttemperError
from attemper.lab.errors import DeviceLostError, StoppedError, StudyError
from attemper.lab.study.executor import work
from attemper.lab.study.status import status_of
from attemper.lab.study.study import Study
from study_fakes import FakeEngine, break_down, die, die_once, fill_the_disk, lose_device_once, make_plan
from study_runs import Recorder, results_without_timings, start_worker, tree, worked

pytestmark = pytest.mark.usefixtures("quick_workers")


def test_workers_killed_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    """Two workers at a time, killed without warning more than twenty times, against a study that nobody disturbed."""
    plan = make_plan(["none", "dropkey(0.1)", "cb", "blur"], seeds=9)
    quiet = worked(tmp_path / "quiet", plan)
    study = Study(tmp_path / "killed", plan, engine=FakeEngine(pause=0.03), attempts=10**6, stale_after=3)
    study.prepare()
    moments, kills, workers = random.Random(7), 0, list[int]()
    while study.missing():
        while len(workers) < 2:
            workers.append(start_worker(study))
        if kills < 24:
            time.sleep(moments.uniform(0.01, 0.05))
            victim = workers.pop(moments.randrange(2))
            os.kill(victim, signal.SIGKILL)
            kills += os.waitpid(victim, 0)[1] == signal.SIGKILL
        else:
            time.sleep(0.05)
    for pid in workers:
        os.waitpid(pid, 0)
    assert kills >= 20
    study.store.sweep_parts(older_than=0)
    study.prepare()
    assert results_without_timings(tmp_path / "killed") == results_without_timings(tmp_path / "quiet")
    assert tree(tmp_path / "killed") == tree(tmp_path / "quiet") == tree(quiet.folder)


def test_four_workers_do_every_run_once_though_some_die_and_some_runs_fail(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path / "log", pause=0.01, troubles={"dropkey(0.1)": die_once, "blur(1.0)": break_down})
    plan = make_plan(["none", "dropkey(0.1)", "cb", "blur", "graying"], seeds=2)
    view = Recorder()
    status = work(Study(tmp_path / "study", plan, engine=engine), workers=4, view=view)
    assert (status.total, status.done, status.failed, len(status.running)) == (10, 8, 2, 0)
    lines = Counter((tmp_path / "log").read_text().splitlines())
    assert len(lines) == 8 + 10
    assert set(lines.values()) == {1}, "a run that died goes on from its checkpoint, and no result is made twice"
    assert sum("was killed by signal 9" in note for note in view.notes) == 1
    assert sum("went wrong: RuntimeError" in note for note in view.notes) == 6


def test_a_worker_that_lost_its_gpu_leaves_the_other_runs_to_another(tmp_path: Path) -> None:
    recipes = ["none", "dropkey(0.1)", "cb"]
    engine = FakeEngine(troubles=dict.fromkeys(("none", "dropkey(0.1)", "cb(cb)"), lose_device_once))
    view = Recorder()
    study = Study(tmp_path, make_plan(recipes, seeds=2), engine=engine)
    status = work(study, workers=1, view=view)
    assert (status.done, status.failed) == (6, 0)
    assert sum("went wrong: AcceleratorError" in note for note in view.notes) == 1
    assert sum("can no longer use its GPU; another one takes its place" in note for note in view.notes) == 1


def test_a_gpu_that_is_lost_while_workers_stop_is_no_failure_of_a_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(study_fakes, "gone", set())
    asked: list[bool] = []

    def lose(folder: Path) -> None:
        asked.append(True)
        lose_device_once(folder)

    study = Study(tmp_path, make_plan(["none"], seeds=1), engine=FakeEngine(troubles={"none": lose}))
    study.prepare()
    with pytest.raises(DeviceLostError, match="none, seed 0 lost its device: CUDA error"):
        study.work(stop=lambda: bool(asked), log=lambda text: None)
    assert study.store.attempts() == {}


def test_a_run_that_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(["none"], seeds=2), engine=FakeEngine(troubles={"none": die}))
    study.prepare()
    deaths = 0
    while study.missing():
        deaths += os.waitpid(start_worker(study), 0)[1] == signal.SIGKILL
    assert deaths == 2 * 3
    assert status_of(study).failed == 2
    assert "died during the run" in study.store.failures(study.failed()[0])[0]["error"]


class Impatient(Recorder):
    """Presses Ctrl-C, in the parent and in its workers, as soon as something runs."""

    def show(self, status: Any) -> None:
        if status.running:
            for run in status.running:
                os.kill(run.pid, signal.SIGINT)
            raise KeyboardInterrupt


def test_ctrl_c_stops_the_workers_and_says_how_to_resume(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(), engine=FakeEngine(pause=0.5))
    view = Impatient()
    with pytest.raises(StoppedError, match=r"Stopped with \d of 9 runs done. Nothing is lost: run the same command"):
        work(study, workers=2, view=view)
    assert status_of(study).running == ()
    assert not any("died" in json.loads(path.read_text())["error"] for path in (tmp_path / "failures").glob("*"))


def test_what_no_worker_can_go_on_from_ends_the_study_with_the_reason(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(), engine=FakeEngine(troubles={"none": fill_the_disk}))
    with pytest.raises(AttemperError, match="no space is left"):
        work(study, workers=1)
    with pytest.raises(StudyError, match="workers is 0"):
        work(study, workers=0)
