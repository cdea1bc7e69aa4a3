"""Processes of the laboratory take no more CPU threads than their user allows, and one where more would only wait."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper.errors import AttemperError
from attemper.lab.experiments import side_by_side
from attemper.lab.experiments.catalogue import find_experiment
from attemper.lab.experiments.kept import Kept
from attemper.lab.experiments.runs import ArmRun
from attemper.lab.study import probing, processes, ray_executor
from attemper.lab.study.processes import Processes
from attemper.lab.study.study import Study
from attemper.lab.study.workers import WorkerConfig
from attemper.lab.tasks.augment import one_by_one
from attemper.lab.tasks.boxes.augmenting import box_augmentation
from attemper.lab.tasks.segmentation.augment import parse_mask_augmentation
from attemper.lab.threads import VARIABLE, at_most, share_of_cores, threads
from attemper.lab.training.spec import Budget
from study_fakes import FakeEngine, make_plan
from study_runs import Recorder


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """16 cores, and as many threads of torch as the list says last; nothing in the environment."""
    count = [16]
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("attemper.lab.threads.cores", lambda: 16)
    monkeypatch.setattr(processes, "gpu_memory", list)
    monkeypatch.setattr(probing, "gpu_memory", list)
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[-1])
    monkeypatch.setattr(torch, "set_num_threads", count.append)
    return count


# -------------------------------------------------------------------------------------------- what the user allows
def test_processes_share_the_cores(machine: list[int]) -> None:
    assert [share_of_cores(many) for many in (1, 2, 5, 40)] == [16, 8, 3, 1]
    assert at_most(10**6) == 10**6


def test_no_process_has_more_threads_than_torch_has_where_it_is_started(machine: list[int]) -> None:
    machine.append(3)
    assert [share_of_cores(many) for many in (1, 4, 8)] == [3, 3, 2]


@pytest.mark.parametrize(
    ("said", "threads_of_two"), [("1", 1), ("3,2", 3), (" 2 ", 2), ("64", 8), ("", 8), ("0", 8), ("-1", 8), ("many", 8)]
)
def test_what_omp_num_threads_says_is_the_most(
    said: str, threads_of_two: int, machine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was set after torch was loaded, which has not seen it."""
    monkeypatch.setenv(VARIABLE, said)
    assert share_of_cores(2) == threads_of_two
    assert at_most(8) == threads_of_two
    assert at_most(0) == 1


class StartedError(AttemperError):
    """Stands for the process that would have begun."""


def test_every_process_that_is_started_is_told_so(
    machine: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of a study and of a probe, and runs of an experiment side by side."""
    told: list[tuple[Any, ...]] = []

    class Context:
        Barrier, Pipe = staticmethod(lambda size: None), staticmethod(Pipe)

        def Process(self, target: Any, args: tuple[Any, ...], name: str = "") -> None:
            told.append(args)
            raise StartedError

    def pool_of(size: int, context: Any, begin: Any, args: tuple[Any, ...]) -> None:
        told.append(args)
        raise StartedError

    monkeypatch.setattr("multiprocessing.get_context", lambda how: Context())
    monkeypatch.setattr(side_by_side, "ProcessPoolExecutor", pool_of)
    machine.append(3)
    study = Study(tmp_path, make_plan(), engine=FakeEngine())
    study.prepare()
    with pytest.raises(StartedError):
        Processes(workers=4).pool(study, Recorder()).start()
    with pytest.raises(StartedError):
        probing.probe(make_plan(), workers=4)
    arm = find_experiment("skips").arms[0]
    run = ArmRun("skips", arm, 0, "digits", Budget(epochs=1), {})
    with pytest.raises(StartedError):
        side_by_side.run_side_by_side([run], 4, None, Kept(tmp_path, ""), torch.device("cpu"), lambda *_: None)
    assert told[0][1].threads == 3
    assert told[1][5] == 3
    assert told[2][2] == 3


def test_a_node_of_a_cluster_has_its_own_word(
    machine: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run there has the cores that were asked for, whatever torch had in this process for the run before it."""
    config = WorkerConfig.of(Study(tmp_path, make_plan(), engine=FakeEngine()), threads=8, device="cpu")
    machine.append(1)
    ray_executor.perform(config, tmp_path / "nothing", "key", "token")
    monkeypatch.setenv(VARIABLE, "2")
    ray_executor.perform(config, tmp_path / "nothing", "key", "token")
    assert machine[-2:] == [8, 2]


# ------------------------------------------------------------------------------------------------- image by image
def test_the_number_of_threads_comes_back_after_errors_too(machine: list[int]) -> None:
    with threads(1):
        assert machine[-1] == 1
    assert machine[-1] == 16
    with pytest.raises(ZeroDivisionError), threads(2):
        raise ZeroDivisionError
    assert machine == [16, 1, 16, 2, 16]
    with threads(None), threads(16):
        assert len(machine) == 5, "nothing is set where nothing changes"


def boxes(seen: Any) -> None:
    rows = torch.tensor([[[0.0, 0.1, 0.1, 0.9, 0.9, 100.0, 0.0]]])
    images = torch.full((1, 4, 16, 16), 255, dtype=torch.uint8)
    augment = box_augmentation("photometric(1)+flip")
    augment(images, rows, classes=1, to_input=seen, seed=0)


def masks(seen: Any) -> None:
    images, targets = torch.zeros(1, 3, 16, 16, dtype=torch.uint8), torch.zeros(1, 16, 16, dtype=torch.int64)
    parse_mask_augmentation("photometric")(images, targets, classes=2, to_input=seen, seed=0)


@pytest.mark.parametrize("augment", [boxes, masks])
def test_images_are_augmented_on_one_thread(augment: Any, machine: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """While each image goes through; the whole batch has all of them again."""
    during: list[int] = []
    once = "torchvision.transforms.v2.RandomPhotometricDistort.transform"
    monkeypatch.setattr(once, lambda self, image, drawn: during.append(machine[-1]) or image)

    def seen(batch: Tensor) -> Tensor:
        during.append(machine[-1])
        return batch

    augment(seen)
    assert set(during[:-1]) == {1}
    assert during[-1] == 16


def test_an_image_that_cannot_be_augmented_leaves_the_threads_as_they_were(machine: list[int]) -> None:
    def fail(image: Tensor) -> Tensor:
        assert machine[-1] == 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        one_by_one(fail, torch.zeros(2, 3, 4, 4))
    assert machine[-1] == 16
