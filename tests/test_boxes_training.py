"""Whole runs on boxes: they learn, go on after an interruption with the same figures, and end as a team as alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attemper.errors import UnreadableError
from attemper.lab.cli import main
from attemper.lab.evaluation.trained import load_trained
from attemper.lab.report.study import render
from attemper.lab.study.comparison import compare
from attemper.lab.study.defaults import completed, with_defaults
from attemper.lab.study.in_process import InProcess
from attemper.lab.study.live import SilentView
from attemper.lab.tasks.boxes.geometry import to_centres
from attemper.lab.tasks.boxes.task import DEVIATION, MEAN
from attemper.lab.tasks.registry import list_tasks, open_task
from attemper.lab.training import loop
from attemper.lab.training.graph import can_capture
from attemper.lab.training.loop import run
from attemper.lab.training.ranks import joined
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.validation import measure
from coco_files import coco_set
from endings import assert_same_end, timeless
from teams import team

pytestmark = pytest.mark.usefixtures("one_thread")
TASK = "boxes(train=30, test=12)"
MODEL = "anchor-detr(width=16, depth=1, heads=2)"


def spec(recipe: str = "dropkey(0.2)", task: str = TASK, **budget: Any) -> RunSpec:
    given = {
        "epochs": 3,
        "batch_size": 8,
        "lr": 2e-3,
        "warmup_epochs": 1,
        "augment": "flip+crop+photometric",
        "clip": 1.0,
    }
    return RunSpec(task=task, model=MODEL, recipe=recipe, seed=3, budget=Budget(**{**given, **budget}))


class StopError(Exception):
    pass


def test_a_run_that_is_stopped_goes_on_with_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)
    chosen = spec("dropkey(0.2) + consistency", ema=0.9, accumulate=2)
    whole = run(chosen, open_task(TASK), folder=tmp_path / "whole")

    def stop(event: dict[str, Any]) -> None:
        if event["validation"] is not None and event["epoch"] == 2:
            raise StopError

    with pytest.raises(StopError):
        run(chosen, open_task(TASK), folder=tmp_path / "cut", progress=stop)
    torch.manual_seed(9)
    resumed = run(chosen, open_task(TASK), folder=tmp_path / "cut")
    assert timeless(resumed) == timeless(whole)
    assert_same_end(tmp_path / "cut", tmp_path / "whole")
    assert whole["metric"] == "AP"
    assert whole["learning"] == "recall"
    assert [row["name"] for row in whole["test_details"]["table"]["rows"]] == ["square", "disc", "cross"]
    assert len(whole["test_details"]["pictures"]) == 4
    assert whole["flops"]["step"] > 3 * whole["flops"]["forward"]


class Extent(nn.Module):
    """Takes everything that is brighter or darker than the noise for one square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        pixels = images[:, :3] * torch.tensor(DEVIATION)[:, None, None] + torch.tensor(MEAN)[:, None, None]
        there = ((pixels - 100 / 255).abs().amax(1) > 35 / 255) & (images[:, 3] > 0)
        ends = []
        for along in (there.any(1), there.any(2)):  # columns, rows
            first, last = along.int().argmax(1), along.shape[1] - along.flip(1).int().argmax(1)
            ends.append((first / along.shape[1], last / along.shape[1]))
        corners = torch.stack([ends[0][0], ends[1][0], ends[0][1], ends[1][1]], 1)
        sure = there.float().mean((1, 2))[:, None] + self.weight
        scores = torch.cat([10 * sure, torch.zeros(len(images), 3)], 1)
        return {"logits": scores[:, None], "boxes": to_centres(corners)[:, None]}


def as_a_team(chosen: RunSpec) -> Any:
    """The metrics of a model that finds something, and a whole run, by this process and those beside it."""
    torch.set_num_threads(1)
    with joined() as ranks:
        task = open_task(chosen.task)
        with torch.no_grad():
            first = measure(Extent(), task, task.test(), ranks)
        result = run(chosen, task, device="cpu")
        return first, result["curve"], result["test"]


