"""Ctrl-C while a study starts: the process that was typed tells in one line, and those that it started say nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from attemper.lab.study import processes
from attemper.lab.study.interrupts import shielded
from attemper.lab.study.live import SilentView
from attemper.lab.study.processes import Processes, ProcessPool
from attemper.lab.study.study import Study
from study_fakes import FakeEngine, make_plan

IMPORTING = "import time\nprint('here', flush=True)\ntime.sleep(0.3)\nprint('there', flush=True)"


def interrupted_while_it_imports() -> str:
    child = subprocess.Popen(
        [sys.executable, "-c", IMPORTING], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    child.send_signal(signal.SIGINT)
    return first + child.communicate(timeout=60)[0]


def test_a_process_that_is_started_behind_the_shield_does_not_hear_ctrl_c() -> None:
    with shielded():
        assert interrupted_while_it_imports() == "here\nthere\n"
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is in a shell's background job
        assert "KeyboardInterrupt" in interrupted_while_it_imports()


def test_ctrl_c_behind_the_shield_is_heard_at_its_end() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
            with shielded():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
                reached.append("the end")
    finally:
        signal.signal(signal.SIGINT, before)
    assert reached == ["the end"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_workers_are_started_behind_the_shield(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[set[Any]] = []

    class Context:
        exitcode = 0

        def Pipe(self) -> tuple[Any, Any]:
            import multiprocessing

            return multiprocessing.Pipe()

        def Process(self, **_: Any) -> Context:
            return self

        def start(self) -> None:
            masks.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, [])))

        def join(self, *_: Any) -> None: ...

    monkeypatch.setattr(processes.multiprocessing, "get_context", lambda _: Context())
    study = Study(tmp_path / "study", make_plan(), engine=FakeEngine())
    pool = ProcessPool(study, SilentView(), Processes(workers=2), [])
    pool.start()
    pool.stop()
    assert len(masks) == 2
    assert all(signal.SIGINT in mask for mask in masks)


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 2.0])
def test_ctrl_c_while_workers_import_torch_is_one_line(tmp_path: Path, pause: float) -> None:
    words = ["compare", "--recipes", "cb", "--seeds", "2", "--workers", "2", "--no-costs", "--folder", "study"]
    process = subprocess.Popen(
        [sys.executable, "-m", "attemper", *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        until = time.monotonic() + 120
        while len(spawned(process.pid)) < 2 and time.monotonic() < until:
            assert process.poll() is None, "it ended before it was stopped"
            time.sleep(0.02)
        time.sleep(pause)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert said.count("\n") == 1, said
    assert "run the same command to go on" in said


def spawned(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            found += [child] if "spawn_main" in " ".join(child.cmdline()) else []
    return found
