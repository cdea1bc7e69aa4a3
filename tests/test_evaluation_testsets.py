"""Test sets in folders: labels by number, by WordNet id and by list, and what is wrong with a folder in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from attemper.lab.errors import DataError
from attemper.lab.evaluation.testsets import evaluate_test_set, open_imagenet_subset, open_imagenet_v2, open_real
from attemper.lab.evaluation.wordnet import wordnet_ids

IDS = [f"n{10_000_000 + 7 * at}" for at in range(12)]


class Grey(nn.Module):
    """Knows the class of a grey image by its brightness: class k has the value 20 · k."""

    def __init__(self, classes: int = 12) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.arange(classes) * 20 / 255)

    def forward(self, x: Tensor) -> Tensor:
        return -1000 * (x.mean((1, 2, 3))[:, None] - self.places).square()


def paint(file: Path, label: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (20 * label,) * 3).save(file)


def test_numeric_folders_are_read_as_numbers(tmp_path: Path) -> None:
    for label in range(12):  # as words, 10 and 11 would come before 2
        paint(tmp_path / str(label) / "a.png", label)
    opened = open_imagenet_v2(tmp_path, size=8, classes=12)
    assert sorted(opened.labels) == [(label,) for label in range(12)]
    found = evaluate_test_set(Grey(), opened)
    assert (found["images"], found["accuracy"]) == (12, 1.0)
    assert {"top5", "nll", "brier", "ece", "bins"} <= set(found)
    json.dumps(found, allow_nan=False)


def test_a_subset_is_labelled_by_wordnet_ids_and_chosen_from_alone(tmp_path: Path) -> None:
    for label in (2, 5, 11):
        paint(tmp_path / "r" / IDS[label] / "art.png", label)
    paint(tmp_path / "r" / IDS[5] / "between.png", 4)  # 4 is not in the subset: 5 is the nearest that is
    opened = open_imagenet_subset(tmp_path / "r", IDS, name="ImageNet-R", size=8)
    assert opened.subset == (2, 5, 11)
    found = evaluate_test_set(Grey(), opened)
    assert (found["name"], found["images"], found["accuracy"]) == ("ImageNet-R", 4, 1.0)
    assert found["top5"] is None, "of three classes"


def test_real_labels_accept_any_of_several_and_leave_out_images_without(tmp_path: Path) -> None:
    for at, shade in enumerate([3, 4, 5, 6]):
        paint(tmp_path / "val" / IDS[at] / f"ILSVRC2012_val_0000000{4 - at}.png", shade)  # by file name: 6, 5, 4, 3
    (tmp_path / "real.json").write_text(json.dumps([[1, 6], [], [7], [3]]))
    opened = open_real(tmp_path / "val", tmp_path / "real.json", size=8, classes=12)
    assert opened.labels == [(1, 6), (7,), (3,)]
    found = evaluate_test_set(Grey(), opened)
    assert (found["images"], found["left_out"], found["accuracy"]) == (3, 1, pytest.approx(2 / 3))
    assert "nll" not in found, "several right classes have no likelihood"


@pytest.mark.parametrize("form", ["folder", "list", "index", "numbers", "text"])
def test_wordnet_ids_come_in_whatever_form_people_have_them(form: str, tmp_path: Path) -> None:
    file = tmp_path / ("ids.txt" if form == "text" else "ids.json")
    if form == "folder":
        for name in (*IDS, "notes"):
            (tmp_path / "train" / name).mkdir(parents=True)
        file = tmp_path / "train"
    elif form == "text":
        file.write_text("".join(f"{name} tench, Tinca tinca\n" for name in IDS))
    else:
        given = {
            "list": IDS,
            "index": {str(at): [name, "tench"] for at, name in enumerate(IDS)},
            "numbers": {name: at for at, name in enumerate(IDS)},
        }
        file.write_text(json.dumps(given[form]))
    assert wordnet_ids(file) == IDS


def test_images_that_cannot_be_decoded_are_skipped_and_named(tmp_path: Path) -> None:
    for label in range(3):
        paint(tmp_path / str(label) / "a.png", label)
    (tmp_path / "1" / "broken.jpg").write_bytes(b"\xff\xd8 this is no image")
    whole = (tmp_path / "2" / "a.png").read_bytes()
    (tmp_path / "2" / "cut.png").write_bytes(whole[: len(whole) // 2])
    found = evaluate_test_set(Grey(), open_imagenet_v2(tmp_path, size=8, classes=12))
    assert (found["images"], found["accuracy"]) == (3, 1.0)
    assert found["skipped"] == {"count": 2, "files": ["broken.jpg", "cut.png"]}


def test_a_set_of_which_nothing_can_be_decoded_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "a.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"Of 1 image of ImageNet-V2, none can be decoded; '.*a\.png'"):
        evaluate_test_set(Grey(), open_imagenet_v2(tmp_path, size=8, classes=12))


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        open_imagenet_v2(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no subfolders"):
        open_imagenet_v2(tmp_path)
    (tmp_path / "v2" / "tench").mkdir(parents=True)
    with pytest.raises(DataError, match="is not called by a number; ImageNet-V2 has the folders 0 to 999"):
        open_imagenet_v2(tmp_path / "v2")
    (tmp_path / "many" / "12").mkdir(parents=True)
    with pytest.raises(DataError, match="is class 12, and the model has 12"):
        open_imagenet_v2(tmp_path / "many", classes=12)
    with pytest.raises(DataError, match="is not called by a WordNet id"):
        open_imagenet_subset(tmp_path / "v2", IDS)
    (tmp_path / "a" / "n99999999").mkdir(parents=True)
    with pytest.raises(DataError, match="is none of the model's 12 classes"):
        open_imagenet_subset(tmp_path / "a", IDS)
    (tmp_path / "empty" / IDS[0]).mkdir(parents=True)
    with pytest.raises(DataError, match="has no images in it"):
        open_imagenet_subset(tmp_path / "empty", IDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [1]]", "has labels for 2 images, and .* has 1"),
        ("[[12]]", "image 0: the labels are"),
        ('{"a": 1}', "must hold a list"),
        ("[[0]", "cannot be read"),
        ("[[]]", "leaves every image without a label"),
    ],
)
def test_bad_real_labels_are_named(text: str, message: str, tmp_path: Path) -> None:
    paint(tmp_path / "val" / "a.png", 0)
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(DataError, match=message):
        open_real(tmp_path / "val", tmp_path / "real.json", classes=12)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[1, 2]", "is no list of WordNet ids"),
        ("a.json", "[", "is no JSON, or damaged"),
        ("a.json", '{"0": ["n01440764"], "2": ["n01443537"]}', "must be numbered 0 to 1"),
        ("a.json", '["n01440764", "n01440764"]', "more than once"),
        ("a.txt", "tench\n", "names none; WordNet ids look like n01440764"),
    ],
)
def test_bad_wordnet_lists_are_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        wordnet_ids(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read"):
        wordnet_ids(tmp_path / "nowhere.json")
    with pytest.raises(DataError, match="no subfolder that is called like one"):
        wordnet_ids(tmp_path)
