"""Runs that learn classes of pixels: interrupted, by several processes, looked at, and used afterwards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import mask_files
from attemper.errors import ParameterError
from attemper.lab.cli import main
from attemper.lab.evaluation.trained import load_trained
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.segmentation.task import MaskShape
from attemper.lab.training import loop
from attemper.lab.training.data import RunData
from attemper.lab.training.inputs import ImageInputs
from attemper.lab.training.learner import Learner
from attemper.lab.training.loop import run
from attemper.lab.training.ranks import ALONE, Ranks, joined
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.validation import evaluate
from attemper.methods.consistency import Consistency
from attemper.tempering.outputs import counted_in
from endings import assert_same_end, timeless
from teams import team
from test_distributed import compare_far

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]

CPU = torch.device("cpu")
TASK = "shapes(train=40, test=10)"
MODEL = "segvit-shapes(depth=2, width=16, heads=2, mlp=16)"


def spec(recipe: str = "dropkey(0.2) + explicit(v=1e-3)", *, model: str = MODEL, **budget: Any) -> RunSpec:
    given = {"epochs": 2, "batch_size": 10, "lr": 3e-3, "warmup_epochs": 1, "augment": "scale-crop+photometric"}
    return RunSpec(task=TASK, model=model, recipe=recipe, seed=1, budget=Budget(**{**given, **budget}))


def test_a_run_learns_shapes_in_seconds() -> None:
    chosen = spec("none", epochs=4, batch_size=4, lr=5e-3, augment="none", min_lr=1e-4)
    result = run(chosen, open_task(TASK), device="cpu")
    assert set(result["test"]) == {"mIoU", "accuracy", "loss"}
    assert result["metric"] == "mIoU"
    assert result["curve"][-1]["train_loss"] < 0.8 * result["curve"][0]["train_loss"]
    assert result["test"]["mIoU"] > 0.15
    table = result["test_details"]["table"]
    assert (table["metric"], [row["name"] for row in table["rows"]]) == ("IoU", ["background", "disc", "box", "ring"])
    known = [row["value"] for row in table["rows"] if row["value"] is not None]
    assert sum(known) / len(known) == pytest.approx(result["test"]["mIoU"], abs=1e-6)
    assert len(result["test_details"]["pictures"]) == 4


class StopError(Exception):
    pass


@pytest.mark.parametrize("recipe", ["dropkey(0.2) + explicit(v=1e-3)", "droppath(0.2) + rdrop"])
def test_a_run_that_is_stopped_ends_with_the_same_figures(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)
    chosen = spec(recipe, epochs=3)

    def stop(event: dict[str, Any]) -> None:
        if event["validation"] is not None and event["epoch"] == 2:
            raise StopError

    whole = run(chosen, open_task(TASK), folder=tmp_path / "whole", device="cpu")
    with pytest.raises(StopError):
        run(chosen, open_task(TASK), folder=tmp_path / "cut", progress=stop, device="cpu")
    assert timeless(run(chosen, open_task(TASK), folder=tmp_path / "cut", device="cpu")) == timeless(whole)
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


def test_every_recipe_gets_the_same_batches() -> None:
    seen = []
    for recipe in ("none", "dropkey(0.5) + consistency"):
        data = RunData(spec(recipe), open_task(TASK), CPU)
        learner = Learner(spec(recipe), data.task, CPU)
        batches = []
        for inputs, targets in data.epoch(1):
            learner.learn(inputs, targets)  # draws from torch's generator
            batches.append((inputs, targets))
        seen.append(batches)
    for (one, its), (other, others) in zip(*seen, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(its, others)


# ---------------------------------------------------------------------------------------------------- several processes
def pixels(recipes: list[str]) -> Any:
    """For every recipe a step on images of which some have hardly any label, by all ranks and by one; and metrics."""
    torch.set_default_dtype(torch.float64)
    Consistency.compare = compare_far  # type: ignore[method-assign]
    with joined() as ranks:
        return [both_ways(spec(recipe), ranks) for recipe in recipes]


def both_ways(chosen: RunSpec, ranks: Ranks) -> Any:
    task: Any = open_task(TASK)
    normalise = task.normalise
    task.to_input = lambda stored: normalise(stored).double()
    learners, labelled = [], []
    for each in (ranks, ALONE):
        data = RunData(chosen, task, CPU, each)
        learner = Learner(chosen, task, CPU, 1, each, data.share)
        if "drop" in chosen.recipe:
            learner.tempered.set_rate(0.0)
        learner.model.train()
        inputs, targets = next(data.epoch(1))
        targets = without_labels(targets, data.part.start)
        labelled.append(int(counted_in(targets).sum()))  # type: ignore[union-attr]
        learner.learn(inputs, targets)
        learners.append(learner)
    together, alone = (learner.model.state_dict() for learner in learners)
    far = max(float((together[name] - alone[name]).abs().max()) for name in alone)
    readings = [learner.meter.read() for learner in learners]
    test = [evaluate(learner, task, task.test().take(torch.arange(7))) for learner in learners]
    return labelled[0], far, [(each.loss, each.accuracy, each.penalty) for each in readings], test


def without_labels(targets: Tensor, start: int) -> Tensor:
    """The first three samples of the whole batch lose all of their labels, and the fifth most."""
    targets = targets.clone()
    for at in range(len(targets)):
        if start + at < 3:
            targets[at] = -100
        if start + at == 4:
            targets[at, 2:] = -100
    return targets


def test_every_labelled_pixel_counts_the_same_whichever_rank_has_it() -> None:
    recipes = ["none", "dropkey(0.1) + consistency(0.7) + explicit(v=0.5)"]
    zero, one = team(2, pixels, recipes)
    for mine, theirs in zip(zero, one, strict=True):
        assert mine[0] != theirs[0], "the ranks have different numbers of labelled pixels"
        for _, far, (together, alone), (ours, expected) in (mine, theirs):
            assert far < 1e-6
            assert together == pytest.approx(alone, abs=1e-6)
            assert ours["mIoU"] == expected["mIoU"]
            assert ours == pytest.approx(expected, abs=1e-6)


# --------------------------------------------------------------------------------------------------------- afterwards
@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a folder as of ADE20K, on canvases that are no squares."""
    folder = tmp_path_factory.mktemp("trained")
    mask_files.ade(folder / "ade")
    (folder / "ade" / "classes.txt").write_text("road\ncar\n<b>tree</b>\n")
    task = open_task(f"segment:{folder / 'ade'}(size=16, width=24)", folder)
    model = "segvit(depth=1, width=16, heads=2, mlp=16)"
    chosen = dataclasses.replace(spec("dropkey(0.1) + cb", model=model, epochs=1, batch_size=2), task=task.name)
    run(chosen, task, folder=folder / "run", device="cpu")
    return folder