def test_two_processes_have_the_metrics_of_one() -> None:
    chosen = spec("none", epochs=1)
    first, curve, _ = as_a_team(chosen)
    assert first["AP50"] > 0, "there is something to compare"
    both = team(2, as_a_team, chosen)
    for found, (epoch,), test in both:
        assert found == {
            name: None if value is None else pytest.approx(value, abs=1e-6) for name, value in first.items()
        }
        assert test == both[0][2], "every rank has the result"
        assert epoch["train_loss"] == pytest.approx(curve[0]["train_loss"], abs=2e-3)
        assert epoch["train_accuracy"] == pytest.approx(curve[0]["train_accuracy"], abs=0.05)


def test_a_comparison_on_files_to_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The smoke test of the task: data, two recipes, the page, an evaluation of one run."""
    coco_set(tmp_path / "animals", 12, 5)
    task = f"coco:{tmp_path / 'animals'}(size=32)"
    model = "anchor-detr(width=16, patch=8, depth=1, heads=2)"
    given = {"task": task, "model": model, "seeds": 1, "recipes": ["none", "dropkey(0.1)"], "budget": {"epochs": 1}}
    plan = completed(given, tmp_path)
    assert "augment flip+crop+photometric" in plan.notes[0]
    folder = tmp_path / "study"
    summary = compare(plan, folder=folder, root=tmp_path, executor=InProcess("cpu"), view=SilentView(), costs=False)
    page = render(summary)
    for there in ("test AP, %", "AP by class", "data:image/", "Training recall", "Test items", "white"):
        assert there in page
    assert summary["metric"] == "AP"
    data = page.partition('id="summary">')[2].partition("</script>")[0]
    assert "by class" not in data
    assert "pictures" not in data, "they are in the page as images, and not once more as data"
    run_folder = next((folder / "weights").iterdir())
    capsys.readouterr()
    assert main(["evaluate", str(run_folder), "--data", str(tmp_path)]) == 0
    assert "AP50" in capsys.readouterr().out
    held = json.loads((run_folder / "evaluation.json").read_text())
    assert held["metrics"].keys() == {"AP", "AP50", "AP75", "AP small", "AP medium", "AP large", "loss"}
    assert "AP by class" in (run_folder / "evaluation.html").read_text()
    with pytest.raises(UnreadableError, match="which is something else than images with a class"):
        load_trained(run_folder)
    assert main(["predict", str(run_folder), "--images", str(tmp_path / "animals")]) == 0
    assert "found with at least 50 %" in capsys.readouterr().out


@pytest.mark.slow
def test_it_learns_to_find_shapes() -> None:
    chosen = spec("none", "boxes(train=100, test=20)", epochs=6, augment="flip", warmup_epochs=0.5)
    result = run(dataclasses.replace(chosen, model="anchor-detr(width=32, depth=1)"), open_task(chosen.task))
    first, last = result["curve"][0], result["curve"][-1]
    assert last["train_accuracy"] > first["train_accuracy"] + 0.1
    assert result["test"]["AP50"] > 0.03
    assert last["validation"]["loss"] < first["validation"]["loss"]


def test_what_a_comparison_does_by_itself_suits_boxes() -> None:
    plan, (note,) = with_defaults({"task": TASK})
    assert plan["model"] == "anchor-detr"
    assert plan["budget"]["augment"] == "flip+crop+photometric"
    assert "on 30 images" in note
    assert {"boxes", "coco:PATH"} <= list_tasks().keys()


def test_a_loss_that_waits_is_in_no_graph() -> None:
    class Anything:
        def __getattr__(self, name: str) -> Any:
            return None

    class Learner(Anything):
        device = torch.device("cuda")
        task = open_task(TASK)
        ranks = type("Ranks", (), {"alone": True})()
        tempered = type("Tempered", (), {"methods": ()})()

    class Data(Anything):
        accumulate = 1
        train = type("Source", (), {"in_memory": True})()

    learner: Any = Learner()
    data: Any = Data()
    assert not can_capture(learner, data)
    learner.task = open_task("digits")
    assert can_capture(learner, data)
