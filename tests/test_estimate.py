"""Estimates: a probe measures what runs do, and the arithmetic from there to hours holds."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from attemper.errors import ParameterError
from attemper.lab.cli import main
from attemper.lab.cli.estimate import EstimateCommand, read_numbers, show_estimate
from attemper.lab.study import probing
from attemper.lab.study.estimate import estimate, makespan, run_seconds
from attemper.lab.study.plan import Plan
from attemper.lab.study.probing import Measured, Probe, Sizes, measure
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.data import RunData
from attemper.lab.training.learner import Learner
from attemper.lab.training.loop import Run

SIZES = Sizes(batches=100, batch_size=64, validation=1000, measured=2000, test=500)
NONE = Measured(setup=7.0, batch=0.1, evaluation=0.001, keeping=0.5, saving=0.25, memory=4 * 1024**3)
PLAN: dict[str, Any] = {
    "task": "digits",
    "model": "vit-digits",
    "seeds": 3,
    "budget": {"epochs": 10},
    "recipes": ["none", {"name": "dropkey", "recipe": "dropkey({0.1, 0.3})"}],
}


def plan(**changes: Any) -> Plan:
    return Plan.from_dict({**PLAN, **changes})


def found() -> Probe:
    slow = dataclasses.replace(NONE, batch=0.2)
    recipes = {"none": NONE, "dropkey(0.1)": slow}
    return Probe(start=5.0, sizes=SIZES, recipes=recipes, resident=10, workers=2, device="x")


# ---------------------------------------------------------------------------------------------------------- arithmetic
def test_a_run_is_its_set_up_its_epochs_its_checkpoints_and_its_end() -> None:
    epoch = 100 * 0.1 + 1000 * 0.001 + 0.5
    assert run_seconds(plan(), SIZES, NONE) == pytest.approx(7 + 10 * epoch + 10 * 0.25 + 2500 * 0.001)


def test_short_epochs_do_not_each_have_a_checkpoint() -> None:
    quick = Measured(setup=0.0, batch=0.001, evaluation=0.0, keeping=0.0, saving=1.0, memory=None)
    assert run_seconds(plan(), SIZES, quick) == pytest.approx(1.0 + 1.0 + 1.0 / 2), "every two seconds, and a last one"


def test_a_plan_is_the_sum_of_its_runs_and_every_configuration_of_a_grid_counts() -> None:
    result = estimate(plan(), found(), gpus=[1, 4, 64])
    none, dropkey = (run_seconds(plan(), SIZES, each) for each in found().recipes.values())
    assert [(row.name, row.runs) for row in result.recipes] == [("none", 3), ("dropkey", 6)]
    assert result.runs == 9
    assert result.run_seconds == pytest.approx(3 * none + 6 * dropkey)
    assert result.hours == pytest.approx(result.run_seconds / 3600)
    assert result.recipes[1].images_per_second == pytest.approx(64 / 0.2)
    assert result.recipes[0].memory == 4 * 1024**3
    assert result.costs == pytest.approx(2 * 7 + 23 * 0.1 + 23 * 0.2)
    one, four, many = result.elsewhere
    assert one.seconds == pytest.approx(5 + result.run_seconds)
    assert four.seconds == pytest.approx(5 + makespan(([none] + 2 * [dropkey]) * 3, 4))
    assert (many.gpus, many.workers, many.busy, many.seconds) == (64, 64, 9, pytest.approx(5 + dropkey))
    assert result.here.workers == 2


def test_runs_that_share_a_gpu_share_its_hours() -> None:
    alone, together = (estimate(plan(), dataclasses.replace(found(), per_gpu=n), gpus=[2]) for n in (1, 3))
    assert together.hours == pytest.approx(alone.hours / 3)
    assert (together.elsewhere[0].gpus, together.elsewhere[0].workers) == (2, 6)
    assert together.elsewhere[0].seconds < alone.elsewhere[0].seconds


def test_workers_take_runs_in_order_and_the_last_one_decides() -> None:
    assert makespan([2, 2, 2, 9], 2) == 2 + 9
    assert makespan([9, 2, 2, 2], 2) == 9
    runs = [float(1 + n % 5) for n in range(40)]
    for workers in (1, 3, 8, 64):
        assert max(*runs, sum(runs) / workers) <= makespan(runs, workers) <= sum(runs) / workers + max(runs)


# ------------------------------------------------------------------------------------------------------------ the probe
class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_probe_tells_apart_what_each_part_of_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def slow(method: Any, seconds: Any) -> Any:
        def slowly(*args: Any, **options: Any) -> Any:
            clock.now += seconds(*args)
            return method(*args, **options)

        return slowly

    monkeypatch.setattr(Learner, "__init__", slow(Learner.__init__, lambda *_: 3.0))
    monkeypatch.setattr(Learner, "learn", slow(Learner.learn, lambda *_: 0.5))
    monkeypatch.setattr(RunData, "epoch", lambda self, epoch, real=RunData.epoch: ticking(real(self, epoch), clock))
    monkeypatch.setattr(
        "attemper.lab.training.validation.evaluate", lambda learner, task, source: tick(clock, len(source))
    )
    monkeypatch.setattr("attemper.lab.training.checkpoint.save_checkpoint", lambda *_: tick(clock, 7))
    task = open_task("digits(train=200, test=50)")
    spec = plan(task=task.name, budget={"epochs": 1, "batch_size": 16}).spec("none", 1e-3, 0)
    data = RunData(spec, task, torch.device("cpu"))
    result = measure(spec, data, torch.device("cpu"), steps=12, clock=clock)
    assert result.setup == pytest.approx(3.0)
    assert result.batch == pytest.approx(0.5 + 0.125), "making the batch is part of it"
    assert result.evaluation == pytest.approx(1.0)
    assert result.saving == pytest.approx(7.0)
    assert (result.keeping, result.memory) == (0.0, None)


def test_what_a_compiler_leaves_on_disk_is_counted_for_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, built = Clock(), []
    begin = Learner.__init__

    def compile_once(self: Learner, *args: Any, **options: Any) -> None:
        built.append(self)
        clock.now += 30.0 if len(built) == 1 else 3.0
        begin(self, *args, **options)

    monkeypatch.setattr(Learner, "__init__", compile_once)
    monkeypatch.setattr(Learner, "compiled", lambda self, network: network)
    task = open_task("digits(train=200, test=50)")
    spec = plan(task=task.name, budget={"epochs": 1, "batch_size": 16, "compile": True}).spec("none", 1e-3, 0)
    result = measure(spec, RunData(spec, task, torch.device("cpu")), torch.device("cpu"), steps=2, clock=clock)
    assert result.setup == pytest.approx(3.0)


def ticking(batches: Any, clock: Clock) -> Any:
    for batch in batches:
        clock.now += 0.125
        yield batch


def tick(clock: Clock, seconds: float) -> dict[str, float]:
    clock.now += seconds
    return {}


def test_steps_that_take_long_are_enough_after_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(), []

    def learn(self: Learner, *batch: Any) -> None:
        calls.append(batch)
        clock.now += 60.0

    monkeypatch.setattr(Learner, "learn", learn)
    task = open_task("digits(train=200, test=50)")
    spec = plan(task=task.name, budget={"epochs": 1, "batch_size": 16}).spec("none", 1e-3, 0)
    result = measure(spec, RunData(spec, task, torch.device("cpu")), torch.device("cpu"), steps=50, clock=clock)
    assert len(calls) == probing.WARM_UP + probing.LEAST
    assert result.batch == pytest.approx(60.0)


class Loading:
    """Data of which four processes read ahead."""

    def __init__(self, data: RunData) -> None:
        self._data, self.task, self.accumulate = data, data.task, data.accumulate
        self.train = SimpleNamespace(workers=4, in_memory=False)
        self.validation = data.validation
        self.epoch = data.epoch


def test_batches_that_were_read_ahead_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(), []

    def learn(self: Learner, *batch: Any) -> None:
        calls.append(batch)
        clock.now += 1.0 if len(calls) > 8 else 0.0

    monkeypatch.setattr(Learner, "learn", learn)
    task = open_task("digits(train=200, test=50)")
    spec = plan(task=task.name, budget={"epochs": 1, "batch_size": 16}).spec("none", 1e-3, 0)
    data = Loading(RunData(spec, task, torch.device("cpu")))
    assert measure(spec, data, torch.device("cpu"), steps=2, clock=clock).batch == pytest.approx(1.0)
    assert len(calls) == probing.WARM_UP + 8 + 8


def test_what_is_counted_is_what_a_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that an estimate multiplies with, against a run that counts."""
    seen = {"batches": 0, "evaluated": 0}
    task = open_task("digits(train=200, test=50)")
    small = plan(task=task.name, budget={"epochs": 3, "batch_size": 32})
    spec = small.spec("none", 1e-3, 0)

    def learn(self: Learner, *batch: Any, real: Any = Learner.learn) -> None:
        seen["batches"] += 1
        real(self, *batch)

    def measured(model: Any, source: Any, real: Any = task.measure) -> Any:
        seen["evaluated"] += len(source)
        return real(model, source)

    monkeypatch.setattr(Learner, "learn", learn)
    monkeypatch.setattr(task, "measure", measured, raising=False)
    Run(spec, task, None, None, torch.device("cpu")).finish()
    per_batch = Measured(setup=0, batch=1, evaluation=0, keeping=0, saving=0, memory=None)
    per_image = dataclasses.replace(per_batch, batch=0, evaluation=1)
    data = RunData(spec, task, torch.device("cpu"))
    sizes = Sizes(
        data.batches_per_epoch, data.batch_size, len(data.validation), len(data.measured_train()), len(task.test())
    )
    assert run_seconds(small, sizes, per_batch) == seen["batches"]
    assert run_seconds(small, sizes, per_image) == seen["evaluated"]


