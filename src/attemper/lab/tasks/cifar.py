"""CIFAR-10 and CIFAR-100 from the official files, binary or Python, each checked against its official md5."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pickle
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attemper.errors import MissingFileError, UnreadableError
from attemper.files import read_bytes
from attemper.lab.errors import DataError
from attemper.lab.tasks.base import ImageTask, InputShape
from attemper.lab.tasks.fingerprint import of_tensors
from attemper.lab.tasks.source import MemorySource

SIDE = 32
PIXELS = 3 * SIDE * SIDE


@dataclasses.dataclass(frozen=True)
class Layout:
    """One of the official archives, unpacked: its folder, and the md5 of every file that is read."""

    folder: str
    train: Mapping[str, str]
    test: Mapping[str, str]
    read: Callable[[bytes, Cifar], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]

    @property
    def files(self) -> dict[str, str]:
        return {**self.train, **self.test}


@dataclasses.dataclass(frozen=True)
class Cifar:
    """A member of the family, with its two official layouts."""

    classes: tuple[str, ...] | int
    """Their names, or how many there are."""
    labels: int
    """Bytes before every image in the binary layout; the last of them is the class."""
    key: bytes
    """What the classes are called in the Python layout."""
    torchvision: str
    layouts: tuple[Layout, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.classes))) if isinstance(self.classes, int) else self.classes


def open_cifar(name: str, family: Cifar, root: Path, *, train: int | None = None, test: int | None = None) -> ImageTask:
    """32 × 32 images in colour: 50,000 for training and validation, 10,000 for test."""
    files = Files(family, find_layout(name, family, root), root)
    return ImageTask(
        name=name,
        shape=InputShape(channels=3, height=SIDE, width=SIDE, classes=len(family.names)),
        fingerprint=files.fingerprint,
        pool=lambda: files.train,
        held_out=lambda: files.test,
        classes=family.names,
        train=train,
        test_images=test,
    )


@dataclasses.dataclass
class Files:
    """What lies under a data root, read once."""

    family: Cifar
    layout: Layout
    root: Path

    @cached_property
    def train(self) -> MemorySource:
        return self._read(self.layout.train)

    @cached_property
    def test(self) -> MemorySource:
        return self._read(self.layout.test)

    @cached_property
    def fingerprint(self) -> str:
        """Of images and labels, so that it is the same for both layouts."""
        return of_tensors(self.train.images, self.train.targets, self.test.images, self.test.targets)

    def _read(self, files: Mapping[str, str]) -> MemorySource:
        images, targets = [], []
        for name, md5 in files.items():
            data = checked(self.root / self.layout.folder / name, md5)
            pixels, labels = self.layout.read(data, self.family)
            images.append(torch.from_numpy(pixels.reshape(-1, 3, SIDE, SIDE).copy()))
            targets.append(torch.from_numpy(labels.astype(np.int64)))
        return MemorySource(torch.cat(images), torch.cat(targets))


def is_there(family: Cifar, root: Path) -> bool:
    """Whether a folder of one of the layouts exists, be its files right or wrong."""
    return any((root / layout.folder).is_dir() for layout in family.layouts)


def find_layout(name: str, family: Cifar, root: Path) -> Layout:
    """The first layout whose folder exists; what is wrong inside of it comes out when its files are read."""
    for layout in family.layouts:
        if (root / layout.folder).is_dir():
            return layout
    folders = " nor ".join(f"'{layout.folder}'" for layout in family.layouts)
    raise DataError(
        f"The files of {name} are not there: '{root}' has neither {folders}. Name the folder that has one of them as "
        f"data root (or set ATTEMPER_DATA), or let `attemper data prepare {name}` download them."
    )


def checked(file: Path, md5: str) -> bytes:
    """The bytes of a file, if they are the official ones."""
    try:
        data = read_bytes(file)
    except MissingFileError:
        raise DataError(f"'{file}' is missing; its official md5 is {md5}.") from None
    except UnreadableError as error:
        raise DataError(str(error)) from None
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != md5:
        raise DataError(
            f"'{file}' is not the official file: its md5 is {found} and should be {md5} ({len(data):,} bytes; is it "
            "truncated or damaged?). Delete it and get it again."
        )
    return data


def read_binary(data: bytes, family: Cifar) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows of label bytes and 3,072 pixel bytes, red first."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, family.labels + PIXELS)
    return rows[:, family.labels :], rows[:, family.labels - 1]


def read_python(data: bytes, family: Cifar) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A pickled dictionary with an array of pixels and a list of classes."""
    batch = Arrays(io.BytesIO(data), encoding="bytes").load()
    return np.asarray(batch[b"data"], np.uint8), np.asarray(batch[family.key])


class Arrays(pickle.Unpickler):
    """Reads pickles that hold nothing but arrays in plain containers: any other name in them is refused, not run."""

    ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),  # how Python 2's byte strings are written by newer protocols
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"'{module}.{name}' has no place in a file of arrays")
        if name == "_reconstruct":
            module = np.zeros(0).__reduce__()[0].__module__  # numpy has moved it
        return super().find_class(module, name)


CIFAR: dict[str, Cifar] = {
    "cifar10": Cifar(
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        labels=1,
        key=b"labels",
        torchvision="CIFAR10",
        layouts=(
            Layout(
                "cifar-10-batches-bin",
                {
                    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                },
                {"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
                read_binary,
            ),
            Layout(
                "cifar-10-batches-py",
                {
                    "data_batch_1": "c99cafc152244af753f735de768cd75f",
                    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                    "data_batch_4": "634d18415352ddfa80567beed471001a",
                    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                },
                {"test_batch": "40351d587109b95175f43aff81a1287e"},
                read_python,
            ),
        ),
    ),
    "cifar100": Cifar(
        classes=100,
        labels=2,
        key=b"fine_labels",
        torchvision="CIFAR100",
        layouts=(
            Layout(
                "cifar-100-binary",
                {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"},
                {"test.bin": "4499cfba6c016c1be1438163640a0898"},
                read_binary,
            ),
            Layout(
                "cifar-100-python",
                {"train": "16019d7e3df5f24257cddd939b257f8d"},
                {"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
                read_python,
            ),
        ),
    ),
}
