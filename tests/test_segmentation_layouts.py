"""Masks as other programs write and name them, and what their numbers mean where that is not plain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mask_files
from attemper.errors import ParameterError
from attemper.lab.errors import DataError
from attemper.lab.tasks.notifications import Silent, listening
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.segmentation.task import SegmentationTask


def opened(folder: Path, options: str = "") -> SegmentationTask:
    with listening(Silent()):
        task = open_task(f"segment:{folder}(size=8{', ' + options if options else ''})", folder.parent)
    assert isinstance(task, SegmentationTask)
    return task


def sizes(task: SegmentationTask) -> list[int]:
    return [*(len(part) for part in task.split(0, 0.5)), len(task.test())]


def targets_of(task: SegmentationTask) -> torch.Tensor:
    source = task.test()
    return next(source.batches(torch.arange(len(source)), len(source)))[1]


@pytest.mark.parametrize(("end", "images", "masks"), [("_mask", "images", "masks"), ("_gtFine", "img_dir", "ann_dir")])
def test_masks_may_have_more_words_in_their_names_than_images(
    end: str, images: str, masks: str, tmp_path: Path
) -> None:
    for at in range(10, 20):
        mask_files.image(tmp_path / "set" / images / f"street_{at}.jpg", seed=at)
        mask_files.mask(tmp_path / "set" / masks / f"street_{at}{end}.png", mask_files.numbers(shift=at))
    assert sizes(opened(tmp_path / "set")) == [4, 4, 2]
    (tmp_path / "set" / masks / f"street_10{end}.png").unlink()
    with pytest.raises(DataError, match=rf"1 image has no mask: '{images}/street_10.jpg'"):
        opened(tmp_path / "set")


def test_numbers_up_to_255_are_read_from_16_bits_and_from_three_equal_channels(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    wanted = targets_of(opened(folder))
    for at, file in enumerate(sorted((folder / "annotations").rglob("*.png"))):
        numbers = np.array(Image.open(file))
        Image.fromarray(numbers.astype(np.uint16) if at % 2 else np.repeat(numbers[..., None], 3, -1)).save(file)
    assert torch.equal(targets_of(opened(folder)), wanted)


def test_the_numbers_that_are_classes_can_be_listed(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    for file in (folder / "annotations").rglob("*.png"):
        mask_files.mask(file, np.resize((0, 255, 7), (8, 10)))
    task = opened(folder, "numbers=[0, 255]")
    assert (task.classes, task.numbers) == (("0", "255"), (0, 255))
    truth = task.test().truth(0)  # type: ignore[attr-defined]
    assert truth[0, :3].tolist() == [0, 1, 255], "7 counts for nothing"
    (folder / "classes.txt").write_text("road\ncar\n")
    assert opened(folder, "numbers=[255, 0]").classes == ("road", "car"), "in the order of the numbers"
    (folder / "classes.txt").write_text("".join(f"class{at}\n" for at in range(1, 10)))
    with pytest.raises(DataError, match="names 9 classes, none of which is 255; numbers chooses 2"):
        opened(folder, "numbers=[7, 255]")
    for options, said in (
        ("numbers=[3]", "at least 2 different whole numbers"),
        ("numbers=[0, 256]", "from 0 to 255"),
        ("numbers=[0, 0]", "different"),
        ("numbers=3", "numbers is 3"),
        ("numbers=[0, 7], ignore=7", "leave those out"),
    ):
        with pytest.raises(ParameterError, match=said):
            opened(folder, options)


def test_names_that_begin_with_that_of_zero_are_noticed(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    (folder / "classes.txt").write_text("road\ncar\ntree\n")
    assert not opened(folder).notes
    for file in (folder / "annotations").rglob("*.png"):
        mask_files.mask(file, mask_files.numbers(first=0))
    assert any("if 'road' is what 0 stands for, say zero=background" in note for note in opened(folder).notes)
    assert not opened(folder, "zero=background").notes


def test_lists_may_name_files_with_their_endings_and_those_of_no_part_are_named(tmp_path: Path) -> None:
    folder = mask_files.voc(tmp_path / "voc")
    wanted = opened(folder).fingerprint
    lists = folder / "ImageSets" / "Segmentation"
    for file in lists.glob("*.txt"):
        file.write_text("".join(f"{name}.jpg\r\n" for name in file.read_text().split()))
    assert opened(folder).fingerprint == wanted
    (lists / "train_aug.txt").write_text("train_0\n")
    assert any("train_aug.txt' is not used" in note for note in opened(folder).notes)


@pytest.mark.parametrize("seen", [True, False])
def test_photos_of_one_size_either_way_are_turned_as_the_others_are(seen: bool, tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    photos = folder / "images" / "validation"

    def photo(name: str, way: int, size: tuple[int, int]) -> None:
        exif = Image.Exif()
        exif[0x0112] = way
        pixels = np.zeros((*size, 3), np.uint8)
        pixels[: size[0] // 2] = 255
        Image.fromarray(pixels).save(photos / name, exif=exif)

    photo("validation_0.png", 3, (8, 10))
    if seen:
        photo("validation_1.png", 6, (10, 8))
    task = opened(folder)
    how = "seen, as others are" if seen else "stored"
    assert f"1 image is turned by EXIF data and of one size either way: taken as {how}." in task.notes
    stored, _ = next(task.test().batches(torch.tensor([0]), 1))
    assert bool(stored[0, 0, 2, 4] < 128) == seen, "black is on top once it is turned upside down"
