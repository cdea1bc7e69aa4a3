"""Who does the runs: how many fit on a machine, which folders can be shared, and what the command line says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attemper.errors import AttemperError, ParameterError
from attemper.lab.cli import main
from attemper.lab.cli.executor_options import ExecutorOptions
from attemper.lab.errors import FolderError, StudyError
from attemper.lab.study import locks, processes
from attemper.lab.study.claims import Claims
from attemper.lab.study.comparison import compare
from attemper.lab.study.executor import work
from attemper.lab.study.processes import Processes, runs_per_gpu
from attemper.lab.study.ray_executor import RayCluster
from attemper.lab.study.resources import Resources
from attemper.lab.study.study import Study
from study_fakes import FakeEngine, break_down, make_plan, make_result
from study_runs import Recorder

pytestmark = pytest.mark.usefixtures("quick_workers")

GIB = 1024**3


# ----------------------------------------------------------------------------------------- packing runs on a machine
@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 cores and two GPUs of 80 GiB."""
    monkeypatch.setattr(processes, "cores", lambda: 32)
    monkeypatch.setattr(processes, "gpu_memory", lambda: [80 * GIB, 80 * GIB])


def test_a_gpu_takes_as_many_runs_as_its_memory_and_never_none() -> None:
    assert runs_per_gpu(peak=10 * GIB, memory=80 * GIB) == 5
    assert runs_per_gpu(peak=60 * GIB, memory=80 * GIB) == 1
    assert runs_per_gpu(peak=100 * GIB, memory=80 * GIB) == 1
    assert runs_per_gpu(peak=GIB // 100, memory=80 * GIB) == processes.MOST_PER_GPU
    for peak in range(1, 40):
        fit = runs_per_gpu(peak * GIB, 80 * GIB, most=100)
        assert fit == 1 or fit * (peak * GIB + processes.CONTEXT) <= 80 * GIB


def test_how_many_processes_there_are(machine: None) -> None:
    memory = processes.gpu_memory()
    assert Processes().size(memory, []) == 2, "one each, until something is known"
    assert Processes().size(memory, [5 * GIB, 10 * GIB]) == 10, "the largest peak counts"
    assert Processes(per_gpu=3).size(memory, [70 * GIB]) == 6
    assert Processes(workers=5).size(memory, [10 * GIB]) == 5
    assert Processes().size([], []) == 32


def test_every_process_has_a_core_that_feeds_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 4)
    assert Processes().size([80 * GIB] * 2, [GIB]) == 4


class FakeWorker:
    """Stands for a worker process that does nothing."""

    def __init__(self) -> None:
        self.left = False
        self.process = self
        self.exitcode: int | None = None
        self.pipe = self

    def read(self) -> list[Any]:
        return []

    def request_stop(self) -> None:
        self.left = True
        self.exitcode = 0

    def join(self, timeout: float) -> None: ...

    def close(self) -> None: ...


def test_the_pool_grows_when_the_first_run_shows_what_it_takes_and_shrinks_when_one_takes_more(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str | None] = []
    started: list[FakeWorker] = []

    def start_worker(self: Any, place: int) -> FakeWorker:
        devices.append(f"cuda:{place % 2}")
        started.append(FakeWorker())
        return started[-1]

    monkeypatch.setattr(processes.ProcessPool, "_start_worker", start_worker)
    study = Study(tmp_path, make_plan(seeds=5), engine=FakeEngine())
    study.prepare()
    pool = Processes().pool(study, Recorder())
    pool.start()
    assert devices == ["cuda:0", "cuda:1"]

    def finish(index: int, peak: int) -> None:
        key = list(study.runs)[index]
        study.store.save(key, make_result(study.runs[key], timing={"seconds": 1.0, "peak_memory": peak}))
        pool.poll()

    finish(0, 10 * GIB)
    assert devices == ["cuda:0", "cuda:1"] * 5
    finish(1, 20 * GIB)
    assert len(devices) == 10
    assert sum(worker.left for worker in started) == 10 - 2 * runs_per_gpu(20 * GIB, 80 * GIB)
    pool.stop()
    assert all(worker.left for worker in started)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"per_gpu": 0}, "per_gpu is 0"),
        ({"workers": 2, "per_gpu": 2}, "give one of them"),
        ({"per_gpu": 2}, "this machine has no GPU"),
    ],
)
def test_a_crew_that_makes_no_sense_is_refused(
    options: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "gpu_memory", list)
    with pytest.raises(StudyError, match=message):
        work(Study(tmp_path, make_plan(), engine=FakeEngine()), executor=Processes(**options))


