"""MNIST's own files: read as they are, and refused by name where their headers and contents do not agree."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.idx import read_idx
from attemper.lab.tasks.registry import open_task, verify


def packed(values: Any, kind: int = 8) -> bytes:
    array = np.asarray(values, np.uint8)
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.tobytes()


def images(count: int, *shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, *(shape or (6, 5))), dtype=np.uint8)


def mnist(
    folder: Path, *, gz: bool = False, between: str = "-", prefix: str = "", first: int = 0, **files: Any
) -> Path:
    """A folder like MNIST's, with three classes. files: contents of single files instead; None: it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "train-images": packed(images(30)),
        "train-labels": packed(first + np.arange(30) % 3),
        "t10k-images": packed(images(12, seed=1)),
        "t10k-labels": packed(first + np.arange(12) % 3),
    }
    for name, data in {**whole, **{key.replace("_", "-"): value for key, value in files.items()}}.items():
        if data is not None:
            dims = 3 if "images" in name else 1
            full = f"{prefix}{name}{between}idx{dims}-ubyte{'.gz' if gz else ''}"
            (folder / full).write_bytes(gzip.compress(data) if gz else data)
    return folder


@pytest.mark.parametrize(
    "how",
    [{}, {"gz": True}, {"between": "."}, {"prefix": "emnist-letters-", "first": 1}],
    ids=["plain", "gz", "dot", "emnist"],
)
def test_the_files_of_mnist_are_a_task(tmp_path: Path, how: dict[str, Any]) -> None:
    mnist(tmp_path / "digits" / "raw", **how)
    task = open_task("idx:digits", tmp_path)
    assert task.shape == InputShape(channels=1, height=6, width=5, classes=3)
    assert task.classes == (("1", "2", "3") if how.get("first") else ("0", "1", "2"))
    held = task.test()
    assert np.array_equal(held.images[:, 0].numpy(), images(12, seed=1))
    assert held.targets.tolist() == [0, 1, 2] * 4
    assert sum(map(len, task.split(0, 0.3))) == 30
    assert build_model("vit-digits(depth=1, patch=1)", task.shape)(task.to_input(held.images)).shape == (12, 3)
    assert verify("idx:digits", tmp_path) == [
        "idx:digits: 30 training samples and 12 test samples of 1 × 6 × 5 and of 3 classes"
    ]


def test_packed_and_unpacked_files_are_the_same_data(tmp_path: Path) -> None:
    plain, gz = mnist(tmp_path / "plain"), mnist(tmp_path / "gz", gz=True)
    fingerprints = {open_task(f"idx:{folder}", tmp_path).fingerprint for folder in (plain, gz)}
    assert len(fingerprints) == 1
    (plain / "train-images-idx3-ubyte.gz").write_bytes(b"not looked at")
    for file in list(gz.iterdir()):  # browsers unpack, and keep the name
        file.write_bytes(gzip.decompress(file.read_bytes()))
    assert {open_task(f"idx:{folder}", tmp_path).fingerprint for folder in (plain, gz)} == fingerprints
    changed = mnist(tmp_path / "other", t10k_labels=packed((np.arange(12) + 1) % 3))
    assert open_task(f"idx:{changed}", tmp_path).fingerprint not in fingerprints


def test_colours_and_sets_without_a_test_part_are_read(tmp_path: Path) -> None:
    colours = images(30, 6, 5, 3)
    mnist(tmp_path / "set", train_images=packed(colours), t10k_images=None, t10k_labels=None)
    task = open_task("idx:set", tmp_path)
    assert task.shape == InputShape(channels=3, height=6, width=5, classes=3)
    parts = [*task.split(0, 0.5), task.test()]
    assert [len(part) for part in parts] == [12, 12, 6]
    seen = torch.cat([part.images for part in parts]).permute(0, 2, 3, 1).numpy()
    assert {each.tobytes() for each in seen} == {each.tobytes() for each in colours}


