"""CIFAR from the official files: both layouts, checked, and never a stranger's pickle executed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from attemper.lab.errors import DataError
from attemper.lab.tasks.cifar import CIFAR, Arrays, Layout
from attemper.lab.tasks.registry import open_task, verify


def write(root: Path, name: str, layout: Layout, images: int = 40) -> Layout:
    """Small files in an official layout, the same images in each, and the layout with their md5s."""
    family = CIFAR[name]
    tables: list[dict[str, str]] = []
    for seed, files in enumerate((layout.train, layout.test)):
        draw = np.random.default_rng(seed)
        table = {}
        for file in files:
            pixels = draw.integers(0, 256, (images, 3072), dtype=np.uint8)
            labels = np.arange(images) % len(family.names)
            if file.endswith(".bin"):
                columns = [labels.astype(np.uint8)[:, None]] * family.labels
                data = np.concatenate([*columns, pixels], 1).tobytes()
            else:
                data = pickle.dumps({b"data": pixels, family.key: labels.tolist(), b"batch_label": b"x"}, protocol=2)
            path = root / layout.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            table[file] = hashlib.md5(data).hexdigest()
        tables.append(table)
    return dataclasses.replace(layout, train=tables[0], test=tables[1])


def small(name: str, root: Path, monkeypatch: pytest.MonkeyPatch, layouts: tuple[int, ...] = (0, 1)) -> None:
    """Put small files under a root and let their md5s be the official ones."""
    family = CIFAR[name]
    images = 4 * len(family.names)
    made = tuple(
        write(root, name, layout, images) if index in layouts else layout for index, layout in enumerate(family.layouts)
    )
    monkeypatch.setitem(CIFAR, name, dataclasses.replace(family, layouts=made))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_both_layouts_hold_the_same_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = []
    for layout in (0, 1):
        with monkeypatch.context() as patch:
            small(name, tmp_path / str(layout), patch, layouts=(layout,))
            tasks.append(open_task(name, tmp_path / str(layout)))
    binary, python = (task.split(0, 0.5)[0] for task in tasks)
    assert torch.equal(binary.images, python.images)
    assert torch.equal(binary.targets, python.targets)
    assert torch.equal(tasks[0].test().images, tasks[1].test().images)
    assert tasks[0].fingerprint == tasks[1].fingerprint
    assert tasks[0].shape == tasks[1].shape


def test_a_binary_row_is_its_label_and_then_red_green_and_blue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small("cifar100", tmp_path, monkeypatch, layouts=(0,))
    raw = np.fromfile(tmp_path / "cifar-100-binary/test.bin", np.uint8).reshape(-1, 3074)
    test = open_task("cifar100", tmp_path).test()
    assert test.targets.tolist() == raw[:, 1].tolist()
    assert test.images[7, 2, 31, 5] == raw[7, 2 + 2 * 1024 + 31 * 32 + 5]


def test_a_missing_file_is_named_with_its_md5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small("cifar10", tmp_path, monkeypatch, layouts=(0,))
    (tmp_path / "cifar-10-batches-bin/data_batch_3.bin").unlink()
    md5 = CIFAR["cifar10"].layouts[0].train["data_batch_3.bin"]
    with pytest.raises(DataError, match=rf"data_batch_3\.bin' is missing; its official md5 is {md5}"):
        verify("cifar10", tmp_path)


def test_a_truncated_file_is_named_with_both_md5s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small("cifar10", tmp_path, monkeypatch, layouts=(0,))
    file = tmp_path / "cifar-10-batches-bin/test_batch.bin"
    file.write_bytes(file.read_bytes()[:-1])
    found = hashlib.md5(file.read_bytes()).hexdigest()
    md5 = CIFAR["cifar10"].layouts[0].test["test_batch.bin"]
    with pytest.raises(DataError, match=rf"test_batch\.bin' is not the official .* {found} and should be {md5}"):
        open_task("cifar10", tmp_path)


def test_without_files_the_message_says_where_they_are_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither 'cifar-10-batches-bin' nor 'cifar-10-batches-py'.*data prepare"):
        open_task("cifar10", tmp_path)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


@pytest.mark.parametrize("thing", [Evil(), Path("x"), np.random.default_rng(0)])
def test_a_pickle_with_anything_but_arrays_is_refused_and_not_run(thing: object, tmp_path: Path) -> None:
    file = tmp_path / "batch"
    file.write_bytes(pickle.dumps({b"data": thing}))
    with file.open("rb") as opened, pytest.raises(pickle.UnpicklingError, match="has no place in a file of arrays"):
        Arrays(opened).load()
