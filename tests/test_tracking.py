"""Tracking: curves reach the trackers, a run that goes on goes on in them, and no tracker can harm a run."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from attemper.errors import AttemperError, ParameterError
from attemper.lab.cli import main
from attemper.lab.study.settings import Settings, read_settings
from attemper.lab.study.study import Study
from attemper.lab.tracking import registry
from attemper.lab.tracking.registry import check_trackers, list_trackers, make_tracker
from attemper.lab.training.schedule import learning_rate
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.tracking import follow
from study_fakes import FakeEngine, make_plan

SPEC = RunSpec(task="digits", model="vit-digits", recipe="dropkey(0.1)", seed=3, budget=Budget(epochs=2))


def event(epoch: int, step: int, loss: float | None = 1.0, **more: Any) -> dict[str, Any]:
    return {"epoch": epoch, "epochs": 2, "step": step, "steps": 10, "loss": loss, "validation": None, **more}


def told(tmp_path: Path, trackers: tuple[str, ...], events: list[dict[str, Any]], result: Any = None) -> list[str]:
    """Have trackers follow a run that tells these events; what was said comes back."""
    said: list[str] = []
    with follow(
        trackers, SPEC, key="f00d" * 5, project="p", name="a run", folder=tmp_path, log=said.append
    ) as follower:
        for each in events:
            follower.progress(each)
        if result is not None:
            follower.result(result)
    return said


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Name → step → value, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: {point.step: point.value for point in read.Scalars(tag)} for tag in read.Tags()["scalars"]}


def test_tensorboard_gets_curves_and_the_configuration(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    validation = {"accuracy": 0.5, "loss": 0.75}
    events = [event(1, 5), event(1, 0, warning="?"), event(1, 10, 0.5, validation=validation), event(2, 10, None)]
    result = {"test": {"accuracy": 0.25, "loss": None}}
    assert told(tmp_path, ("tensorboard",), events, result) == []
    folder = tmp_path / "tensorboard" / "a-run-f00df0"
    assert scalars(folder) == {
        "train/loss": {5: 1.0, 10: 0.5},
        "train/lr": {step: pytest.approx(learning_rate(SPEC.budget, step - 1, 10)) for step in (5, 10)},
        "validation/accuracy": {10: 0.5},
        "validation/loss": {10: 0.75},
        "final/test/accuracy": {10: 0.25},
    }
    read = EventAccumulator(str(folder))
    read.Reload()
    text = read.Tensors("run/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| recipe | dropkey(0.1) |" in text
    assert "| budget.epochs | 2 |" in text


def test_a_run_that_goes_on_from_a_checkpoint_has_every_step_once(tmp_path: Path) -> None:
    told(tmp_path, ("tensorboard",), [event(1, 5, 5.0), event(1, 10, 4.0), event(2, 5, 9.0)])
    told(tmp_path, ("tensorboard",), [event(2, 2, 3.0), event(2, 7, 2.0)])
    (folder,) = (tmp_path / "tensorboard").iterdir()
    assert scalars(folder)["train/loss"] == {5: 5.0, 10: 4.0, 12: 3.0, 17: 2.0}


class Module(types.ModuleType):
    """Stands for wandb or trackio, and writes down how it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.calls.append(("log", {"step": step, **values}))

    def finish(self) -> None:
        self.calls.append(("finish", {}))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_are_called_by_the_functions_that_they_share(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Module(name)
    monkeypatch.setitem(sys.modules, name, module)
    assert told(tmp_path, (name,), [event(1, 5), event(1, 10, 0.5)], {"test": {"accuracy": 0.25}}) == []
    assert [call for call, _ in module.calls] == ["init", "log", "log", "log", "finish"]
    init = module.calls[0][1]
    assert (init["project"], init["resume"], init["config"]["budget.epochs"]) == ("p", "allow", 2)
    assert ("f00df0" in init["name"]) if name == "trackio" else init["id"] == "f00d" * 5
    assert module.calls[2][1]["train/loss"] == 0.5
    assert module.calls[3][1] == {"step": 10, "final/test/accuracy": 0.25}


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module("wandb")
    module.log = lambda *args, **options: 1 / 0  # type: ignore[method-assign,assignment]
    monkeypatch.setitem(sys.modules, "wandb", module)
    said = told(tmp_path, ("wandb", "tensorboard"), [event(1, 5), event(1, 10)])
    assert said == ["a run is no longer tracked by wandb: ZeroDivisionError: division by zero"]
    (folder,) = (tmp_path / "tensorboard").iterdir()
    assert scalars(folder)["train/loss"] == {5: 1.0, 10: 1.0}


def test_a_tracker_that_does_not_exist_or_lacks_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match=r"There is no tracker 'tensorbord'. Did you mean 'tensorboard'"):
        check_trackers(["tensorbord"])
    with pytest.raises(ParameterError, match="names tensorboard twice"):
        check_trackers(["tensorboard", "tensorboard"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ParameterError, match=r"--track wandb needs 'wandb', .* pip install wandb"):
        check_trackers(["wandb"])


class Mine:
    """A tracker of somebody else's."""

    seen: list[Any] = []

    def start(self, run: Any, step: int) -> None:
        self.seen.append((run.name, step))

    def log(self, values: Any, step: int) -> None: ...

    def finish(self, values: Any) -> None:
        self.seen.append("finish")


def test_another_package_can_add_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("mine", f"{__name__}:Mine", "attemper.trackers")
    monkeypatch.setattr(registry, "_added", lambda: {"mine": entry})
    assert list_trackers()["mine"] == f"from {__name__}:Mine"
    Mine.seen.clear()
    told(tmp_path, ("mine",), [event(1, 5)])
    assert Mine.seen == [("a run", 5), "finish"]
    unfit = importlib.metadata.EntryPoint("unfit", "builtins:dict", "attemper.trackers")
    monkeypatch.setattr(registry, "_added", lambda: {"unfit": unfit})
    with pytest.raises(AttemperError, match="lacks start, log, finish"):
        make_tracker("unfit")


# ------------------------------------------------------------------------------------------------------------- studies
def test_every_run_of_a_study_is_tracked_and_the_study_remembers_it(tmp_path: Path) -> None:
    settings = Settings(probe_every=7, track=("tensorboard",))
    study = Study(tmp_path, make_plan(["none", "cb"], seeds=2), engine=FakeEngine(), settings=settings)
    study.check()
    study.prepare()
    study.work()
    folders = sorted((tmp_path / "tensorboard").iterdir())
    assert [folder.name[:-7] for folder in folders] == ["cb-cb-seed-0", "cb-cb-seed-1", "none-seed-0", "none-seed-1"]
    assert set(scalars(folders[0])["train/loss"]) == {1, 2, 3, 4}
    assert "final/test/accuracy" in scalars(folders[0])
    resumed = Study(tmp_path)
    assert resumed.settings == settings
    assert resumed.engine.probe_every == 7  # type: ignore[attr-defined]


def test_what_is_not_remembered_leaves_no_file_and_what_is_damaged_is_named(tmp_path: Path) -> None:
    Study(tmp_path, make_plan(), engine=FakeEngine(), settings=Settings(track=("tensorboard",))).prepare()
    assert read_settings(tmp_path).track == ("tensorboard",)
    Study(tmp_path, make_plan(), engine=FakeEngine(), settings=Settings()).prepare()
    assert not (tmp_path / "settings.json").exists()
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(AttemperError, match=r"settings.json cannot be read .*; remove it"):
        Study(tmp_path, make_plan(), engine=FakeEngine())


def test_a_missing_tracker_stops_a_study_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--track", "tensorbord"]) == 2
    assert "Did you mean 'tensorboard'" in capsys.readouterr().err
    assert main(["train", "--track", "tensorboard"]) == 2
    assert "--track tensorboard needs a place for its files: give a --folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_one_run_can_be_tracked_alone(tmp_path: Path) -> None:
    words = ["train", "--task", "digits(train=100, test=50)", "--epochs", "2", "--folder", str(tmp_path)]
    assert main([*words, "--track", "tensorboard"]) == 0
    (folder,) = (tmp_path / "tensorboard").iterdir()
    assert folder.name.startswith("none-seed-0-")
    found = scalars(folder)
    assert len(found["validation/accuracy"]) == 2
    assert len(found["final/test/accuracy"]) == 1
