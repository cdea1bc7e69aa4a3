"""Tasks: the same split for everybody, a test set behind one method, and files that are what they should be."""

from __future__ import annotations

import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.errors import DataError
from attemper.lab.tasks import source
from attemper.lab.tasks.registry import open_task, prepare, verify
from attemper.lab.tasks.source import LazySource, MemorySource
from attemper.lab.tasks.split import divide


def rows(images: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


# ------------------------------------------------------------------------------------------------------------- splits
def test_the_split_is_a_function_of_the_seed() -> None:
    task = open_task("digits")
    first, again, other = (task.split(seed, 0.3) for seed in (0, 0, 1))
    assert torch.equal(first[0].images, again[0].images)
    assert torch.equal(first[1].targets, again[1].targets)
    assert not torch.equal(first[0].images, other[0].images)


def test_training_validation_and_test_images_have_none_in_common() -> None:
    task = open_task("digits")
    train, validation = task.split(3, 0.3)
    parts = [rows(part.images) for part in (train, validation, task.test())]
    assert len(train) + len(validation) + len(task.test()) == 1797
    assert len(parts[0] | parts[1] | parts[2]) == sum(map(len, parts))


def test_the_test_set_is_the_same_for_every_seed_and_share() -> None:
    task = open_task("digits")
    before = task.test().images
    task.split(1, 0.5)
    assert torch.equal(task.test().images, before)
    assert torch.equal(open_task("digits").test().images, before)


@pytest.mark.parametrize("counts", [(10, 20, 70), (2, 2, 2), (3, 100, 2), (50, 1, 5)])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
def test_a_split_has_its_size_and_every_class_in_its_proportion(counts: tuple[int, ...], share: float) -> None:
    targets = torch.cat([torch.full((count,), c) for c, count in enumerate(counts)])
    held = round(len(targets) * share)
    kept, out = divide(targets, held, seed=5)
    assert len(out) == held
    assert torch.equal(torch.cat([kept, out]).sort().values, torch.arange(len(targets)))
    for c, count in enumerate(counts):
        assert abs(int((targets[out] == c).sum()) - count * share) <= len(counts) - 1


def test_no_class_is_missing_from_either_part_where_there_is_room() -> None:
    targets = torch.tensor([0] * 100 + [1] * 2)
    for held in (2, 10, 50, 100):
        kept, out = divide(targets, held, seed=0)
        assert set(targets[kept].tolist()) == set(targets[out].tolist()) == {0, 1}


def test_a_number_of_images_can_be_chosen_and_is_the_same_for_everybody() -> None:
    small = open_task("digits(train=100, test=50)")
    assert sum(map(len, small.split(0, 0.3))) == 100
    assert len(small.test()) == 50
    assert torch.bincount(small.test().targets).tolist() == [5] * 10
    assert rows(small.test().images) <= rows(open_task("digits").test().images)


def test_inputs_have_mean_zero_and_deviation_one_over_the_training_set() -> None:
    task = open_task("digits")
    inputs = torch.cat([task.to_input(part.images) for part in task.split(0, 0.3)])
    assert inputs.dtype == torch.float32
    assert abs(float(inputs.mean())) < 1e-4
    assert abs(float(inputs.std()) - 1) < 1e-3


# -------------------------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("digit", "no task 'digit'. Did you mean 'digits'"),
        ("digits(trian=3)", "no option 'trian'. Did you mean 'train'"),
        ("digits(train=0)", "train is 0; it must be a whole number"),
        ("digits(train=many)", "train is 'many'; it must be a whole number"),
        ("folder:x(training=3)", "no option 'training'"),
        ("timm:x(training=3)", "training is 3; it must be a word"),
    ],
)
def test_a_wrong_name_or_option_is_refused_with_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        open_task(text)


def test_more_images_than_there_are_is_refused() -> None:
    with pytest.raises(DataError, match="asks for 5000 training images, and there are 1437"):
        open_task("digits(train=5000)").split(0, 0.3)


def test_fewer_images_than_classes_is_refused() -> None:
    with pytest.raises(DataError, match="has 9 training images of 10 classes"):
        open_task("digits(train=9)").split(0, 0.3)


def test_the_data_root_can_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "flowers", ["a", "b"], 4)
    monkeypatch.setenv("ATTEMPER_DATA", str(tmp_path))
    assert open_task("folder:flowers(size=8)").shape.classes == 2


