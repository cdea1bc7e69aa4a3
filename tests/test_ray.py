"""Studies on a Ray cluster of three local nodes: one may die, and nothing but its unfinished runs is done again."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attemper.errors import ParameterError
from attemper.lab.errors import StoppedError, StudyError
from attemper.lab.study import ray_executor
from attemper.lab.study.executor import work
from attemper.lab.study.locks import beacon
from attemper.lab.study.performing import perform_run
from attemper.lab.study.ray_executor import RayCluster, RayPool, check_room
from attemper.lab.study.resources import Resources
from attemper.lab.study.status import status_of
from attemper.lab.study.study import Study
from attemper.lab.study.workers import MOST_DEATHS
from study_fakes import FakeEngine, break_down, die_once, make_plan, open_gate, wait_half_way
from study_runs import Recorder, results_without_timings, tree, worked

ray = pytest.importorskip("ray")

RECIPES = ["none", "dropkey(0.1)", "cb", "blur"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes with a core each, the head among them; tests may take one away and add another."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    here = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), here]))  # nodes need our fakes
    from ray.cluster_utils import Cluster

    system = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 40,  # beside other tests a node that lives may be silent for many seconds
        "worker_niceness": 0,  # beside other tests, Ray's own 15 would leave its workers next to nothing
    }
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": system}
    found = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        found.add_node(num_cpus=1)
    yield found
    found.shutdown()
    os.environ["PYTHONPATH"] = here


class Killer(Recorder):
    """Takes a node away, without warning, that holds a run at the half-way gate; opens the gate once it is missed."""

    def __init__(self, cluster: Any, study: Study) -> None:
        super().__init__()
        self.cluster, self.study = cluster, study
        self.lost: str | None = None
        """The run that was under way on that node, in words."""
        self.done = 0
        """How many runs were done by then."""

    def show(self, status: Any) -> None:
        found = None if self.lost else self.held_run()
        if found is not None:
            key, node = found
            self.lost, self.done = self.study.describe(key), len(self.study.results())
            self.cluster.remove_node(node, allow_graceful=False)

    def held_run(self) -> tuple[str, Any] | None:
        """A run that waits at the gate, and its node: not one that the cluster or this process needs."""
        here = ray.get_runtime_context().get_node_id()
        spare = {node.node_id: node for node in self.cluster.worker_nodes if node.node_id != here}
        for waits in (self.study.folder / "work").glob("*/waits"):
            if (node := spare.get(waits.read_text())) is not None:
                return waits.parent.name, node
        return None

    def note(self, text: str) -> None:
        super().note(text)
        if self.lost and text.startswith(self.lost):
            open_gate(self.study.folder)


@pytest.mark.slow
def test_a_study_whose_node_dies_half_way_ends_with_the_results_of_an_undisturbed_one(
    cluster: Any, tmp_path: Path
) -> None:
    plan = make_plan(RECIPES, seeds=3)
    quiet = worked(tmp_path / "quiet", plan)
    log = tmp_path / "log"
    recipes = {spec.recipe for spec in quiet.runs.values()}
    engine = FakeEngine(log, troubles=dict.fromkeys(recipes, wait_half_way))
    study = Study(tmp_path / "study", plan, engine=engine)
    view = Killer(cluster, study)
    status = work(study, view=view, executor=RayCluster(cluster.address))
    assert view.lost, "the node was taken away"
    assert 6 <= view.done <= 8, "half-way"
    assert f"{view.lost} lost its worker and goes on from its checkpoint elsewhere" in "\n".join(view.notes)
    assert (status.done, status.failed, len(status.running)) == (12, 0, 0)
    assert results_without_timings(tmp_path / "study") == results_without_timings(tmp_path / "quiet")
    assert tree(tmp_path / "study") == tree(tmp_path / "quiet")
    lines = Counter(log.read_text().splitlines())
    assert sum(line.startswith("end") for line in lines.elements()) == 12, "no result is made twice"
    assert set(lines.values()) == {1}, "what the node had begun goes on from its checkpoint"
    cluster.add_node(num_cpus=1)


@pytest.mark.slow
def test_failures_and_dead_processes_are_retried_by_the_rules_of_every_study(cluster: Any, tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path / "log", troubles={"dropkey(0.1)": die_once, "blur(1.0)": break_down})
    view = Recorder()
    study = Study(tmp_path / "study", make_plan(RECIPES, seeds=1), engine=engine, attempts=2)
    status = work(study, view=view, executor=RayCluster(cluster.address, most=2))
    assert (status.total, status.done, status.failed) == (4, 3, 1)
    assert sum("lost its worker and goes on from its checkpoint" in note for note in view.notes) == 1
    assert sum("went wrong: RuntimeError: the disk brake is on" in note for note in view.notes) == 2
    assert set(Counter((tmp_path / "log").read_text().splitlines()).values()) == {1}


class Impatient(Recorder):
    """Presses Ctrl-C as soon as something runs."""

    def show(self, status: Any) -> None:
        if status.running:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_ctrl_c_calls_the_runs_back_and_frees_them(cluster: Any, tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(), engine=FakeEngine(pause=0.5))
    with pytest.raises(StoppedError, match="Nothing is lost: run the same command"):
        work(study, view=Impatient(), executor=RayCluster(cluster.address))
    assert status_of(study).running == ()
    assert not list((tmp_path / "claims").glob(".beacon*"))
    assert not ray.is_initialized()
    Study(tmp_path, engine=FakeEngine()).work()
    worked(tmp_path / "quiet", make_plan())
    done = results_without_timings(tmp_path)
    assert done == results_without_timings(tmp_path / "quiet"), "what one executor began another one can finish"


def test_a_node_that_does_not_share_the_folder_ends_the_study_with_the_reason(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = beacon(tmp_path)

    def only_here(folder: Path) -> Any:
        return elsewhere

    monkeypatch.setattr("attemper.lab.study.ray_executor.beacon", only_here)
    study = Study(tmp_path / "study", make_plan(["none"], seeds=1), engine=FakeEngine())
    monkeypatch.setattr(Path, "touch", lambda *args, **options: None)  # lit for nobody but this machine
    with pytest.raises(StudyError, match=r"node .* does not see the files that this machine has"):
        work(study, executor=RayCluster(cluster.address))
    assert study.results() == {}


def test_more_than_any_node_has_is_refused(cluster: Any, tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(), engine=FakeEngine())
    with pytest.raises(
        StudyError, match=r"No node of the cluster has cpus=1,gpus=0.5 for a run. Its nodes have: cpus=1"
    ):
        work(study, executor=RayCluster(cluster.address, Resources(gpus=0.5)))
    assert not ray.is_initialized()
    assert list(tmp_path.iterdir()) == [], "nothing is written for a mistake"
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]
    check_room(Resources(cpus=4, gpus=0.25), nodes)
    with pytest.raises(StudyError, match="Its nodes have: cpus=4,gpus=1"):
        check_room(Resources(cpus=8), nodes)


class Deadly:
    """Stands for Ray on a cluster whose workers all die before they begin."""

    exceptions = ray.exceptions

    def wait(self, tasks: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        return tasks, []

    def get(self, task: Any) -> None:
        raise ray.exceptions.WorkerCrashedError


def test_many_workers_that_die_at_once_are_replaced_and_many_in_a_row_end_the_study(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(RECIPES, seeds=10), engine=FakeEngine())
    study.prepare()
    pool = RayPool(study, Recorder(), RayCluster())
    pool._ray, pool._send = Deadly(), lambda key, token: object()
    pool._fill()
    for _ in range(MOST_DEATHS):
        assert len(pool._tasks) == 40
        pool.poll()
    assert study.store.attempts() == {}, "no run had begun"
    with pytest.raises(StudyError, match="11 workers died one after another without a run done; the last said"):
        pool.poll()


class Calling(Deadly):
    """Stands for Ray when runs are called back; notes who still holds a run by then."""

    def __init__(self, study: Study) -> None:
        self.study, self.held = study, list[dict[str, Any]]()

    def cancel(self, task: Any, force: bool = False) -> None:
        self.held.append(self.study.claims.holders(self.study.runs))


def test_runs_that_are_called_back_have_time_to_write_a_checkpoint_first(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(["none"], seeds=1), engine=FakeEngine())
    study.prepare()
    pool = RayPool(study, Recorder(), RayCluster())
    marker = pool._light.enter_context(beacon(study.claims.folder))
    claim = study.claim(token="ours")
    assert claim is not None
    assert not ray_executor._is_gone(marker)

    def run() -> None:
        perform_run(study, claim, stop=lambda: ray_executor._is_gone(marker), device=None, log=print)

    study.engine = FakeEngine(pause=0.3)
    worker = threading.Thread(target=run)
    worker.start()
    pool._ray, pool._tasks = Calling(study), {object(): (claim.key, "ours")}
    pool.stop()
    worker.join()
    assert pool._ray.held[0] == {}, "the run was given back before anything was cancelled"
    assert study.results() == {}
    assert study.store.attempts() == {}


def test_an_address_without_a_cluster_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    study = Study(tmp_path, make_plan(), engine=FakeEngine())
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(StudyError, match=f"There is no Ray cluster at {nobody}: .*refused"):
        work(study, executor=RayCluster(nobody))
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    with pytest.raises(StudyError, match=f"There is no Ray cluster at {nobody}: .*refused"):
        work(study, executor=RayCluster())
    for wrong in ("ray://10.0.0.1:10001", "head", ":6379"):
        with pytest.raises(StudyError, match="it must be HOST:PORT of the cluster's head"):
            work(study, executor=RayCluster(wrong))
    assert list(tmp_path.iterdir()) == [], "nothing is written for a mistake"


def test_an_address_where_something_else_listens_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "KNOCK", 0.2)
    study = Study(tmp_path, make_plan(), engine=FakeEngine())
    with socket.create_server(("127.0.0.1", 0)) as server:
        somebody = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(StudyError, match=f"There is no Ray cluster at {somebody}: timed out"):
            work(study, executor=RayCluster(somebody))
        server.accept()[0].close()

        def refuse() -> None:
            line = server.accept()[0]
            line.sendall(b"HTTP/1.1 505 HTTP Version Not Supported\r\n\r\n")
            line.recv(100)
            line.close()

        threading.Thread(target=refuse).start()
        with pytest.raises(StudyError, match=f"no Ray cluster at {somebody}: something else listens there.*dashboard"):
            work(study, executor=RayCluster(somebody))
    assert list(tmp_path.iterdir()) == [], "nothing is written for a mistake"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpus", "'cpus' is no amount"),
        ("cpu=1", "Did you mean 'cpus'?"),
        ("cpus=one", "cpus is 'one'; it must be a number"),
        ("cpus=0", "cpus is 0; a run takes more than 0"),
        ("gpus=2", "gpus is 2; a run takes one GPU, a part of one, or none"),
        ("gpus=nan", "gpus is nan"),
        ("cpus=1,cpus=2", "names cpus twice"),
        ("memory=0", "memory is 0 GiB"),
    ],
)
def test_resources_that_make_no_sense_are_named(text: str, message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Resources.parse(text)
    assert message in str(caught.value)
    assert str(Resources.parse("gpus=0.25, cpus=2,memory=8")) == "cpus=2,gpus=0.25,memory=8"
