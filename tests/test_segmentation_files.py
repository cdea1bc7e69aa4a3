"""Folders of images with masks: which layouts are read, and that everything wrong with the files is told at once."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import damage
import mask_files
from attemper.errors import AttemperError, ParameterError
from attemper.lab.errors import DataError
from attemper.lab.tasks import source as memory
from attemper.lab.tasks.notifications import Silent, listening
from attemper.lab.tasks.registry import open_task, verify
from attemper.lab.tasks.segmentation.task import SegmentationTask
from attemper.tempering.outputs import IGNORED


def opened(folder: Path, options: str = "", root: Path | None = None) -> SegmentationTask:
    text = f"segment:{folder}(size=8{', ' + options if options else ''})"
    with listening(Silent()):
        task = open_task(text, root or folder.parent)
    assert isinstance(task, SegmentationTask)
    return task


def sizes(task: SegmentationTask, validation: float = 0.5) -> list[int]:
    return [*(len(part) for part in task.split(0, validation)), len(task.test())]


def everything(task: SegmentationTask) -> tuple[torch.Tensor, torch.Tensor]:
    source = task.test()
    return next(source.batches(torch.arange(len(source)), len(source)))


# -------------------------------------------------------------------------------------------------------------- layouts
def test_ade20k_has_nothing_at_zero_and_its_validation_part_is_the_test_set(tmp_path: Path) -> None:
    task = opened(mask_files.ade(tmp_path / "ade"))
    assert sizes(task) == [3, 3, 2]
    assert (task.classes, task.numbers) == (("1", "2", "3"), (1, 2, 3))
    _, targets = everything(task)
    assert set(targets.unique().tolist()) == {0, 1, 2, IGNORED}, "IGNORED above and below, where the canvas is higher"


def test_a_set_with_three_parts_is_validated_on_its_own_part(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    for at in range(3):
        mask_files.image(folder / "images" / "test" / f"t{at}.png", seed=at)
        mask_files.mask(folder / "annotations" / "test" / f"t{at}.png", mask_files.numbers())
    assert sizes(opened(folder)) == [6, 2, 3]
    shutil.rmtree(folder / "annotations" / "test")
    task = opened(folder)
    assert sizes(task) == [3, 3, 2]
    assert any("is not used: there are no masks for it" in note for note in task.notes)


def test_files_without_parts_give_a_fixed_fifth_for_test(tmp_path: Path) -> None:
    for at in range(10):
        mask_files.image(tmp_path / "flat" / "images" / f"{at}.jpg", seed=at)
        mask_files.mask(tmp_path / "flat" / "masks" / f"{at}.png", mask_files.numbers(shift=at))
    assert sizes(opened(tmp_path / "flat")) == [4, 4, 2]
    assert opened(tmp_path / "flat").fingerprint == opened(tmp_path / "flat").fingerprint


def test_parts_may_stand_above_images_and_masks(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("val", 2)):
        for at in range(count):
            mask_files.image(tmp_path / "set" / part / "images" / "deep" / f"{at}.png", seed=at + 10 * count)
            mask_files.mask(tmp_path / "set" / part / "labels" / "deep" / f"{at}.png", mask_files.numbers())
    assert sizes(opened(tmp_path / "set")) == [2, 2, 2]


def test_pascal_voc_is_read_by_its_lists_without_a_look_at_palettes(tmp_path: Path) -> None:
    task = opened(mask_files.voc(tmp_path / "voc", test=2))
    assert sizes(task) == [2, 3, 2] or sizes(task) == [3, 2, 2]
    assert (task.classes, task.numbers) == (("0", "1", "2"), (0, 1, 2))
    assert any("test.txt' is not used" in note for note in task.notes)
    truth = task.test().truth(0)  # type: ignore[attr-defined]
    assert truth[1].tolist() == mask_files.numbers(first=0)[1].tolist()
    assert (truth[0] == 255).all()


def test_twenty_one_classes_of_pascal_voc_have_their_names(tmp_path: Path) -> None:
    folder = mask_files.voc(tmp_path / "voc")
    mask_files.mask(folder / "SegmentationClass" / "train_0.png", np.arange(80).reshape(8, 10) % 21, "P")
    task = opened(folder)
    assert (len(task.classes), task.classes[0], task.classes[-1]) == (21, "background", "tvmonitor")


def test_pets_are_read_by_their_lists_and_the_border_can_be_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "pets"
    for part, count in (("trainval", 4), ("test", 2)):
        names = [f"{part}_{at}" for at in range(count)]
        for at, name in enumerate(names):
            mask_files.image(folder / "images" / f"{name}.jpg", seed=at)
            mask_files.mask(folder / "annotations" / "trimaps" / f"{name}.png", mask_files.numbers())
        (folder / "annotations" / f"{part}.txt").write_text("".join(f"{name} 1 1 1\n" for name in names))
    assert opened(folder).classes == ("pet", "background", "border")
    without = opened(folder, "ignore=3")
    assert (without.classes, without.numbers, sizes(without)) == (("pet", "background"), (1, 2), [2, 2, 2])


def test_what_zero_means_and_what_is_ignored_can_be_said(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    mask_files.mask(folder / "annotations" / "training" / "training_0.png", mask_files.numbers(first=0))
    assert opened(folder, "zero=background").numbers == (0, 1, 2, 3)
    assert opened(folder, "zero=background, ignore=2").numbers == (0, 1, 3)
    assert opened(folder).numbers == (1, 2, 3)
    prints = {opened(folder, each).fingerprint for each in ("", "zero=background", "ignore=2", "width=16")}
    assert len(prints) == 4


def test_names_of_classes_come_from_a_file_of_the_set(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    rows = [
        "Idx\tRatio\tTrain\tVal\tStuff\tName",
        *(f"{at}\t0.1\t9\t9\t1\t{name}" for at, name in ((1, "wall"), (2, "sky"))),
    ]
    (folder / "objectInfo150.txt").write_text("\n".join([*rows, "3\t0.1\t9\t9\t1\tperson, individual"]))
    assert opened(folder).classes == ("wall", "sky", "person")
    (folder / "classes.txt").write_text("road\ncar\ntree\n\n")
    assert opened(folder).classes == ("road", "car", "tree")
    for text, said in (
        ("road\n\ntree\n", "no name on line 2"),
        ("a\na\n", "more than once: a"),
        ("a\n", "names 1 class;"),
    ):
        (folder / "classes.txt").write_text(text)
        with pytest.raises(DataError, match=said):
            opened(folder)


def test_limits_keep_the_same_images_for_everybody(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    assert sizes(opened(folder, "train=4, test=1")) == [2, 2, 1]
    with pytest.raises(DataError, match="asks for 7 training images, and there are 6"):
        opened(folder, "train=7")


def test_copies_are_never_on_both_sides(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    shutil.copy(folder / "images/validation/validation_0.png", folder / "images/training/training_5.png")
    shutil.copy(folder / "images/training/training_0.png", folder / "images/training/training_1.png")
    task = opened(folder)
    assert any("the same image: 1" in note for note in task.notes)
    for seed in range(8):
        train, held = task.split(seed, 0.4)
        assert len(train) + len(held) == 5
        one, other = ({bytes(image.numpy()) for image in part.images} for part in (train, held))  # type: ignore[attr-defined]
        assert not one & other


def test_what_does_not_fit_into_memory_is_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    task = opened(folder)
    held = task.test()
    monkeypatch.setattr(memory, "MEMORY_LIMIT", 0)
    lazy = task.test()
    assert (held.in_memory, lazy.in_memory) == (True, False)
    assert opened(folder).fingerprint == task.fingerprint
    order = torch.tensor([1, 0])
    for one, other in zip(next(held.batches(order, 2)), next(lazy.batches(order, 2)), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(held.truth(1), lazy.truth(1))  # type: ignore[attr-defined]
    assert torch.equal(held.targets, lazy.targets)
    assert torch.equal(held.take(order).targets, lazy.take(order).targets)


def test_an_image_that_lies_below_its_mask_only_when_turned_is_turned(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    exif = Image.Exif()
    exif[0x0112] = 6
    file = folder / "images" / "validation" / "validation_0.png"
    Image.fromarray(np.zeros((10, 8, 3), np.uint8)).save(file, exif=exif)
    task = opened(folder)
    assert sizes(task) == [3, 3, 2]
    assert any("turned to lie below their masks, as their EXIF data say: 1." in note for note in task.notes)


def test_what_was_found_is_remembered_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attemper.lab.tasks.segmentation import examining

    folder = mask_files.ade(tmp_path / "ade")
    mask_files.mask(folder / "annotations/training/training_0.png", np.zeros((8, 10)))
    first = opened(folder, "broken=skip")
    assert len(list(tmp_path.rglob("*.masks.json"))) == 1
    with monkeypatch.context() as patched:
        patched.setattr(examining, "look", lambda pair: pytest.fail("looked at again"))
        again = opened(folder, "broken=skip")
    assert (again.fingerprint, again.notes) == (first.fingerprint, first.notes)
    mask_files.mask(folder / "annotations/training/training_0.png", mask_files.numbers())
    assert opened(folder).fingerprint != first.fingerprint
    for cache in tmp_path.rglob("*.masks.json"):
        cache.write_text("[[1, 2]]")
    assert sizes(opened(folder)) == [3, 3, 2]


# ------------------------------------------------------------------------------------------------------- what is wrong
def spoil(folder: Path) -> dict[str, str]:
    """One of every kind of fault, with what must be said about it."""
    images, masks = folder / "images" / "training", folder / "annotations" / "training"
    noise = np.random.default_rng(0).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    for at in range(6, 15):
        mask_files.image(images / f"training_{at}.png", seed=at)
        mask_files.mask(masks / f"training_{at}.png", mask_files.numbers())
    mask_files.mask(masks / "training_6.png", mask_files.numbers((9, 10)))
    mask_files.mask(masks / "training_7.png", np.full((8, 10), 7))
    Image.fromarray(noise).save(masks / "training_8.png")
    (masks / "training_9.png").unlink()
    (images / "training_10.png").unlink()
    mask_files.mask(masks / "training_11.png", np.zeros((8, 10)))
    (images / "training_12.png").write_bytes(b"no image")
    Image.fromarray(np.full((8, 10), 300, np.uint16)).save(masks / "training_13.png")
    (masks / "training_14.png").unlink()
    Image.fromarray(noise[..., 0]).save(masks / "training_14.jpg")
    (folder / "classes.txt").write_text("a\nb\nc\n")
    return {
        "1 mask has another size than its image": r"training_6.png' \(10 × 9 pixels, and the image 10 × 8\)",
        "1 mask has numbers that are no class": r"training_7.png' \(7; the classes are 1 to 3\)",
        "3 masks cannot be used": r"training_8.png' \(80 colours \(RGB\) in place of class numbers: write numbers",
        "1 image has no mask": "training_9.png'",
        "1 mask has no image": "annotations/training/training_10.png'",
        "1 mask has no labelled pixel": "training_11.png'",
        "1 image cannot be read": "training_12.png'",
        "": r"training_13.png' \(its numbers go from 0 to 300; classes are those from 0 to 255",
        " ": "it is a JPEG, which changes numbers; masks must be PNG",
    }


def test_everything_that_is_wrong_is_told_at_once_and_can_be_left_out(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    expected = spoil(folder)
    with pytest.raises(DataError) as raised:
        verify(f"segment:{folder}", tmp_path)
    lines = str(raised.value).splitlines()
    for kind, where in expected.items():
        (line,) = [line for line in lines if line.strip().startswith(kind.strip() or "3 masks cannot be used")]
        assert_in(where, line)
    assert "broken=skip" in lines[-1]
    task = opened(folder, "broken=skip")
    assert sizes(task) == [3, 3, 2]
    assert sum("training_" in note for note in task.notes) == 7, "a line for every kind"


def assert_in(pattern: str, line: str) -> None:
    import re

    assert re.search(pattern, line), (pattern, line)


def test_masks_of_the_full_ade20k_are_refused_by_name(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    mask_files.image(folder / "images" / "training" / "x_seg.png")
    mask_files.image(folder / "annotations" / "training" / "x_seg.png")
    with pytest.raises(DataError, match=r"as the full ADE20K does; ADEChallengeData2016 has masks of 150 classes"):
        opened(folder)


@pytest.mark.parametrize("values", [(0, 255), (0,), (1, 255)])
def test_masks_of_less_than_two_classes_say_what_their_numbers_mean(values: tuple[int, ...], tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    for file in (folder / "annotations").rglob("*.png"):
        mask_files.mask(file, np.resize(values, (8, 10)))
    next((folder / "annotations").rglob("*.png")).unlink()
    with pytest.raises(DataError, match=r"(?s)class(es)?, and 2 are needed.*zero=background.*1 image has no mask"):
        opened(folder)


def test_files_of_one_name_and_two_endings_are_told_apart_by_nobody(tmp_path: Path) -> None:
    folder = mask_files.ade(tmp_path / "ade")
    mask_files.image(folder / "images" / "training" / "training_0.jpg")
    (folder / "images" / "training" / "training_1.png").write_bytes(b"no image")
    with pytest.raises(DataError) as raised:
        opened(folder)
    assert (
        "1 name has files of several endings, so that none is meant: 'images/training/training_0.jpg' (.jpg, .png)"
        in str(raised.value)
    )
    assert "1 image cannot be read: 'images/training/training_1.png' (it is no image that Pillow knows)" in str(
        raised.value
    )
    assert sizes(opened(folder, "broken=skip"))[0] == sizes(opened(mask_files.ade(tmp_path / "whole")))[0] - 1


def test_a_folder_of_another_layout_says_what_is_known_and_what_was_likely_meant(tmp_path: Path) -> None:
    mask_files.ade(tmp_path / "outer" / "ADEChallengeData2016")
    with pytest.raises(DataError, match=r"'ImageSets/Segmentation'\. '.*ADEChallengeData2016' looks like one"):
        opened(tmp_path / "outer")
    (tmp_path / "half" / "JPEGImages").mkdir(parents=True)
    with pytest.raises(DataError, match="no folder 'SegmentationClass'"):
        opened(tmp_path / "half")
    for text, said in (
        ("zero=nothing", "zero is 'nothing'"),
        ("ignore=-1", "at least 1"),
        ("sise=3", "no option 'sise'"),
    ):
        with pytest.raises(ParameterError, match=said):
            opened(tmp_path / "outer", text)


def test_a_list_that_names_what_is_not_there_names_it(tmp_path: Path) -> None:
    folder = mask_files.voc(tmp_path / "voc")
    with (folder / "ImageSets" / "Segmentation" / "train.txt").open("a") as file:
        file.write("ghost\nother\nother\n")
    with pytest.raises(DataError) as raised:
        opened(folder)
    assert "1 image has no mask: 'JPEGImages/other.png'" in str(raised.value)
    assert "1 name of a list has neither image nor mask: 'ghost (training)'" in str(raised.value)
    assert "1 image is in a list more than once: 'train.txt: other'" in str(raised.value)


def test_names_in_lists_may_have_blanks(tmp_path: Path) -> None:
    folder = mask_files.voc(tmp_path / "voc")
    expected = sizes(opened(folder))
    for file in [*(folder / "JPEGImages").iterdir(), *(folder / "SegmentationClass").iterdir()]:
        file.rename(file.with_name(f"a {file.name}"))
    for file in (folder / "ImageSets" / "Segmentation").glob("*.txt"):
        file.write_text("".join(f"a {line}\n" for line in file.read_text().split()))
    assert sizes(opened(folder)) == expected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), skip=st.booleans())
def test_whatever_happened_to_the_files_is_a_task_or_one_error(seed: int, skip: bool, tmp_path_factory: Any) -> None:
    import random

    r = random.Random(seed)
    folder = (
        mask_files.ade(tmp_path_factory.mktemp("set") / "ade")
        if seed % 2
        else mask_files.voc(tmp_path_factory.mktemp("set") / "voc")
    )
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    for file in r.sample(files, 3):
        change = r.choice([damage.garbage, damage.empty, damage.truncated, damage.grown, damage.flipped, None])
        file.unlink() if change is None else change(r, file)
    with warnings.catch_warnings(), contextlib.suppress(AttemperError):
        warnings.simplefilter("ignore")
        task = opened(folder, "broken=skip" if skip else "")
        train, held = task.split(0, 0.5)
        for source in (train, held, task.test()):
            for stored, targets in source.batches(torch.arange(len(source)), 4):
                assert stored.shape[1:] == (3, 8, 8)
                assert stored.dtype == torch.uint8
                assert int(targets.max()) < len(task.classes)
                assert int(targets.min()) >= IGNORED
