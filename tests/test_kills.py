"""A study whose workers are killed at random moments, in earnest, comes to the results of one that nobody disturbed.

Every worker trains, writes checkpoints after nearly every step, and is killed, or told to leave, when it pleases a
random number: while it claims a run, in a step, in a checkpoint, while it writes a result or cleans up. How many are
killed is set by the variable ATTEMPER_KILLS, 100 unless it says otherwise; what happened is printed (pytest -s).
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from attemper.lab.study.plan import Plan
from attemper.lab.study.study import Study
from attemper.lab.training import loop
from attemper.lab.training.leaving import noting
from study_runs import results_without_timings, tree

KILLS = int(os.environ.get("ATTEMPER_KILLS", "100"))
WORKERS = 2
LONGEST = 0.6
"""Seconds between two kills, at most: shorter than a run, longer than it takes to begin one."""
PLAN = Plan.from_dict(
    {
        "task": "digits(train=60, test=20)",
        "model": "vit-digits(depth=1, width=16, heads=2, mlp=16)",
        "seeds": 3,
        "budget": {"epochs": 3, "batch_size": 6, "warmup_epochs": 1, "augment": "crop-flip(1)+mixup", "ema": 0.9},
        "recipes": ["none", "dropkey(0.2) + droppath(0.1)", "cb(cb_s)"],
    }
)


def begin(folder: Path) -> Study:
    study = Study(folder, PLAN, attempts=10**6)
    study.prepare()
    return study


def start_worker(folder: Path) -> int:
    """A process of its own; forked, since a new one would take ten seconds to import everything."""
    pid = os.fork()
    if pid:
        return pid
    try:
        loop.CHECKPOINT_EVERY, loop.CHECKPOINT_WITHIN, loop.CHECKPOINT_SHARE = 0.0, 0.01, float("inf")
        loop.REPORT_EVERY = 0.01
        with noting(signal.SIGTERM) as told:
            Study(folder, attempts=10**6).work(stop=lambda: bool(told), log=lambda text: None)
    finally:
        os._exit(0)


def disturb(study: Study, moments: random.Random, kills: int) -> Counter[str]:
    """Finish a study with workers of which one after another is ended, up to so many; what happened, counted."""
    crew, counted = list[int](), Counter[str]()
    while study.missing():
        while len(crew) < WORKERS:
            crew.append(start_worker(study.folder))
        time.sleep(moments.uniform(0.0, LONGEST))
        if counted["killed"] < kills:
            victim = crew.pop(moments.randrange(len(crew)))
            number = moments.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            os.kill(victim, number)
            status = os.waitpid(victim, 0)[1]
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            counted["killed" if killed else "told to leave" if number == signal.SIGTERM else "over before"] += 1
        for pid in crew[:]:
            if os.waitpid(pid, os.WNOHANG)[0]:
                crew.remove(pid)
    for pid in crew:
        os.waitpid(pid, 0)
    return counted


@pytest.mark.slow
def test_workers_killed_at_random_moments_of_real_runs_lose_and_change_nothing(tmp_path: Path) -> None:
    torch.set_num_threads(1)  # others would not be there in a process that is forked
    importlib.import_module("teams_imports")  # here, so that no worker needs to
    quiet = begin(tmp_path / "quiet")
    os.waitpid(start_worker(quiet.folder), 0)
    expected = results_without_timings(quiet.folder)
    assert len(expected) == len(quiet.runs)
    moments, counted, rounds = random.Random(20), Counter[str](), 0
    while counted["killed"] < KILLS:
        rounds += 1
        study = begin(tmp_path / str(rounds))
        counted += disturb(study, moments, KILLS - counted["killed"])
        study.store.sweep_parts(older_than=0)
        assert study.prepare() == [], "nothing is corrupt, and nothing is mixed"
        assert results_without_timings(study.folder) == expected
        assert tree(study.folder) == tree(quiet.folder), "and nothing is left over"
        assert len(study.results()) == len(study.runs)
    sys.stderr.write(f"\n{dict(counted)} in {rounds} studies of {len(expected)} runs: all results identical\n")