# -------------------------------------------------------------------------------------------------------- noise as data
def test_noise_stands_for_data_of_any_size_without_holding_it() -> None:
    task = open_task("noise(size=16, classes=10, train=1000000, test=100)")
    train, validation = task.split(seed=0, validation=0.1)
    assert (len(train), len(validation), len(task.test())) == (900_000, 100_000, 100)
    images, targets = next(train.batches(torch.arange(8), 8))
    assert (images.shape, images.dtype, int(targets.max())) == ((8, 3, 16, 16), torch.uint8, int(targets.max()))
    assert train.in_memory
    large = open_task("noise(classes=10, train=20000)")
    assert not large.split(0, 0.1)[0].in_memory, "what would not fit is treated as data that does not"
    assert large.fingerprint != task.fingerprint
    with pytest.raises(ParameterError, match="size is 0"):
        open_task("noise(size=0)")


# ----------------------------------------------------------------------------------------------------- the command line
@pytest.mark.usefixtures("quick_workers")
def test_a_plan_is_estimated_on_noise_and_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "estimate",
        "--images",
        "400",
        "--image-size",
        "8",
        "--classes",
        "4",
        "--model",
        "vit-tiny(depth=1)",
    ]
    words += ["--recipes", "cb", "--seeds", "2", "--epochs", "3", "--batch-size", "16", "--steps", "2"]
    assert main([*words, "--workers", "1", "--gpus", "1,8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["runs"]) for row in result["recipes"]] == [("none", 2), ("cb", 2)]
    assert [scale["busy"] for scale in result["elsewhere"]] == [1, 4]
    assert result["run_seconds"] == pytest.approx(sum(row["runs"] * row["seconds"] for row in result["recipes"]))
    assert result["hours"] > 0


def test_people_are_told_hours_memory_and_which_gpus_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attemper.lab.study.processes.gpu_memory", lambda: [80 * 1024**3])
    screen = Console(file=io.StringIO(), width=120)
    show_estimate(screen, estimate(plan(), dataclasses.replace(found(), per_gpu=2), gpus=[1, 64]))
    told = screen.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"dropkey +6 +200.0 ms +320 +3 min 47 s +4.0 GiB", told)
    assert "9 runs, 0.24 GPU-hours on x" in told
    assert "on 1 GPU, 2 runs at a time: " in told
    assert "on 64 GPUs, 128 runs at a time, of which there are 9: 3 min 52 s" in told
    assert "8 of these runs fit on one GPU side by side" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "1,x"], "--gpus is '1,x'; it must be numbers from 1 to 1,000,000"),
        (["--gpus", "0"], "--gpus is '0'"),
        (["--images", "10", "--task", "digits"], "give one of them"),
        (["--steps", "0"], "--steps is 0"),
        (["--model", "convmixer", "--recipes", "dropkey(0.1)"], "dropkey"),
        (["no-such-plan.yaml"], "no-such-plan.yaml cannot be read"),
    ],
)
def test_what_cannot_be_estimated_is_named(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "estimate", *words]) == 2
    assert message in capsys.readouterr().err


def test_images_become_a_task_of_noise() -> None:
    made = EstimateCommand(images=5000, image_size=64, classes=20).planned()
    assert made.task == "noise(size=64, classes=20, train=5000, test=200)"
    assert read_numbers("1, 8,64") == [1, 8, 64]