# -------------------------------------------------------------------------------------------------------------- locks
def test_a_folder_with_working_locks_is_left_as_it_was(tmp_path: Path) -> None:
    locks.check_locks(tmp_path / "claims")
    assert list((tmp_path / "claims").iterdir()) == []


def test_a_folder_in_which_two_can_create_the_same_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = locks.RIVAL.replace("flush=True)\n", "flush=True)\nimport time\ntime.sleep(1)\n")
    monkeypatch.setattr(locks, "RIVAL", late.replace("os.O_EXCL", "0"))  # a file system that forgets it
    study = Study(tmp_path, make_plan(), engine=FakeEngine())
    with pytest.raises(FolderError, match=r"has no working locks: .* created by both.*Choose a folder on a local disk"):
        work(study, workers=1)
    assert study.results() == {}
    assert list((tmp_path / "claims").iterdir()) == []


def test_a_folder_in_which_nothing_can_be_created_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "RIVAL", "raise SystemExit('it is broken')")
    with pytest.raises(FolderError, match="could not be tried out: it is broken"):
        locks.check_locks(tmp_path)


def test_a_machine_that_shares_a_folder_sees_the_beacon_and_another_does_not(tmp_path: Path) -> None:
    with locks.beacon(tmp_path) as light:
        locks.check_sees(light, "node a")
    with pytest.raises(FolderError, match="node b does not see the files"):
        locks.check_sees(light, "node b")
    with pytest.raises(FolderError, match=r"node c has no folder .*share, under the same path"):
        locks.check_sees(tmp_path / "elsewhere" / "light", "node c")
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_freed_at_once_when_its_worker_is_known_to_be_dead(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(["none"], seeds=1), engine=FakeEngine())
    study.prepare()
    claim = study.claim(token="node-7")
    assert claim is not None
    assert study.claim() is None
    assert not study.release_dead(claim.key, "node-8"), "somebody else's claim is left alone"
    assert study.release_dead(claim.key, "node-7")
    assert not study.release_dead(claim.key, "node-7"), "nobody dies twice"
    assert "died during the run" in study.store.failures(claim.key)[0]["error"]
    assert len(study.store.failures(claim.key)) == 1
    with pytest.raises(AttemperError, match="taken over"):
        claim.check()
    heir = study.claim()
    assert heir is not None
    assert Claims(tmp_path / "claims").holder(claim.key) is not None


# --------------------------------------------------------------------------------------------------- the command line
def test_options_become_the_executor_that_they_name() -> None:
    assert ExecutorOptions().make() is None, "the study has its own default"
    assert ExecutorOptions(workers=3).make() == Processes(workers=3)
    assert ExecutorOptions(per_gpu=2).make() == Processes(per_gpu=2)
    assert ExecutorOptions(executor="ray").make() == RayCluster()
    ray = ExecutorOptions(executor="ray", per_run="cpus=2,gpus=0.5", address="10.0.0.1:6379", workers=4).make()
    assert ray == RayCluster("10.0.0.1:6379", Resources(cpus=2, gpus=0.5), 4)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (ExecutorOptions(per_run="cpus=2"), "--per-run says nothing to --executor processes"),
        (ExecutorOptions(address="a:1"), "--address says nothing to --executor processes"),
        (
            ExecutorOptions(executor="ray", per_gpu=2),
            "--per-gpu says nothing to --executor ray: say --per-run gpus=0.5",
        ),
        (ExecutorOptions(attempts=0), "--attempts is 0"),
    ],
)
def test_options_that_say_nothing_to_an_executor_are_refused(where: ExecutorOptions, message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        where.make()
    assert message in str(caught.value)


def test_the_number_of_attempts_can_be_chosen(tmp_path: Path) -> None:
    engine = FakeEngine(troubles={"none": break_down})
    summary = compare(make_plan(["none"], seeds=1), tmp_path, engine=engine, attempts=1, workers=1, costs=False)
    assert "was given up after 1 attempt" in summary["notes"][0]


def test_a_study_can_be_watched_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = Study(tmp_path, make_plan(), engine=FakeEngine())
    study.prepare()
    study.work()
    assert main(["study", "status", str(tmp_path), "--watch"]) == 0
    assert "9 of 9 runs done" in capsys.readouterr().out
