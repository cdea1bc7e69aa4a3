"""A study that really trains: killed with everything that belongs to it, and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from attemper.lab.errors import PlanError
from attemper.lab.study.comparison import compare
from attemper.lab.study.costs import measure_costs, read_costs
from attemper.lab.study.plan import Plan
from attemper.lab.study.study import Study
from attemper.lab.study.summary import summarise
from study_runs import results_without_timings

PLAN: dict[str, Any] = {
    "task": "digits(test=100, train=300)",
    "model": "vit-digits(depth=2)",
    "seeds": 2,
    "budget": {"epochs": 3, "batch_size": 32},
    "recipes": ["none", {"name": "dropkey", "recipe": "dropkey({0.1, 0.3})"}],
}
SCRIPT = """
import sys
from attemper.lab.study.comparison import compare

if __name__ == "__main__":
    compare({plan!r}, {folder!r}, workers=1, costs=False)
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    script = folder.with_suffix(".py")
    script.write_text(SCRIPT.format(plan=PLAN, folder=str(folder)))
    return subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def wait_for(something: Any, process: subprocess.Popen[bytes]) -> Any:
    while not (found := something()):
        assert process.poll() is None, "it ended too early"
        time.sleep(0.02)
    return found


@pytest.fixture
def one_core() -> Iterator[None]:
    """One thread here and in the worker: sums in another order would be other numbers."""
    threads, allowed = torch.get_num_threads(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    torch.set_num_threads(1)
    yield
    os.sched_setaffinity(0, allowed)
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
def test_a_study_killed_with_its_worker_and_resumed_ends_as_if_nothing_had_happened(
    tmp_path: Path, one_core: None
) -> None:
    quiet = Study(tmp_path / "quiet", Plan.from_dict(PLAN))
    quiet.prepare()
    quiet.work()

    process = start(tmp_path / "killed")
    wait_for(lambda: list((tmp_path / "killed" / "progress").glob("*.json")), process)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(workers, timeout=60)
    assert not any(worker.is_running() for worker in workers), "without its parent, a worker ends by itself"

    killed = Study(tmp_path / "killed")
    assert killed.missing()
    killed.work()
    summary = compare(PLAN, tmp_path / "killed", costs=False)
    assert summary["complete"]
    assert results_without_timings(tmp_path / "killed") == results_without_timings(tmp_path / "quiet")
    assert [row["rank"] for row in summary["recipes"]] == [row["rank"] for row in summarise(quiet)["recipes"]]


def test_the_cost_of_a_recipe_is_measured_against_none(tmp_path: Path, one_core: None) -> None:
    study = Study(tmp_path, Plan.from_dict(PLAN))
    study.prepare()
    measure_costs(study, ["none"])
    assert read_costs(study)["none"]["ratio"] == 1.0


def test_recipes_that_do_not_fit_the_model_are_named_before_anything_is_written(tmp_path: Path) -> None:
    recipes = ["dropkey(schedule=[0.1, 0.2, 0.3])", "layerdrop(schedule=[0.1])", "cb"]
    study = Study(tmp_path / "study", Plan.from_dict({**PLAN, "recipes": recipes}))
    with pytest.raises(PlanError) as caught:
        study.check()
    message = str(caught.value)
    assert message.startswith("2 of the plan's recipes cannot be run with vit-digits(depth=2):\n- dropkey(")
    assert "- layerdrop(" in message
    assert not (tmp_path / "study").exists()
