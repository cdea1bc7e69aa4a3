"""More of what can be wrong with images and their boxes: sizes that are not told, several files, slivers of images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attemper.lab.errors import DataError
from attemper.lab.tasks.boxes.augmenting import box_augmentation
from attemper.lab.tasks.boxes.shape import BOX, CLASS, CROWD
from attemper.lab.tasks.boxes.task import BoxTask, to_input
from attemper.lab.tasks.registry import open_task
from coco_files import annotation, coco_set, contents, names_of, write_images, write_json


def opened(folder: Path, options: str = "size=32") -> BoxTask:
    task = open_task(f"coco:{folder}({options})", folder.parent)
    assert isinstance(task, BoxTask)
    return task


def test_boxes_are_held_against_the_files_where_no_size_is_told(tmp_path: Path) -> None:
    folder, names = tmp_path / "own", names_of(12)
    write_images(folder, names)
    held = contents(names)
    held["annotations"] += [annotation(101, 1, 3, (100, 5, 10, 10)), annotation(102, 2, 7, (30, 5, 30, 10))]
    held["annotations"] += [{"image_id": 6, "category_id": 7, "bbox": [1, 50, 3, 3]}]
    for image in held["images"]:
        del image["width"], image["height"]
    write_json(folder / "all.json", held)
    with pytest.raises(DataError) as caught:
        opened(folder)
    for line in (
        "'annotation 101' (photo01.png: 100, 5, 10 × 10, in 40 × 30)",
        "'box number 3 of photo06.png' (photo06.png: 1, 50, 3 × 3, in 40 × 30)",
        "1 box reaches out of its image, and is cut off there: 'annotation 102' (photo02.png: 30, 5, 30 × 10, in 40",
    ):
        assert line in str(caught.value)
    task = opened(folder, "size=40, broken=skip")
    parts = [*task.split(0, 0.3), task.test()]
    rows = torch.cat([rows for part in parts for _, rows in part.batches(torch.arange(len(part)), 12)])
    assert rows[..., BOX].max() <= 1
    assert (
        sum(int((row[..., CLASS] >= 0).sum()) for row in rows)
        == sum(len(e["bbox"]) == 4 for e in held["annotations"]) - 2
    )


def test_all_files_are_told_of_though_one_of_them_cannot_be_read(tmp_path: Path) -> None:
    folder = coco_set(tmp_path / "set")
    (folder / "annotations/instances_train2017.json").write_text('{"images": [')
    held = contents(names_of(3, "val"))
    write_json(
        folder / "annotations/instances_val2017.json", {**held, "annotations": [annotation(1, 1, 3, (1, 1, 0, 1))]}
    )
    with pytest.raises(
        DataError, match=r"(?s)train2017.json' is no JSON, or damaged.*1 box has no size: 'annot.*annotation 1'"
    ):
        opened(folder)
    write_json(folder / "annotations/instances_val2017.json", [])
    with pytest.raises(DataError, match=r"(?s)train2017.json' is no JSON, or damaged.*val2017.json' is no COCO JSON"):
        opened(folder)


def test_entries_that_are_wrong_are_told_as_they_are_and_as_they_should_be(tmp_path: Path) -> None:
    folder, names = tmp_path / "own", names_of(4)
    write_images(folder, names)
    held = contents(names)
    held["images"][0]["width"] = "wide"
    held["categories"] += [{"id": 8, "name": 5}]
    held["annotations"] += [{"id": 101, "image_id": 2, "category_id": 3, "bbox": [1, 2, 3]}]
    held["annotations"] += [{"id": 102, "image_id": 2, "category_id": 3}]
    write_json(folder / "all.json", held)
    with pytest.raises(DataError) as caught:
        opened(folder)
    for line in (
        "'photo01.png' (its width and height are 'wide' and 30, and must be pixels)",
        "'category 8' (its name is 5, and must be a text)",
        "'annotation 101' (its bbox is [1, 2, 3], and must be four numbers, [left, top, width, height])",
        "'annotation 102' (it has no bbox, which must be four numbers",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize("height", [1, 2])
@pytest.mark.parametrize("text", ["scale", "flip+crop+scale(0.05)+zoom-out+photometric"])
def test_slivers_of_images_are_augmented_too(text: str, height: int) -> None:
    images = torch.zeros(4, 4, 48, 48, dtype=torch.uint8)
    images[:, :, :height] = 255
    rows = torch.zeros(4, 1, 7)
    rows[..., BOX] = torch.tensor([0.1, 0.0, 0.9, height / 48])
    rows[..., CROWD] = 0.0
    for seed in range(5):
        x, y = box_augmentation(text)(images, rows, classes=1, to_input=to_input, seed=seed)
        assert (x[:, 3].flatten(1).sum(1) > 0).all(), "something of the image is left"
        assert y.isfinite().all()
