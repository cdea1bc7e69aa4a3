"""Which teachers a run can have: keys that tell them apart, what is refused and why, and what an estimate does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from attemper.errors import ParameterError, UnreadableError
from attemper.files import WEIGHTS, read_weights
from attemper.lab.cli import main
from attemper.lab.cli.estimate import EstimateCommand
from attemper.lab.study.plan import Plan
from attemper.lab.study.probing import measure
from attemper.lab.study.study import Study
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.check import check_run
from attemper.lab.training.data import RunData
from attemper.lab.training.hashes import with_hashes
from attemper.lab.training.learner import Learner
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.teacher import open_teacher, with_untrained_teacher
from taught import TASK, TEACHER, TINY, saved, spec

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture
def weights(tmp_path: Path) -> str:
    return saved(tmp_path / "teacher.safetensors")


# --------------------------------------------------------------------------------------------------------------- keys
def test_runs_with_other_teachers_have_other_keys_and_the_place_of_a_file_does_not_count(tmp_path: Path) -> None:
    task = open_task(TASK)
    files = [saved(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    one, moved, other = (with_hashes(spec(teacher_weights=file), task) for file in files)
    assert one.key("x") == moved.key("x") != other.key("x")
    assert one.budget.teacher_hash == moved.budget.teacher_hash
    assert RunSpec.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    softer = dataclasses.replace(one, budget=dataclasses.replace(one.budget, distillation="soft"))
    assert softer.key("x") != one.key("x")
    with pytest.raises(ParameterError, match=r"has no key before the teacher's weights are known"):
        spec(teacher_weights=files[0]).key("x")


def test_a_teacher_comes_from_every_kind_of_file_and_from_the_folder_of_a_run(tmp_path: Path) -> None:
    task, plain = open_task(TASK), str(tmp_path / "teacher.pt")
    run(dataclasses.replace(spec(teacher=None), model=TEACHER), task, folder=tmp_path)
    torch.save(read_weights(tmp_path).tensors, plain)
    files = (str(tmp_path), str(tmp_path / WEIGHTS), plain)
    hashes = {with_hashes(spec(teacher_weights=file), task).budget.teacher_hash for file in files}
    assert len(hashes) == 1
    assert hashes != {None}


def test_weights_that_changed_since_a_run_was_planned_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "t", seed=1)
    chosen = with_hashes(spec(teacher_weights=file), open_task(TASK))
    saved(tmp_path / "t", seed=2)
    with pytest.raises(ParameterError, match=rf"teacher_hash is {chosen.budget.teacher_hash}, .* others than this run"):
        run(chosen, open_task(TASK))


def test_a_study_knows_its_teacher_by_its_weights(weights: str, tmp_path: Path) -> None:
    plan = Plan.from_dict(
        {
            "task": TASK,
            "model": TINY,
            "seeds": 1,
            "budget": {"epochs": 1, "batch_size": 20, "teacher": TEACHER, "teacher_weights": weights},
            "recipes": ["none"],
        }
    )
    study = Study(tmp_path / "study", plan)
    study.check()
    study.prepare()
    study.work()
    assert not study.missing()
    Path(weights).unlink()
    assert list(Study(tmp_path / "study").results()) == list(study.runs), "a finished study needs no teacher any more"
    held = Study(tmp_path / "study").plan.budget.teacher_hash
    assert held == study.plan.budget.teacher_hash is not None


# ------------------------------------------------------------------------------------------------------------ refusals
def test_a_teacher_without_weights_is_refused() -> None:
    for text in (TEACHER, "timm:resnet10t", "hf:vit"):
        with pytest.raises(ParameterError, match=r"has no weights\. Give teacher_weights"):
            check_run(spec(teacher=text), open_task(TASK))


def test_a_teacher_of_another_number_of_classes_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "t", classes=7)
    with pytest.raises(ParameterError, match="are for 7 classes, and the task has 10"):
        check_run(spec(teacher_weights=file), open_task(TASK))
    with pytest.raises(ParameterError, match=r"regnety_160\.deit_in1k are for 1000 classes, and the task has 10"):
        check_run(spec(teacher="timm:regnety_160.deit_in1k(pretrained=true)"), open_task(TASK))
    with pytest.raises(ParameterError, match="predicts 7 classes, and the task has 10"):
        check_run(spec(teacher="timm:resnet10t(pretrained=false, num_classes=7)"), open_task(TASK))


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path, weights: str) -> None:
    with pytest.raises(ParameterError, match=r"are not those of the teacher 'vit-digits': '.*' is"):
        check_run(spec(teacher="vit-digits", teacher_weights=weights), open_task(TASK))
    wider = TEACHER.replace("width=8", "width=9")
    with pytest.raises(ParameterError, match=r"is \(8, .*\) and must be \(9, "):
        check_run(spec(teacher=wider, teacher_weights=weights), open_task(TASK))
    run(dataclasses.replace(spec(teacher=None), model=TINY), open_task(TASK), folder=tmp_path)
    other = TINY.replace("heads=2", "heads=4")  # the same shapes
    with pytest.raises(ParameterError, match=r"teacher is '.*heads=4.* says that it holds a '.*heads=2"):
        check_run(spec(teacher=other, teacher_weights=str(tmp_path / WEIGHTS)), open_task(TASK))
    (tmp_path / "text").write_text("no weights")
    for path in ("nowhere.safetensors", str(tmp_path / "text")):
        with pytest.raises(UnreadableError, match=rf"^teacher_weights: .*'{path}' (to read weights|cannot be read as)"):
            check_run(spec(teacher_weights=path), open_task(TASK))


def test_timms_weights_that_cannot_be_downloaded_are_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model(name: str, *, pretrained: bool, **options: Any) -> None:
        if "img_size" in options:
            raise TypeError("an unexpected keyword argument 'img_size'")
        assert pretrained
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(timm, "create_model", create_model)
    task = open_task("noise(size=8, classes=1000, train=2000, test=8)")
    with pytest.raises(ParameterError, match=r"could not be had: no route to the hub.* bring its cache along .* file"):
        check_run(spec(teacher="timm:regnety_160.deit_in1k(pretrained=true)"), task)
    with pytest.raises(ParameterError, match=r"no trained weights of regnety_160\.mine. It has: regnety_160\."):
        check_run(spec(teacher="timm:regnety_160.mine(pretrained=true)"), task)


def test_a_teacher_has_weights_from_one_place_only(weights: str) -> None:
    for text in ("true", "false"):
        model = f"timm:vit_tiny_patch16_224(pretrained={text})"
        with pytest.raises(ParameterError, match="are weights as well: leave out one of them"):
            check_run(spec(teacher=model, teacher_weights=weights), open_task(TASK))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"distillation": "hart"}, "distillation is 'hart'; it must be 'hard' or 'soft'"),
        ({"distillation_alpha": 1.5}, "distillation_alpha is 1.5; it must be from 0 to 1"),
        ({"distillation": "soft", "temperature": 0}, "temperature is 0.0; it must be above 0"),
        ({"temperature": 2.0}, "temperature is 2.0; only soft distillation has one"),
        ({"teacher": "vit-digits("}, r"teacher is 'vit-digits\('"),
        ({"teacher": None, "teacher_weights": "x"}, "teacher_weights is 'x', and there is no teacher"),
        ({"teacher": None, "distillation": "soft"}, "distillation is 'soft', and there is no teacher"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(budget: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        spec(**budget)


def test_what_is_wrong_with_a_teacher_is_said_on_the_command_line(
    weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--task", TASK, "--model", TINY, "--epochs", "1", "--device", "cpu", "--teacher", TEACHER]
    assert main([*words, "--teacher-weights", weights, "--distillation", "soft", "--temperature", "2"]) == 0
    assert main(words) == 2
    assert "has no weights" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ estimates
def test_an_estimate_needs_no_download() -> None:
    budget = Budget(teacher="timm:resnet10t(pretrained=true, drop_rate=0.0)")
    assert with_untrained_teacher(budget).teacher == "timm:resnet10t(drop_rate=0.0, pretrained=False)"
    assert open_teacher(with_untrained_teacher(budget), InputShape(3, 32, 32, 10)).training is False
    assert with_untrained_teacher(Budget()) == Budget()
    plan = Path(__file__).parents[1] / "plans" / "deit-small-distilled.yaml"
    teacher = EstimateCommand(plan=plan, images=2000).planned().budget.teacher
    assert teacher == "timm:regnety_160.deit_in1k(pretrained=False)"


def test_the_measured_step_has_the_teacher_in_it(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    taught = Learner.taught
    monkeypatch.setattr(Learner, "taught", lambda self, inputs: asked.append(len(inputs)) or taught(self, inputs))
    chosen, task = spec(teacher_weights=weights), open_task(TASK)
    measure(chosen, RunData(chosen, task, CPU), CPU, steps=4)
    assert len(asked) >= 4
    assert set(asked) == {chosen.budget.batch_size}
