"""A trained model that answers questions, used without its data: `attemper predict`."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attemper.lab.cli import main
from attemper.lab.evaluation.trained import load_predicting
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.vqa.task import QuestionTask
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from attemper.tempering.outputs import logits_of
from question_files import questions_of, write_v2

MODEL = "two-stream(width=16, depth=1, image_depth=1, heads=2, patch=4)"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_v2(tmp_path_factory.mktemp("data") / "v2")


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "one"
    spec = RunSpec(task=f"vqa:{data}(size=16)", model=MODEL, recipe="cb", seed=0, budget=Budget(epochs=1, batch_size=8))
    run(spec, open_task(spec.task, data.parent), folder=folder)
    return folder


def predict(trained: Path, images: Path, *more: str) -> dict[str, Any]:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(["predict", str(trained), "--images", str(images), "--device", "cpu", "--json", *more]) == 0
    held: dict[str, Any] = json.loads(told.getvalue())
    return held


def test_questions_of_a_file_are_answered_as_the_task_measures_them(data: Path, trained: Path, tmp_path: Path) -> None:
    task = open_task(f"vqa:{data}(size=16)", data.parent)
    assert isinstance(task, QuestionTask)
    test, out = task.test(), tmp_path / "results.json"
    ((stored, _),) = test.batches(torch.arange(len(test)), len(test))
    with torch.no_grad():
        logits = logits_of(load_predicting(trained).model(task.to_input(stored))).double()
    best = logits.sigmoid().max(-1)
    predict(trained, data / "val2014", "--questions", str(questions_of(data, "val2014")), "--out", str(out))
    found = json.loads(out.read_text())
    asked = json.loads(questions_of(data, "val2014").read_text())["questions"]
    assert [each["question_id"] for each in found] == [each["question_id"] for each in asked], "VQAv2's results"
    assert [each["answer"] for each in found] == [task.book.answers[at] for at in best.indices.tolist()]
    torch.testing.assert_close(
        torch.tensor([each["probability"] for each in found], dtype=torch.float64), best.values, atol=1e-5, rtol=0
    )


def test_one_question_is_asked_of_every_image(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    for file in sorted((data / "val2014").iterdir())[:2]:
        (tmp_path / "photos" / f"={file.name}").write_bytes(file.read_bytes())
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no image")
    out = tmp_path / "answers.csv"
    words = ["--question", "What color is the zeppelin?", "--out", str(out)]
    assert main(["predict", str(trained), "--images", str(tmp_path / "photos"), *words]) == 0
    told = capsys.readouterr().out
    assert "the model does not know 2 words of the questions: the; zeppelin" in told
    assert "skipped, since they cannot be decoded (1): broken.jpg" in told
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["file"][:2] for row in rows] == ["'=", "'="], "no formula for a spreadsheet"
    assert all(0 < float(row["probability"]) < 1 for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "either --question TEXT, of all of them, or --questions FILE"),
        (["--question", "Is it?", "--questions", "x.json"], "either --question TEXT"),
        (["--question", " "], "--question is empty"),
        (["--question", "Is it?", "--out", "answers"], "ends with .csv or .json"),
        (["--questions", "nowhere.json"], "nowhere.json"),
        (["--questions", "{train}"], "12 questions are about images that are not there"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    words: list[str], said: str, data: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = questions_of(data, "train2014")
    filled = [word.format(train=train) for word in words]
    assert main(["predict", str(trained), "--images", str(data / "val2014"), *filled]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")
