"""COCO sets as other programs write them: read as they are meant where that is clear, else refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.tasks.boxes.coco_json import MOST_BOXES, read_annotations
from attemper.lab.tasks.boxes.shape import CLASS
from attemper.lab.tasks.boxes.task import BoxTask
from attemper.lab.tasks.notifications import Silent, collecting, listening
from attemper.lab.tasks.registry import open_task
from coco_files import CATEGORIES, annotation, coco_set, contents, names_of, write_images, write_json

VAL = "annotations/instances_val2017.json"


def opened(folder: Path, options: str = "size=32") -> tuple[BoxTask, list[str]]:
    """A task, and what was said about its files."""
    with listening(Silent()), collecting() as told:
        task = open_task(f"coco:{folder}({options})", folder.parent)
    assert isinstance(task, BoxTask)
    return task, told


def changed(path: Path, change: Any) -> None:
    held = json.loads(path.read_text())
    change(held)
    write_json(path, held)


def boxes_of(task: BoxTask) -> list[tuple[int, ...]]:
    """Of the test set: classes in the order of the images."""
    return [tuple(row[row >= 0].int().tolist()) for row in task.test().targets[..., CLASS]]


# ----------------------------------------------------------------------------------------------------------------- ids
@pytest.mark.parametrize("written", [float, str], ids=["7.0", "'7'"])
def test_ids_may_be_written_as_decimals_and_as_texts(tmp_path: Path, written: Any) -> None:
    plain = read_annotations(write_json(tmp_path / "plain.json", held := contents(names_of(6))))
    for entry in held["annotations"]:
        entry |= {name: written(entry[name]) for name in ("id", "image_id", "category_id")}
    other = read_annotations(write_json(tmp_path / "other.json", held))
    assert other.images == plain.images
    assert not other.faults


def test_annotations_that_share_an_id_are_kept_and_the_same_one_twice_is_told(tmp_path: Path) -> None:
    held = contents(names_of(6))
    for entry in held["annotations"]:
        entry["id"] = 0
    read = read_annotations(write_json(tmp_path / "all.json", held))
    assert sum(len(image.boxes) for image in read.images) == len(held["annotations"])
    assert not read.faults
    held["annotations"].append(held["annotations"][0])
    read = read_annotations(write_json(tmp_path / "all.json", held))
    assert read.faults.lines() == ["1 annotation is there more than once: 'annotation 0' (photo01.png)"]


def test_boxes_of_an_image_that_is_wrong_itself_are_no_second_fault(tmp_path: Path) -> None:
    held = contents(names_of(6))
    held["images"][0]["width"] = "wide"
    held["categories"].append({"id": 9})
    held["annotations"].append(annotation(90, 2, 9, (1, 1, 5, 5)))
    lines = read_annotations(write_json(tmp_path / "all.json", held)).faults.lines()
    assert len(lines) == 1
    assert "entries are not what COCO writes: 'image" not in lines[0]
    assert "photo01.png' (its width and height are 'wide' and 30, and must be pixels)" in lines[0]


# ---------------------------------------------------------------------------------------------------------- categories
def test_files_that_number_their_categories_differently_are_joined_by_names(tmp_path: Path) -> None:
    wanted = boxes_of(opened(coco_set(tmp_path / "set"))[0])

    def renumber(numbers: dict[int, int]) -> Any:
        def change(held: dict[str, Any]) -> None:
            for entry in held["annotations"]:
                entry["category_id"] = numbers[entry["category_id"]]
            for entry in held["categories"]:
                entry["id"] = numbers[entry["id"]]

        return change

    for numbers, said in (({3: 1, 7: 2}, False), ({1: 7, 2: 3}, True)):
        changed(tmp_path / "set" / VAL, renumber(numbers))
        task, told = opened(tmp_path / "set")
        assert task.classes == ("cat", "dog")
        assert boxes_of(task) == wanted
        assert any("numbers its categories in another way" in line for line in told) == said


def test_two_categories_of_one_name_are_told(tmp_path: Path) -> None:
    folder = coco_set(tmp_path / "set")
    changed(folder / VAL, lambda held: held["categories"].append({"id": 9, "name": "dog"}))
    with pytest.raises(DataError, match=r"1 category has the name of another.*category 9' \(dog, as category 7\)"):
        opened(folder)
    assert opened(folder, "size=32, broken=skip")[0].classes == ("cat", "dog")


# --------------------------------------------------------------------------------------------------------------- parts
@pytest.mark.parametrize("kept_back", ["empty", "absent"])
def test_a_test_part_whose_annotations_are_kept_back_is_not_used_and_that_is_said(
    tmp_path: Path, kept_back: str
) -> None:
    folder = coco_set(tmp_path / "set", 8, 4, 5)

    def change(held: dict[str, Any]) -> None:
        held["annotations"] = []
        if kept_back == "absent":
            del held["annotations"], held["categories"]
            held["categories"] = []

    changed(folder / "annotations/instances_test2017.json", change)
    if kept_back == "absent":
        with pytest.raises(DataError, match="names no categories"):
            opened(folder)
        changed(folder / "annotations/instances_test2017.json", lambda held: held.update(categories=CATEGORIES))
    task, told = opened(folder)
    assert len(task.test()) == 4, "validation is the test set"
    assert "'annotations/instances_test2017.json' is not used: it has no annotations." in told


def test_a_file_that_is_of_no_part_is_named(tmp_path: Path) -> None:
    folder = coco_set(tmp_path / "set")
    shutil.copy(folder / VAL, folder / "annotations/instances_default.json")
    assert any(line.startswith("'annotations/instances_default.json' is not used") for line in opened(folder)[1])


def test_a_part_without_any_box_is_refused_before_training(tmp_path: Path) -> None:
    folder = coco_set(tmp_path / "set", 8, 4, 5)
    changed(folder / VAL, lambda held: held.update(annotations=[]))
    with pytest.raises(DataError, match="has no box in any of its 4 validation images"):
        opened(folder)


# -------------------------------------------------------------------------------------------------------------- images
@pytest.mark.parametrize("images", ["Images/Train", "pictures", "data/my.set v2/deep"])
def test_images_are_found_wherever_they_lie_below_the_set(tmp_path: Path, images: str) -> None:
    folder, names = tmp_path / "outer", names_of(10)
    write_images(folder / "my.export v4" / images, names)
    write_json(folder / "my.export v4" / "annotations" / "instances_train.json", contents(names))
    assert len(opened(folder / "my.export v4")[0].test()) == 2


def test_what_is_wrong_with_one_file_does_not_hide_what_is_wrong_with_another(tmp_path: Path) -> None:
    folder = coco_set(tmp_path / "set")
    shutil.rmtree(folder / "val2017")
    changed(
        folder / "annotations/instances_train2017.json", lambda held: held["annotations"][0].update(bbox=[1, 1, 0, 0])
    )
    with pytest.raises(DataError) as raised:
        opened(folder)
    assert "1 box has no size" in str(raised.value)
    assert "1 file of annotations has its images nowhere: 'annotations/instances_val2017.json'" in str(raised.value)


def test_names_that_all_lead_out_of_the_folder_are_told(tmp_path: Path) -> None:
    folder, names = tmp_path / "own", names_of(4)
    write_images(folder, names)
    held = contents(names)
    for entry in held["images"]:
        entry["file_name"] = f"/home/somebody/{entry['file_name']}"
    write_json(folder / "all.json", held)
    with pytest.raises(DataError, match=r"4 names of images lead out of the folder: '/home/somebody/photo01\.png'"):
        opened(folder)


def test_an_image_with_too_many_boxes_is_left_out_and_does_not_become_an_empty_one(tmp_path: Path) -> None:
    folder, names = tmp_path / "own", names_of(6)
    write_images(folder, names)
    held = contents(names)
    held["annotations"] += [annotation(100 + at, 5, 3, (at % 30, at % 20, 3, 3)) for at in range(MOST_BOXES + 1)]
    write_json(folder / "all.json", held)
    task, told = opened(folder, "size=32, broken=skip")
    assert any("1 image has more than 1,000 boxes: 'photo05.png' (1,001)" in line for line in told)
    assert sum(map(len, task.split(0, 0.5))) + len(task.test()) == 5


def _photo(path: Path, way: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = way
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[:20] = 255
    Image.fromarray(pixels).save(path, exif=exif)


@pytest.mark.parametrize("seen", [True, False])
def test_photos_whose_size_does_not_tell_which_way_up_they_are_meant_are_taken_as_the_others(
    tmp_path: Path, seen: bool
) -> None:
    folder, names = tmp_path / "own", names_of(6)
    write_images(folder, names)
    held = contents(names, (40, 30))
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(folder / names[0]) as image:
        image.save(folder / names[0], exif=exif)
    held["images"][0] |= {"width": 30, "height": 40} if seen else {}
    _photo(folder / names[1], 3)
    held["images"][1] |= {"width": 40, "height": 40}
    write_json(folder / "all.json", held)
    task, told = opened(folder)
    assert any(f"taken as they are {'seen' if seen else 'stored'}" in line for line in told)
    (photo,) = [
        stored
        for part in (*task.split(0, 0.5), task.test())
        for stored in next(part.batches(torch.arange(len(part)), 9))[0]
        if (stored[3] == 255).all()
    ]
    assert bool(photo[0, 0, 0] < 128) == seen, "black is on top once it is turned upside down"


def test_verify_speaks_of_one_thing_as_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, names = tmp_path / "own", names_of(6)
    write_images(folder, names)
    held = contents(names)
    held["annotations"].append(annotation(90, 1, 3, (0, 0, 9, 9), iscrowd=1))
    write_json(folder / "all.json", held)
    assert main(["data", "verify", f"coco:{folder}(size=10)", "--data", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "1 image without any, 1 crowd" in told
    assert not [line for line in told.splitlines() if " 1 images" in line or " 1 boxes" in line]
