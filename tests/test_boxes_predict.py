"""A trained model that finds objects, used on images without its data: `attemper predict`."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from attemper.lab.cli import main
from attemper.lab.evaluation.trained import load_predicting
from attemper.lab.tasks.boxes.metrics import MOST_FOUND
from attemper.lab.tasks.boxes.task import BoxTask
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from coco_files import coco_set

MODEL = "anchor-detr(width=16, depth=1, decoder=1, heads=2, patch=8)"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return coco_set(tmp_path_factory.mktemp("data") / "set", train=8, val=6)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "one"
    spec = RunSpec(
        task=f"coco:{data}(size=48)", model=MODEL, recipe="cb", seed=0, budget=Budget(epochs=1, batch_size=4)
    )
    run(spec, open_task(spec.task, data.parent), folder=folder)
    return folder


def predict(trained: Path, images: Path, *more: str) -> dict[str, Any]:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(["predict", str(trained), "--images", str(images), "--device", "cpu", "--json", *more]) == 0
    held: dict[str, Any] = json.loads(told.getvalue())
    return held


def test_what_is_found_in_files_is_what_the_task_measures(data: Path, trained: Path) -> None:
    task = open_task(f"coco:{data}(size=48)", data.parent)
    assert isinstance(task, BoxTask)
    wanted = task.tally(load_predicting(trained).model, task.test()).answers
    held = predict(trained, data / "val2017", "--batch-size", "4")
    assert [each["file_name"] for each in held["images"]] == [f"val{at:02}.png" for at in range(1, 7)]
    assert {(each["width"], each["height"]) for each in held["images"]} == {(40, 30)}
    for image, answer in enumerate(wanted, 1):
        mine = [each for each in held["annotations"] if each["image_id"] == image]
        corners = answer.found["boxes"].clamp(max=torch.tensor([40.0, 30.0, 40.0, 30.0]))
        inside = (corners[:, 2:] > corners[:, :2]).all(1)
        assert len(mine) == int(inside.sum()) <= MOST_FOUND
        boxes = torch.tensor([each["bbox"] for each in mine])
        torch.testing.assert_close(boxes[:, :2] + boxes[:, 2:], corners[inside][:, 2:], atol=2e-3, rtol=0)
        scores = torch.tensor([each["score"] for each in mine])
        torch.testing.assert_close(scores, answer.found["scores"][inside], atol=1e-5, rtol=0)
        assert [each["category_id"] - 1 for each in mine] == answer.found["labels"][inside].tolist()


def test_pycocotools_and_the_task_itself_read_what_is_written(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pycocotools.coco import COCO  # type: ignore[import-untyped]

    folder = data / "val2017"
    held = predict(trained, folder, "--out", str(tmp_path / "found"))
    truth = COCO(str(data / "annotations/instances_val2017.json"))
    file = tmp_path / "found" / "boxes.json"
    assert len(truth.loadRes(json.loads(file.read_text())["annotations"]).anns) == len(held["annotations"])
    assert {file.name for file in (tmp_path / "found").glob("*.png")} == {file.name for file in folder.glob("*.png")}
    with Image.open(tmp_path / "found" / "val01.png") as picture:
        assert picture.size == (40, 30)
    assert main(["predict", str(trained), "--images", str(folder), "--out", str(tmp_path / "alone.json")]) == 0
    assert (tmp_path / "alone.json").read_text() == file.read_text()
    assert "boxes with their scores)" in capsys.readouterr().out


def test_photos_are_turned_upright_and_what_cannot_be_decoded_is_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (2000, 30), 9).save(tmp_path / "photos" / "on its side.jpg", exif=exif)
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no image")
    held = predict(trained, tmp_path / "photos", "--out", str(tmp_path / "found"))
    assert held["skipped"] == ["broken.jpg"]
    (image,) = held["images"]
    assert (image["width"], image["height"]) == (30, 2000)
    with Image.open(tmp_path / "found" / "on its side.png") as picture:
        assert picture.size == (19, 1280), "no larger than can be read"
    assert all(each["bbox"][0] >= 0 and each["bbox"][0] + each["bbox"][2] <= 30.001 for each in held["annotations"])
    (tmp_path / "photos" / "on its side.jpg").unlink()
    assert main(["predict", str(trained), "--images", str(tmp_path / "photos")]) == 2
    assert "Of 1 image in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["predict", "--images", "{images}", "--out", "{images}"], "--out is the folder of the images"),
        (["predict", "--images", "{images}", "--out", "{run}/model.safetensors"], "pictures go into a folder"),
        (["export", "--onnx", "{run}/model.onnx"], "it was trained on 'coco:"),
        (["diagnose", "--images", "{images}"], "it was trained on 'coco:"),
    ],
)
def test_what_makes_no_sense_is_refused(
    command: list[str], said: str, data: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *more = [word.format(images=data / "val2017", run=trained) for word in command]
    assert main([name, str(trained), *more]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")
