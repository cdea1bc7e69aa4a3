"""Sound from data to page: a run learns tones, its confusion matrix is kept and shown, the published table runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import attemper
from attemper.lab.cli import main
from attemper.lab.cli.progress_bar import PreparationBar
from attemper.lab.models.registry import build_model
from attemper.lab.report.study import render
from attemper.lab.study.plan import Plan
from attemper.lab.study.published import find_table
from attemper.lab.study.study import Study
from attemper.lab.study.summary import summarise
from attemper.lab.tasks.base import Detailed
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from sounds import genres
from summaries import EVIL, summary
from test_published import recipes_of
from test_report import whole

pytestmark = pytest.mark.usefixtures("one_thread")

CONFUSION = [[8, 2, 0], [1, 9, 0], [0, 3, 7]]


def small(recipe: str = "none", **changes: Any) -> RunSpec:
    given = {"epochs": 3, "batch_size": 16, "lr": 3e-3, "warmup_epochs": 0.5, **changes}
    return RunSpec(
        task="tones", model="encoder(width=32, heads=4)", recipe=recipe, seed=0, budget=Budget.from_dict(given)
    )


# --------------------------------------------------------------------------------------------------------------- a run
@pytest.mark.parametrize("augment", ["none", "spec(0.05, freq=0.05)"])
def test_a_small_encoder_learns_tones_in_a_few_epochs(augment: str) -> None:
    result = run(small(epochs=6, augment=augment), open_task("tones"), device="cpu")
    assert result["test"]["accuracy"] > 0.6, "chance is 0.17"


def test_a_result_holds_the_confusion_matrix_of_the_test_set() -> None:
    task = open_task("tones")
    assert isinstance(task, Detailed)
    result = run(small(epochs=1), task, device="cpu")
    details = result["test_details"]
    assert details["classes"] == list(task.classes)
    confusion = torch.tensor(details["confusion"])
    assert confusion.sum(1).tolist() == [24] * 6, "a row for every class"
    assert int(confusion.diagonal().sum()) / 144 == pytest.approx(result["test"]["accuracy"])


def test_rows_are_the_classes_and_columns_what_they_were_taken_for() -> None:
    task = open_task("tones")

    class Fixed(torch.nn.Module):
        """Takes everything for the third class."""

        def __init__(self) -> None:
            super().__init__()
            self.scores = torch.nn.Parameter(F.one_hot(torch.tensor(2), 6).float())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scores.expand(len(x), -1)

    details = task.details(Fixed(), task.test())
    assert details is not None
    assert details["confusion"] == [[0, 0, 24, 0, 0, 0]] * 6


def test_tasks_of_many_classes_have_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    task = open_task("tones")
    monkeypatch.setattr("attemper.lab.tasks.classification.MOST_DETAILED", 5)
    assert task.details(torch.nn.Linear(1, 1), task.test()) is None
    assert "test_details" not in run(small(epochs=1), task, device="cpu")


# ----------------------------------------------------------------------------------------------------- summary and page
def test_matrices_of_seeds_are_added_up_and_older_results_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {
        "task": "tones(train=60, test=12)",
        "model": "encoder(width=8, heads=2)",
        "seeds": 2,
        "budget": {"epochs": 1, "batch_size": 16},
        "recipes": ["none", "dropkey(0.1)"],
    }
    study = Study(tmp_path, Plan.from_dict(plan))
    study.prepare()
    study.work()
    rows = summarise(study)["recipes"]
    for row in rows:
        runs = [result for result in study.results().values() if result["spec"]["recipe"] == row["recipe"]]
        assert row["details"]["runs"] == 2
        expected = sum(torch.tensor(result["test_details"]["confusion"]) for result in runs)
        assert row["details"]["confusion"] == expected.tolist()
    assert '<h2 id="classes-heading">' in render(summarise(study))
    older = {key: {**result} for key, result in study.results().items()}
    for result in older.values():
        del result["test_details"]
    monkeypatch.setattr(Study, "results", lambda self: older)
    assert all("details" not in row for row in summarise(study)["recipes"])
    assert "classes-heading" not in render(summarise(study))


def detailed(change: Callable[[dict[str, Any]], None] = lambda given: None) -> dict[str, Any]:
    given = summary(4)
    for at, recipe in enumerate(given["recipes"]):
        confusion = [list(counts) for counts in CONFUSION]
        confusion[0][0] += at
        recipe["details"] = {"classes": ["blues", "jazz", "rock"], "confusion": confusion, "runs": 5}
    change(given)
    return given


def test_the_page_shows_classes_of_none_and_of_the_best_other_recipe() -> None:
    given = detailed()
    outline = whole(render(given))
    best = max(given["recipes"][1:], key=lambda recipe: recipe["mean"])["name"]
    assert "Confusion, none" in outline.text
    assert f"Confusion, {best}" in outline.text
    assert outline.text.count("Confusion, ") == 2
    assert "rock taken for jazz: 3 of 10, 30.0 %" in outline.text
    assert re.search(r"rock\s*2\s*70\.0", outline.text), "the table has test samples, once, and the share of none"


def test_a_page_without_a_baseline_or_with_other_classes_stands() -> None:
    def alone(given: dict[str, Any]) -> None:
        for recipe in given["recipes"][1:]:
            recipe.pop("details")

    def odd(given: dict[str, Any]) -> None:
        given["recipes"][1]["details"] = {"classes": ["a"], "confusion": [[1], [2]]}
        given["recipes"][2]["details"] = {"classes": ["a", "b", "c"], "confusion": [[1, "x", 3]] * 3}
        given["recipes"][3]["details"] = None

    def empty(given: dict[str, Any]) -> None:
        for recipe in given["recipes"]:
            recipe["details"]["confusion"][1] = [0, 0, 0]

    for change in (alone, odd, empty):
        assert "Confusion, none" in whole(render(detailed(change))).text


def test_names_of_classes_cannot_break_the_page() -> None:
    def evil(given: dict[str, Any]) -> None:
        for recipe in given["recipes"]:
            recipe["details"]["classes"] = [EVIL, "b" * 300, ""]

    text = render(detailed(evil))
    whole(text)
    assert "<script>window.hurt" not in text


# ------------------------------------------------------------------------------------------------------ published table
@pytest.mark.parametrize("row", find_table("explicit-gtzan").rows, ids=lambda row: row.name)
def test_every_row_of_the_published_table_trains_on_tones(row: Any) -> None:
    plan = find_table("explicit-gtzan").plan("smoke")
    [recipe] = recipes_of(plan)[row.name]
    task = open_task(plan["task"])
    model = build_model(plan["model"], task.shape)
    tempered = attemper.apply(model, recipe)
    inputs, targets = task.to_input(task.test().mel[:8]), task.test().targets[:8]
    loss = tempered.loss(lambda: model(inputs), lambda out: F.cross_entropy(out, targets[: len(out)]))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_the_table_says_that_its_tokens_are_not_the_papers() -> None:
    table = find_table("explicit-gtzan")
    assert "VGGish" in table.caveats[0]
    assert len(table.rows) == 13
    assert table.plan("full")["task"] == "mel:gtzan-mel.npz"


# -------------------------------------------------------------------------------------------------------- command line
def test_data_prepare_says_what_was_skipped_and_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = genres(tmp_path / "genres")
    (folder / "jazz" / "jazz.00054.wav").write_bytes(b"")
    for _ in range(2):
        assert main(["data", "prepare", "audio:genres(seconds=1, broken=skip)", "--data", str(tmp_path)]) == 0
        said = capsys.readouterr()
        assert "10 training samples and 2 test samples of 4 tokens × 512 features and of 2 classes" in said.out
        assert "1 of 13 audio files" in said.out
        assert said.out.count("'jazz/jazz.00054.wav' (the file is empty)") == 1
    words = [
        "train",
        "--task",
        "audio:genres(seconds=1, broken=skip)",
        "--data",
        str(tmp_path),
        "--model",
        "encoder(width=8)",
    ]
    assert main([*words, "--epochs", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert "note: 1 of 13 audio files" in said.err
    assert "note:" not in said.out


def test_bad_sound_ends_with_two_and_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = genres(tmp_path / "genres", each=2)
    for file in (folder / "jazz").iterdir():
        file.write_bytes(b"")
    assert main(["data", "prepare", "audio:genres", "--data", str(tmp_path)]) == 2
    assert "2 of 4 audio files" in capsys.readouterr().err
    assert main(["data", "prepare", "audio:genres(broken=skip)", "--data", str(tmp_path)]) == 2
    assert "none of the files can be read of 1 classes: 'jazz'" in capsys.readouterr().err


def test_the_bar_is_there_on_a_terminal_while_a_step_is_under_way_only() -> None:
    for terminal in (True, False):
        console = Console(force_terminal=terminal, width=80, record=True)
        bar = PreparationBar(console)
        with console.capture() as captured:
            for done in range(4):
                bar.progress("computing spectrograms", done, 3)
                assert (bar._bar is not None) == (terminal and done < 3)
        assert ("computing spectrograms" in captured.get()) == terminal


def test_tones_can_be_trained_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "train",
        "--task",
        "tones(train=60, test=12)",
        "--model",
        "encoder(width=8, heads=2)",
        "--batch-size",
        "16",
    ]
    assert main([*words, "--epochs", "1", "--augment", "spec"]) == 0
    assert "none: accuracy train" in capsys.readouterr().out
    assert main([*words, "--augment", "crop-flip"]) == 2
    assert "There is no augmentation 'crop-flip'" in capsys.readouterr().err
    assert main([*words, "--evaluate", "robustness"]) == 2
    assert "these suites need images" in capsys.readouterr().err
    assert main(["train", "--task", "tones"]) == 2
    assert "'vit-digits' does not take inputs of 16 tokens × 128 features" in capsys.readouterr().err