# ------------------------------------------------------------------------------------------------------------ folders
def make_folder(folder: Path, classes: list[str], images: int, side: int = 10) -> None:
    draw = np.random.default_rng(len(str(folder)))
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(images):
            pixels = draw.integers(0, 256, (side, side + 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


def test_a_folder_with_train_and_test_keeps_them_apart(tmp_path: Path) -> None:
    make_folder(tmp_path / "set/train", ["cat", "dog"], 6)
    make_folder(tmp_path / "set/val", ["cat", "dog"], 3)
    task = open_task("folder:set(size=8)", tmp_path)
    train, validation = task.split(0, 0.5)
    assert (len(train), len(validation), len(task.test())) == (6, 6, 6)
    assert train.images.shape == (6, 3, 8, 8)
    assert not rows(task.test().images) & (rows(train.images) | rows(validation.images))


def test_a_folder_without_a_test_part_gives_up_a_fixed_fifth(tmp_path: Path) -> None:
    make_folder(tmp_path / "set", ["cat", "dog"], 10)
    task, again = (open_task("folder:set(size=8)", tmp_path) for _ in range(2))
    assert (sum(map(len, task.split(0, 0.5))), len(task.test())) == (16, 4)
    assert torch.equal(task.test().images, again.test().images)


def test_the_fingerprint_follows_the_contents_and_not_the_place(tmp_path: Path) -> None:
    for place in ("here", "there"):
        make_folder(tmp_path / place / "set", ["cat", "dog"], 4)
    paths = sorted((tmp_path / "here/set").rglob("*.png"))
    for path in paths:
        (tmp_path / "there" / path.relative_to(tmp_path / "here")).write_bytes(path.read_bytes())
    here, there = (open_task("folder:set(size=8)", tmp_path / place).fingerprint for place in ("here", "there"))
    assert here == there
    paths[0].write_bytes(paths[1].read_bytes())
    assert open_task("folder:set(size=8)", tmp_path / "here").fingerprint != here
    assert open_task("folder:set(size=4)", tmp_path / "there").fingerprint != there


def test_images_that_do_not_fit_in_memory_are_the_same_read_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "set", ["cat", "dog"], 10)
    in_memory, _ = open_task("folder:set(size=8)", tmp_path).split(0, 0.5)
    monkeypatch.setattr(source, "MEMORY_LIMIT", 100)
    lazy_task = open_task("folder:set(size=8)", tmp_path)
    lazy, _ = lazy_task.split(0, 0.5)
    assert isinstance(in_memory, MemorySource)
    assert isinstance(lazy, LazySource)
    lazy.workers = 1
    order = torch.tensor([3, 1, 0, 2, 5])
    before = torch.get_rng_state()
    for ours, theirs in zip(in_memory.batches(order, 2), lazy.batches(order, 2), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert torch.equal(torch.get_rng_state(), before), "a loader drew from the stream of the stochastic methods"
    assert lazy_task.to_input(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)).dtype == torch.float32


def test_a_bad_folder_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'nowhere' is not a folder"):
        open_task("folder:nowhere", tmp_path)
    make_folder(tmp_path / "one", ["cat"], 2)
    with pytest.raises(DataError, match="has 1 class folder; there must be at least 2"):
        open_task("folder:one", tmp_path)
    make_folder(tmp_path / "empty", ["cat", "dog"], 0)
    with pytest.raises(DataError, match=r"2 of 2 class folders have no images in them: .*cat'; .*dog' \(looked for"):
        open_task("folder:empty", tmp_path)
    make_folder(tmp_path / "odd/train", ["cat", "dog"], 2)
    make_folder(tmp_path / "odd/test", ["cat", "fox"], 2)
    with pytest.raises(DataError, match="different classes: only 'train' has 'dog'; only 'test' has 'fox'"):
        open_task("folder:odd", tmp_path)


# --------------------------------------------------------------------------------------------------------------- timm
class Stream(torch.utils.data.IterableDataset[Any]):
    """Six images, one after the other."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        draw = np.random.default_rng(0)
        for index in range(6):
            yield Image.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8)), index % 2


def test_what_timm_opens_is_a_task(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", ["cat", "dog"], 5)
    make_folder(tmp_path / "validation", ["cat", "dog"], 2)
    task = open_task("timm:torch/image_folder(size=8)", tmp_path)
    assert task.shape.classes == 2
    assert sum(map(len, task.split(0, 0.5))) == 10
    assert len(task.test()) == 4


def test_a_stream_that_timm_opens_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timm.data.dataset_factory.create_dataset", lambda *args, **kwargs: Stream())
    task = open_task("timm:wds/small(size=8)")
    assert sum(map(len, task.split(0, 0.5))) == 6
    monkeypatch.setattr(source, "MEMORY_LIMIT", 10)
    with pytest.raises(DataError, match="is a stream and too large"):
        open_task("timm:wds/small(size=8)")


def test_images_that_timm_cannot_read_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "train", ["cat", "dog"], 5)
    make_folder(tmp_path / "validation", ["cat", "dog"], 2)
    for name in ("cat/1.png", "dog/3.png"):
        (tmp_path / "train" / name).write_bytes(b"no picture")
    message = r"2 of 10 images of the split 'train' .* cannot be read: sample 1 \(cannot identify.*; sample 8 \("
    with pytest.raises(DataError, match=message):
        open_task("timm:torch/image_folder(size=8)", tmp_path)


def test_what_timm_cannot_open_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="timm could not open the split 'train' of 'torch/nothing'"):
        open_task("timm:torch/nothing", tmp_path)


# ----------------------------------------------------------------------------------------------- verify and prepare
def test_verify_says_what_is_there() -> None:
    assert verify("digits(train=100)") == [
        "digits(train=100): 100 training samples and 360 test samples of 1 × 8 × 8 and of 10 classes"
    ]


def test_prepare_without_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("torchvision.datasets.CIFAR10", offline)
    with pytest.raises(DataError, match=r"could not be downloaded into .* no route to host.*cifar-10-batches-bin or"):
        prepare("cifar10", tmp_path / "data")
