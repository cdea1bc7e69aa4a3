"""Studies of action tasks: the metric has its own name everywhere, and what needs images is refused with a reason."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import attemper
from attemper.errors import ParameterError
from attemper.lab.cli import main
from attemper.lab.experiments.looks import token_conditions
from attemper.lab.experiments.running import run_experiment
from attemper.lab.experiments.tables import markdown
from attemper.lab.models.registry import build_model
from attemper.lab.report.study import render
from attemper.lab.study.engine import Training
from attemper.lab.study.export import to_markdown
from attemper.lab.study.live import summary_table
from attemper.lab.study.plan import Plan
from attemper.lab.study.study import Study
from attemper.lab.study.summary import summarise
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.spec import Budget, RunSpec
from summaries import summary

TASK = "planted(train=10, test=4, stride=4)"
MODEL = "encoder(width=16, heads=2, token=last)"
BUDGET = Budget(epochs=1, batch_size=64, lr=3e-3, warmup_epochs=0.0)


def words_of(page: str) -> str:
    """What a reader of a page sees."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL))


def renamed(given: Any) -> Any:
    """A summary whose metric is called mAP."""
    if isinstance(given, dict):
        return {("mAP" if name == "accuracy" else name): renamed(value) for name, value in given.items()}
    if isinstance(given, list):
        return [renamed(value) for value in given]
    return "mAP" if given == "accuracy" else given


def test_a_page_about_map_does_not_speak_of_accuracy() -> None:
    words = words_of(render(renamed(summary(3, seeds=2, epochs=4))))
    assert "Test mAP" in words
    assert "Validation mAP" in words
    assert "MAP" not in words
    assert set(re.findall(r"(\w+) accuracy", words)) == {"Training"}, "the share of right steps, which a batch can tell"


def file_of_actions(folder: Path) -> Path:
    """Eight videos of 30 steps, one annotation of which reaches beyond its video."""
    steps, videos = 30, 8
    values = np.random.default_rng(0).standard_normal((steps * videos, 4)).astype(np.float32)
    segments = [[video, 5.0, 12.0, video % 2] for video in range(videos)] + [[0, 25.0, 30.5, 1]]
    np.savez(
        folder / "some.npz",
        features=values,
        offsets=np.arange(videos + 1) * steps,
        names=np.array([f"v{video}" for video in range(videos)]),
        split=np.array(["train"] * 6 + ["test"] * 2),
        seconds_per_step=1.0,
        segments=np.array(segments),
        classes=np.array(["Jump", "Swim"]),
    )
    return folder / "some.npz"


@pytest.mark.parametrize("protocol", ["online", "segments"])
def test_a_study_is_about_map_from_its_runs_to_its_table(tmp_path: Path, protocol: str) -> None:
    file_of_actions(tmp_path)
    plan = Plan.from_dict(
        {
            "task": f"actions:some.npz(window=4, protocol={protocol})",
            "model": MODEL,
            "recipes": ["none", "dropkey(0.2)"],
            "seeds": 2,
            "budget": {"epochs": 1, "warmup_epochs": 0, "batch_size": 16},
        }
    )
    study = Study(tmp_path / "study", plan, tmp_path)
    study.check()
    study.prepare()
    study.work(device="cpu", log=lambda text: pytest.fail(text))
    found = summarise(study)
    assert found["complete"]
    assert found["metric"] == "mAP"
    assert all(0 <= value <= 1 for row in found["recipes"] for value in row["test"])
    [note] = found["notes"]
    assert "some.npz': of 9 annotated segments, 1 reach beyond their video and are clipped" in note
    screen = Console(width=200, file=io.StringIO())
    screen.print(summary_table(found))
    assert "test mAP %" in screen.file.getvalue()  # type: ignore[attr-defined]
    assert "Test mAP in per cent" in to_markdown(found)
    assert "Test mAP" in words_of(render(found))
    result = next(iter(study.results().values()))
    further = {"mAP@0.3", "mAP@0.7", "per-frame mAP"}
    assert (further <= set(result["test"])) == (protocol == "segments")


def test_an_experiment_names_the_tasks_metric_and_refuses_before_it_trains() -> None:
    task = open_task(TASK)
    found = run_experiment("entropy-cb", task, budget=BUDGET, seeds=1, models={"VIT": MODEL}, device="cpu")
    assert "| test mAP, % |" in markdown(found)
    assert [len(arm["median"]) for arm in found["arms"]] == [2, 2, 2]
    said: list[str] = []
    with pytest.raises(ParameterError, match=r"convmixer.*does not take inputs of 16 tokens"):
        run_experiment("skips", task, budget=BUDGET, seeds=1, models={"VIT": MODEL}, device="cpu", log=said.append)
    assert said == []


def test_condition_numbers_of_the_encoder_are_looked_at_behind_every_block() -> None:
    model = build_model(MODEL, open_task(TASK).shape)
    attemper.apply(model, "graying(where=tokens)")
    assert len(token_conditions(model, torch.randn(4, 16, 16))) == 3, "going in, and behind both blocks"


def test_suites_for_images_are_refused_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = RunSpec(task=TASK, model=MODEL, recipe="none", seed=0, budget=BUDGET, evaluate=("calibration",))
    with pytest.raises(ParameterError, match="these suites need images, not 'planted"):
        Training().check(spec, open_task(TASK))
    folder = str(tmp_path / "one")
    assert main(["train", "--task", TASK, "--model", MODEL, "--epochs", "1", "--folder", folder]) == 0
    assert "mAP train" in capsys.readouterr().out
    assert main(["evaluate", folder, "--suites", "calibration"]) == 2
    assert "--suites: that needs a classifier of images" in capsys.readouterr().err
    assert main(["evaluate", folder]) == 0, "the task's own metrics"
    assert "none: mAP " in capsys.readouterr().out


def test_verify_says_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", "planted"]) == 0
    assert "1,782 test samples of 16 tokens × 16 features and of 6 classes" in capsys.readouterr().out