def test_weights_say_what_their_model_takes_and_what_its_numbers_mean(trained: Path) -> None:
    found = load_trained(trained / "run")
    assert found.inputs.shape == MaskShape(3, 16, 24, 3)
    assert found.inputs.numbers == (1, 2, 3)
    assert ImageInputs.from_json(found.inputs.to_json()) == found.inputs


def test_predicted_masks_are_as_large_as_images_and_have_the_numbers_of_the_data(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, masks = trained / "photos", trained / "masks"
    mask_files.image(photos / "wide.png", (9, 31))
    mask_files.image(photos / "deep" / "tall.jpg", (40, 7))
    (photos / "broken.png").write_bytes(b"nothing")
    assert main(["predict", str(trained / "run"), "--images", str(photos), "--out", str(masks), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["skipped"] == ["broken.png"]
    for each in told["images"]:
        assert sum(each["shares"].values()) == pytest.approx(1)
    for name, size in (("wide.png", (31, 9)), ("deep/tall.png", (7, 40))):
        with Image.open(masks / name) as mask:
            assert (mask.mode, mask.size) == ("P", size)
            assert set(np.unique(np.asarray(mask))) <= {1, 2, 3}
    for wrong, said in ((photos, "could overwrite"), (photos / "wide.png", "masks go into a folder")):
        assert main(["predict", str(trained / "run"), "--images", str(photos), "--out", str(wrong)]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    mask_files.image(photos / "wide.jpg", (9, 31))
    assert main(["predict", str(trained / "run"), "--images", str(photos), "--out", str(masks)]) == 2
    assert "several images called 'wide'" in capsys.readouterr().err


def test_a_trained_model_is_evaluated_and_exported_and_what_wants_classes_of_images_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(trained / "run"), "--data", str(trained)]) == 0
    assert "mIoU" in capsys.readouterr().out
    page = (trained / "run" / "evaluation.html").read_text()
    assert "IoU by class" in page
    assert "&lt;b&gt;tree" in page
    assert "<b>tree" not in page
    target = trained / "model.pt2"
    assert main(["export", str(trained / "run"), "--torch-export", str(target)]) == 0
    assert "logits of 3 classes, for every pixel" in " ".join(capsys.readouterr().out.split())
    x = torch.randn(2, 3, 16, 24)
    with torch.no_grad():
        expected = load_trained(trained / "run").model(x)
    again = torch.export.load(target).module()(x)
    assert again.shape == (2, 16, 24, 3)
    torch.testing.assert_close(again, expected, rtol=1e-3, atol=1e-4)
    assert main(["diagnose", str(trained / "run"), "--images", str(trained / "ade")]) == 2
    assert "--probe-every" in capsys.readouterr().err


def test_suites_for_classifiers_are_refused_by_name(trained: Path) -> None:
    chosen = dataclasses.replace(spec("none"), evaluate=("calibration",))
    from attemper.lab.evaluation.runs import check_suites

    with pytest.raises(ParameterError, match="image"):
        check_suites(chosen, open_task(TASK))


@pytest.mark.slow  # a worker process, which imports everything again
def test_a_comparison_has_a_page_with_classes_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--task", TASK, "--model", MODEL, "--recipes", "cb", "--seeds", "1", "--epochs", "1"]
    assert main([*words, "--folder", str(tmp_path / "study"), "--workers", "1"]) == 0
    page = (tmp_path / "study" / "report.html").read_text()
    for said in ("IoU by class", "Pictures", "labelled pixels are right", "mIoU"):
        assert said in page
    assert page.count('class="picture"') == 8