HUGE = struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train_labels": None}, "has no file with the train labels"),
        ({"train_labels": None, "t10k_images": None}, "no file with the train labels and no file with the test images"),
        ({"train_labels": packed(np.zeros(29))}, "ubyte' has 30 images, and 'train-labels-idx1-ubyte' has 29 labels"),
        ({"train_images": b"<!DOCTYPE html><html>"}, "is not an idx file: it begins with b'<!DOCTYPE html><"),
        ({"train_images": b""}, "the file is empty"),
        ({"train_images": packed(images(30))[:3]}, "is not an idx file"),
        ({"train_images": packed(images(30), kind=0x0D)}, "values of the type 0x0d; only bytes, 0x08"),
        ({"train_images": packed(images(30))[:-7]}, "says 30 × 6 × 5 = 900 values, and it has 893"),
        ({"train_images": packed(images(30)) + b"x"}, "= 900 values, and it has more"),
        ({"train_images": packed(images(30))[:10]}, "it ends inside of its header"),
        ({"train_images": packed(images(0))}, "has no values: its header says 0 × 6 × 5"),
        ({"train_images": HUGE}, "says 4,294,967,295 × 4,294,967,295 × 4,294,967,295 values; is it damaged"),
        ({"train_images": packed(images(30, 1, 5000))}, "have 1 × 5,000 pixels; is it damaged"),
        ({"train_images": packed(images(30, 5))}, "has 30 × 5 values; images are count × height × width"),
        ({"train_images": packed(images(30, 6, 5, 2))}, "has 30 × 6 × 5 × 2 values"),
        ({"train_labels": packed(np.zeros((30, 1)))}, "has 30 × 1 values; labels are one number per image"),
        ({"train_labels": packed(np.zeros(30))}, "has 1 classes; there must be at least 2"),
        ({"t10k_labels": packed([7, 9] * 6)}, "has labels that training lacks: 7; 9"),
        ({"t10k_images": packed(images(12, 5, 5))}, "are 6 × 5, and those of .* 5 × 5"),
    ],
)
def test_files_that_do_not_agree_are_refused_in_one_line(
    tmp_path: Path, files: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mnist(tmp_path / "set", **files)
    with pytest.raises(DataError, match=message):
        open_task("idx:set", tmp_path)
    assert main(["data", "verify", "idx:set", "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_not_there_or_there_twice_is_said(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"must have files such as 'train-images-idx3-ubyte' .* has no such files"):
        open_task("idx:none", tmp_path)
    for prefix in ("emnist-letters-", "emnist-digits-"):
        mnist(tmp_path / "two", prefix=prefix)
    with pytest.raises(DataError, match="begin with 'emnist-digits-'; 'emnist-letters-'; choose one with the option"):
        open_task("idx:two", tmp_path)
    assert open_task("idx:two(prefix='emnist-digits-')", tmp_path).shape.classes == 3


@pytest.mark.parametrize("cut", [1, 10, 15, 60])
def test_a_truncated_gz_is_named(tmp_path: Path, cut: int) -> None:
    mnist(tmp_path / "set", gz=True)
    file = tmp_path / "set" / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz' is truncated or damaged"):
        open_task("idx:set", tmp_path)


@settings(max_examples=120, deadline=None)
@given(
    gz=st.booleans(),
    changes=st.dictionaries(st.integers(0, 40), st.integers(0, 255), max_size=4),
    cut=st.integers(0, 136),
)
def test_whatever_happens_to_a_file_it_is_an_array_or_a_data_error(
    tmp_path_factory: Any, gz: bool, changes: dict[int, int], cut: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "mutated"
    data = bytearray(gzip.compress(packed(images(4)), mtime=0) if gz else packed(images(4)))
    for at, byte in changes.items():
        data[at % len(data)] = byte
    file.write_bytes(bytes(data[: len(data) - cut]))
    try:
        found = read_idx(file)
    except DataError:
        return
    assert found.dtype == np.uint8
    assert found.size == len(found.tobytes())
