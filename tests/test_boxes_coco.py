"""Folders in COCO's JSON: the layouts that people have, and everything that can be wrong with them, told at once."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from attemper.errors import AttemperError, ParameterError, UnreadableError
from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.tasks import source
from attemper.lab.tasks.boxes.coco_json import read_annotations
from attemper.lab.tasks.boxes.image_sizes import size_of
from attemper.lab.tasks.boxes.shape import BOX, CLASS, CROWD
from attemper.lab.tasks.boxes.task import BoxTask
from attemper.lab.tasks.registry import open_task, verify
from attemper.lab.tasks.source import LazySource
from coco_files import CATEGORIES, annotation, coco_set, contents, names_of, write_images, write_json

FOUND = HealthCheck.function_scoped_fixture


def opened(folder: Path, options: str = "size=32", root: Path | None = None) -> BoxTask:
    task = open_task(f"coco:{folder}({options})", root or folder.parent)
    assert isinstance(task, BoxTask)
    return task


# ------------------------------------------------------------------------------------------------------------- layouts
def test_cocos_own_layout(tmp_path: Path) -> None:
    task = opened(coco_set(tmp_path / "set"))
    train, validation = task.split(seed=0, validation=0.25)
    assert (len(train), len(validation), len(task.test())) == (9, 3, 6), "of two parts the second is the test set"
    assert task.classes == ("cat", "dog")
    assert str(task.shape) == "3 × 32 × 32 at most and of boxes of 2 classes"
    images, rows = next(task.test().batches(torch.arange(6), 6))
    assert images.shape == (6, 4, 32, 32)
    assert images[0, 3].sum() == 255 * 32 * 24, "40 × 30 becomes 32 × 24"
    assert rows[0, 0, BOX].tolist() == pytest.approx([2 / 40, 3 / 40, 13 / 40, 15 / 40])
    assert (rows[4, :, CLASS] >= 0).sum() == 0, "an image without boxes is kept"


def test_three_parts_are_used_as_such(tmp_path: Path) -> None:
    task = opened(coco_set(tmp_path / "set", 8, 4, 5))
    for seed in (0, 1):
        train, validation = task.split(seed=seed, validation=0.5)
        assert (len(train), len(validation), len(task.test())) == (8, 4, 5)


def test_roboflows_layout_and_its_category_of_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "robo"
    for part, count in (("train", 8), ("valid", 4), ("test", 4)):
        names = names_of(count, part)
        write_images(folder / part, names, seed=count + len(part))
        held = contents(names)
        held["categories"] = [{"id": 0, "name": "animals", "supercategory": "none"}, *CATEGORIES]
        write_json(folder / part / "_annotations.coco.json", held)
    task = opened(folder)
    assert task.classes == ("cat", "dog")
    assert (len(task.split(0, 0.5)[1]), len(task.test())) == (4, 4)


@pytest.mark.parametrize("images", ["", "images", "data"])
def test_one_file_alone_has_a_fixed_part_held_out(tmp_path: Path, images: str) -> None:
    folder, names = tmp_path / "own", names_of(20)
    write_images(folder / images, names)
    write_json(folder / "labels.json", contents(names))
    task, again = opened(folder), opened(folder / "labels.json")
    assert (sum(map(len, task.split(0, 0.5))), len(task.test())) == (16, 4)
    assert torch.equal(task.test().targets, again.test().targets)


def test_cvats_layout(tmp_path: Path) -> None:
    folder, names = tmp_path / "cvat", names_of(10)
    write_images(folder / "images" / "default", names)
    write_json(folder / "annotations" / "instances_default.json", contents(names))
    assert len(opened(folder).test()) == 2


def test_other_annotations_of_coco_are_left_alone(tmp_path: Path) -> None:
    folder = coco_set(tmp_path / "set")
    for name in ("captions_train2017", "person_keypoints_train2017", "image_info_test2017"):
        write_json(folder / "annotations" / f"{name}.json", {"info": {}})
    assert len(opened(folder).test()) == 6


def test_several_files_for_one_part_are_named(tmp_path: Path) -> None:
    folder = coco_set(tmp_path / "set")
    shutil.copy(folder / "annotations/instances_train2017.json", folder / "annotations/instances_train2014.json")
    with pytest.raises(DataError, match=r"more than one of them is for train: 'annotations/instances_train2014\.json'"):
        opened(folder)


# ------------------------------------------------------------------------------------------------------- what is there
def test_a_large_set_is_read_from_disk_while_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = opened(coco_set(tmp_path / "set"))
    wanted = next(held.test().batches(torch.arange(6), 6))
    monkeypatch.setattr(source, "MEMORY_LIMIT", 10)
    lazy = opened(tmp_path / "set").test()
    assert isinstance(lazy, LazySource)
    lazy.workers = 0
    images, rows = next(lazy.batches(torch.arange(6), 6))
    assert torch.equal(images, wanted[0])
    assert torch.equal(rows, wanted[1])
    assert torch.equal(lazy.take(torch.tensor([4])).facts["size"], torch.tensor([[40, 30]]))


def test_crowds_are_kept_for_the_metric(tmp_path: Path) -> None:
    folder, names = tmp_path / "own", names_of(10)
    write_images(folder, names)
    held = contents(names)
    held["annotations"].append(annotation(99, 1, 7, (0, 0, 40, 30), iscrowd=1, area=321.0))
    write_json(folder / "all.json", held)
    train, validation = (task := opened(folder)).split(0, 0.5)
    rows = torch.cat([part.targets for part in (train, validation, task.test())]).flatten(0, 1)
    (crowd,) = rows[rows[:, CROWD] == 1]
    assert crowd[CLASS] == 1.0
    assert any("1 crowd" in line for line in verify(f"coco:{folder}", tmp_path))


def test_the_fingerprint_follows_boxes_and_pixels(tmp_path: Path) -> None:
    folder = coco_set(tmp_path / "set")
    before = opened(folder).fingerprint
    assert opened(folder).fingerprint == before
    assert opened(folder, "size=40").fingerprint != before
    write_images(folder / "val2017", ["val01.png"], seed=99)
    changed = opened(folder).fingerprint
    assert changed != before
    path = folder / "annotations/instances_val2017.json"
    held = json.loads(path.read_text())
    held["annotations"][0]["bbox"][2] += 1
    write_json(path, held)
    assert opened(folder).fingerprint not in (before, changed)


def test_copies_of_what_is_held_out_are_not_trained_on(tmp_path: Path) -> None:
    folder = coco_set(tmp_path / "set")
    shutil.copy(folder / "val2017/val01.png", folder / "train2017/train01.png")
    with pytest.warns(UserWarning, match="copies of them are held out: 1 image for training"):
        task = opened(folder)
    assert sum(map(len, task.split(0, 0.5))) == 11


def test_boxes_are_meant_for_the_image_as_its_size_says(tmp_path: Path) -> None:
    """A photo that EXIF data turn: annotated as it is seen, or as it is stored."""
    folder, names = tmp_path / "own", names_of(8)
    write_images(folder, names)
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in names[:2]:
        with Image.open(folder / name) as image:
            image.save(folder / name.replace("png", "jpg"), exif=exif)
    seen = size_of(folder / "photo01.jpg")
    assert (seen.stored, seen.seen) == ((40, 30), (30, 40))
    held = contents(names)
    held["images"][0] |= {"file_name": "photo01.jpg"}
    held["images"][1] |= {"file_name": "photo02.jpg", "width": 30, "height": 40}
    write_json(folder / "all.json", held)
    task = opened(folder)
    parts = [*task.split(0, 0.5), task.test()]
    sizes = torch.cat([part.facts["size"] for part in parts])  # type: ignore[attr-defined]
    assert sorted(map(tuple, sizes.tolist()))[:2] == [(30, 40), (40, 30)]
    assert (sizes == torch.tensor([30, 40])).all(1).sum() == 1


@pytest.mark.parametrize(("options", "train", "test"), [("train=6", 6, 6), ("test=2", 12, 2)])
def test_fewer_images_are_the_same_ones_for_everybody(tmp_path: Path, options: str, train: int, test: int) -> None:
    coco_set(tmp_path / "set")
    one, other = (opened(tmp_path / "set", f"size=32, {options}") for _ in range(2))
    assert (sum(map(len, one.split(0, 0.5))), len(one.test())) == (train, test)
    assert torch.equal(one.test().targets, other.test().targets)
    with pytest.raises(DataError, match="asks for 900 training images, and there are 12"):
        opened(tmp_path / "set", "train=900").split(0, 0.5)


def test_verify_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = coco_set(tmp_path / "set")
    assert main(["data", "verify", f"coco:{folder}(size=8)", "--data", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "12 training samples and 6 test samples" in told
    assert "in 18 images, at most 2 in one; 3 images without any, 0 crowds" in told
    assert "boxes by class: dog" in told
    assert "at size=8," in told


# ------------------------------------------------------------------------------------------------------ what is wrong
def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, names = tmp_path / "own", names_of(12)
    write_images(folder, names)
    held = contents(names)
    held["images"] += [
        {"id": 50, "file_name": "nowhere.png", "width": 40, "height": 30},
        {"id": 51, "file_name": "photo02.png", "width": 40, "height": 30},
        {"id": 52, "file_name": "../secret.png", "width": 40, "height": 30},
        {"id": 1, "file_name": "photo03.png", "width": 40, "height": 30},
    ]
    held["images"][5] |= {"width": 41}
    (folder / names[6]).write_bytes(b"no image")
    held["annotations"] += [
        annotation(101, 1, 3, (5, 5, 0, 9)),
        annotation(102, 1, 3, (5, 5, -3, 9)),
        annotation(103, 2, 3, (100, 5, 10, 10)),
        annotation(104, 2, 3, (30, 5, 30, 10)),
        annotation(105, 2, 99, (3, 5, 10, 10)),
        annotation(106, 777, 3, (3, 5, 10, 10)),
        annotation(101, 2, 3, (3, 5, 10, 10)),
        {"id": 107, "image_id": 2, "category_id": 3, "bbox": [1, 2, "x", 4]},
        {"id": 108, "image_id": 2, "category_id": 3},
        "nonsense",
    ]
    write_json(folder / "all.json", held)
    assert main(["data", "verify", f"coco:{folder}", "--data", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    for line in (
        "2 boxes have no size: 'annotation 101' (photo01.png: 5, 5, 0 × 9); 'annotation 102'",
        "1 box lies outside of its image: 'annotation 103' (photo02.png: 100, 5, 10 × 10, in 40 × 30)",
        "1 box reaches out of its image, and is cut off there: 'annotation 104'",
        "1 box is of a category that is not listed: 'annotation 105' (category 99)",
        "1 box is of an image that is not listed: 'annotation 106' (image 777)",
        "1 id is there more than once, and only the first counts: 'image 1'",
        "3 entries are not what COCO writes: 'annotation 107' (its bbox is [1, 2, 'x', 4], and must be",
        "1 file name is there more than once: 'photo02.png'",
        "1 name of an image leads out of the folder: '../secret.png'",
        "2 images cannot be read: ",
        "nowhere.png' (No such file)",
        "1 image has another size than the annotations say: ",
        "photo06.png' (40 × 30, and not 41 × 30)",
        "or say broken=skip to leave them out",
    ):
        assert line in told
    assert main(["data", "verify", f"coco:{folder}(broken=skip)", "--data", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "2 boxes have no size" in told
    task = opened(folder, "broken=skip")
    assert sum(map(len, task.split(0, 0.5))) + len(task.test()) == 11, "without the two unreadable, one of another size"


def test_a_thousand_mistakes_are_a_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, names = tmp_path / "own", names_of(6)
    write_images(folder, names)
    held = contents(names)
    held["annotations"] += [annotation(100 + at, 1, 3, (1, 1, 0, 0)) for at in range(1000)]
    write_json(folder / "all.json", held)
    assert main(["data", "verify", f"coco:{folder}", "--data", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "1,000 boxes have no size" in told
    assert "and 990 more" in told
    assert len(told) < 3000


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([], "is no COCO JSON: it holds a list"),
        ({"images": [], "annotations": []}, "it has no list of categories"),
        ({"info": {}, "labels": 3}, "it has no list of images and of annotations and of categories. It has 'info'"),
        ({"images": [], "annotations": [], "categories": CATEGORIES}, "names no images"),
        ({"images": [{"id": 1, "file_name": "a.png"}], "annotations": [], "categories": []}, "names no categories"),
    ],
)
def test_what_is_no_coco_file_is_refused(tmp_path: Path, held: Any, message: str) -> None:
    write_json(tmp_path / "own" / "all.json", held)
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "own")


def test_annotations_without_any_box_are_refused(tmp_path: Path) -> None:
    folder, names = tmp_path / "own", names_of(6)
    write_images(folder, names)
    write_json(folder / "all.json", {**contents(names), "annotations": []})
    with pytest.raises(DataError, match="has no box in any image: there is nothing to find"):
        opened(folder)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "own"
    with pytest.raises(DataError, match="is not there"):
        opened(folder)
    folder.mkdir()
    with pytest.raises(DataError, match="has no annotations in COCO's JSON"):
        opened(folder)
    path = folder / "all.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UnreadableError, match="is no JSON, or damaged"):
        opened(folder)
    path.write_text(json.dumps({"images": [{"id": 1}], "annotations": [[[[]]]], "categories": [{"id": 1}]})[:-3])
    with pytest.raises(UnreadableError, match="is no JSON, or damaged"):
        opened(folder)
    monkeypatch.setattr("attemper.lab.tasks.boxes.coco_json.MOST_BYTES", 10)
    with pytest.raises(UnreadableError, match="has more than 10 bytes"):
        opened(folder)


def test_images_that_are_nowhere_are_told_with_the_places(tmp_path: Path) -> None:
    write_json(tmp_path / "own" / "annotations" / "instances_train.json", contents(names_of(3)))
    with pytest.raises(
        DataError, match=r"has its images nowhere: .*'photo01.png', for one, is in no folder below .*own/annotations"
    ):
        opened(tmp_path / "own")


def test_categories_that_disagree_are_told(tmp_path: Path) -> None:
    folder = coco_set(tmp_path / "set")
    path = folder / "annotations/instances_val2017.json"
    held = json.loads(path.read_text())
    held["categories"][0]["name"] = "lynx"
    write_json(path, held)
    with pytest.raises(DataError, match=r"1 category has another name in another file: 'category 3' \(cat and lynx\)"):
        opened(folder)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    coco_set(tmp_path / "set")
    for options, message in (
        ("size=0", "at least 1"),
        ("broken=maybe", "must be 'refuse' or 'skip'"),
        ("label=x", "no option 'label'"),
    ):
        with pytest.raises(ParameterError, match=message):
            opened(tmp_path / "set", options)


# ----------------------------------------------------------------------------------------------------------- malformed
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["id", "image_id", "category_id", "bbox", "file_name", "width", "height", "name", "area", "iscrowd", "x"]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[FOUND])
@given(
    st.lists(
        st.tuples(st.sampled_from(["images", "annotations", "categories"]), st.integers(0, 8), KEYS, VALUES), max_size=6
    ),
    st.lists(st.tuples(st.sampled_from(["images", "annotations", "categories"]), VALUES), max_size=3),
)
def test_a_malformed_file_is_an_error_of_ours_or_faults(tmp_path: Path, changed: Any, added: Any) -> None:
    """Whatever a value is replaced with: boxes that are read lie inside of their images."""
    held: Any = copy.deepcopy(contents(names_of(5)))
    for part, at, key, value in changed:
        held[part][at % len(held[part])][key] = value
    for part, value in added:
        held[part].append(value)
    path = tmp_path / "any.json"
    path.write_text(json.dumps(held))
    try:
        read = read_annotations(path)
    except AttemperError:
        return
    for image in read.images:
        for box in image.boxes:
            left, top, right, bottom = box.corners
            assert left < right
            assert top < bottom
            assert box.category in read.categories
            assert box.area > 0
            if image.size is not None:
                assert 0 <= left < right <= image.size[0]
                assert 0 <= top < bottom <= image.size[1]
    read.faults.lines()


@settings(max_examples=40, deadline=None, suppress_health_check=[FOUND])
@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_error_of_ours(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "any.json"
    path.write_bytes(data)
    with pytest.raises(AttemperError):
        read_annotations(path)
