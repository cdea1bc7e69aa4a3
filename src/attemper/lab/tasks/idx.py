"""Images and labels in the idx files of MNIST and its relatives: Fashion-MNIST, KMNIST, EMNIST."""

import contextlib
import gzip
import math
import re
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attemper.lab.errors import DataError
from attemper.lab.tasks import source
from attemper.lab.tasks.base import ImageTask, InputShape
from attemper.lab.tasks.broken import listed, reason_of_bytes, shown
from attemper.lab.tasks.fingerprint import of_tensors
from attemper.lab.tasks.source import MemorySource, found_under
from attemper.lab.tasks.split import hold_out

Array = np.ndarray[Any, np.dtype[np.uint8]]

NAME = re.compile(
    r"(?P<prefix>.*?)(?P<part>train|t10k|test)-(?P<what>images|labels)[-.]idx[0-9]-ubyte(?P<packed>\.gz)?",
    re.IGNORECASE,
)
"""Such as 'train-images-idx3-ubyte.gz'; EMNIST puts 'emnist-letters-' before it, others write a dot before 'idx'."""
UNSIGNED_BYTE = 0x08
TALLEST = 4096
"""Pixels of a side: a larger one is a damaged header."""


def open_idx(
    name: str, path: str, root: Path, *, prefix: str | None = None, train: int | None = None, test: int | None = None
) -> ImageTask:
    """The images of a folder with files such as 'train-images-idx3-ubyte' and 't10k-labels-idx1-ubyte.gz'.

    path: the folder, relative to the data root or to where the program runs, or one with them in 'raw'. Without a test
        part, a fixed fifth of the images becomes one. Classes are the labels that occur in training.
    prefix: what the names of the files begin with, where there are several sets in the folder, such as
        'emnist-letters-'.
    """
    files = _find(found_under(root, path), prefix)
    training = _pair(files["train"])
    held = _pair(files["test"]) if "test" in files else None
    labels = sorted(set(training[1].tolist()))
    if len(labels) < 2:
        raise DataError(f"'{files['train']['labels']}' has {len(labels)} classes; there must be at least 2.")
    pool = _source(*training, labels)
    if held is None:
        kept, out = hold_out(pool.targets)
        pool, rest = pool.take(kept), pool.take(out)
    else:
        _check_alike(files, training, held, labels)
        rest = _source(*held, labels)
    _, channels, height, width = pool.images.shape
    return ImageTask(
        name=name,
        shape=InputShape(channels=channels, height=height, width=width, classes=len(labels)),
        fingerprint=of_tensors(pool.images, pool.targets, rest.images, rest.targets),
        pool=lambda: pool,
        held_out=lambda: rest,
        classes=tuple(map(str, labels)),
        train=train,
        test_images=test,
    )


def _find(folder: Path, prefix: str | None) -> dict[str, dict[str, Path]]:
    """Part ('train', 'test') → what ('images', 'labels') → file. Of a file and its .gz, the file."""
    found: dict[str, dict[str, dict[str, Path]]] = {}
    for file in sorted(each for each in folder.iterdir() if not each.name.startswith(".")):
        match = NAME.fullmatch(file.name)
        if match is not None and file.is_file():
            part = "train" if match["part"].lower() == "train" else "test"
            found.setdefault(match["prefix"], {}).setdefault(part, {}).setdefault(match["what"].lower(), file)
    if not found and (folder / "raw").is_dir():  # as torchvision unpacks them
        return _find(folder / "raw", prefix)
    chosen = next(iter(found)) if prefix is None and len(found) == 1 else prefix
    if chosen is None or chosen not in found:
        sets = (
            f"sets of them that begin with {listed(repr(shown(each)) for each in found)}" if found else "no such files"
        )
        raise DataError(
            f"'{folder}' must have files such as 'train-images-idx3-ubyte' and 'train-labels-idx1-ubyte', with or "
            f"without .gz, and has {sets}{'; choose one with the option prefix' if found else ''}."
        )
    needed = {"train": {}, **found[chosen]}
    lacking = [f"{part} {what}" for part in needed for what in ("images", "labels") if what not in needed[part]]
    if lacking:
        raise DataError(f"'{folder}' has no file with the {' and no file with the '.join(lacking)}.")
    return found[chosen]


def _pair(files: dict[str, Path]) -> tuple[Array, Array]:
    """Images (N, H, W) or (N, H, W, C), and labels (N)."""
    images, labels = read_idx(files["images"]), read_idx(files["labels"])
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise DataError(
            f"'{files['images']}' has {_shape(images.shape)} values; images are count × height × width, or × 3 more "
            "for colours."
        )
    if max(images.shape[1:3]) > TALLEST:
        raise DataError(f"The images of '{files['images']}' have {_shape(images.shape[1:3])} pixels; is it damaged?")
    if labels.ndim != 1:
        raise DataError(f"'{files['labels']}' has {_shape(labels.shape)} values; labels are one number per image.")
    if len(labels) != len(images):
        raise DataError(
            f"'{files['images']}' has {len(images):,} images, and '{files['labels'].name}' has {len(labels):,} labels."
        )
    return images, labels


def _source(images: Array, labels: Array, known: list[int]) -> MemorySource:
    pixels = torch.from_numpy(images if images.ndim == 4 else images[..., None]).permute(0, 3, 1, 2).contiguous()
    return MemorySource(pixels, torch.from_numpy(np.searchsorted(known, labels).astype(np.int64)))


def _check_alike(
    files: dict[str, dict[str, Path]], training: tuple[Array, Array], held: tuple[Array, Array], labels: list[int]
) -> None:
    """Raise unless the two parts have images of one size, and the test part no label that training lacks."""
    sizes = [images.shape[1:] for images, _ in (training, held)]
    if sizes[0] != sizes[1]:
        raise DataError(
            f"The images of '{files['train']['images']}' are {_shape(sizes[0])}, and those of "
            f"'{files['test']['images'].name}' {_shape(sizes[1])}."
        )
    if odd := sorted(set(held[1].tolist()) - set(labels)):
        raise DataError(f"'{files['test']['labels']}' has labels that training lacks: {listed(map(str, odd))}.")


# --------------------------------------------------------------------------------------------------------------- format
def read_idx(file: Path) -> Array:
    """The array of an idx file of unsigned bytes, packed by gzip or not.

    Its header: two bytes of zero, one for the type of the values, one for the number of dimensions; then each
    dimension, four bytes, the highest first.
    """
    with _opened(file) as (data, beginning):
        head = data.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or not 1 <= head[3] <= 4:
            raise DataError(f"'{file}' is not an idx file: it begins with {beginning[:16]!r}.")
        if head[2] != UNSIGNED_BYTE:
            raise DataError(f"'{file}' holds values of the type 0x{head[2]:02x}; only bytes, 0x08, can be read.")
        raw = data.read(4 * head[3])
        if len(raw) < 4 * head[3]:
            raise DataError(f"'{file}' is truncated or damaged: it ends inside of its header.")
        sizes = tuple(int(each) for each in np.frombuffer(raw, ">u4"))
        count = math.prod(sizes)
        if not count:
            raise DataError(f"'{file}' has no values: its header says {_shape(sizes)}.")
        if count > source.MEMORY_LIMIT:
            raise DataError(f"The header of '{file}' says {_shape(sizes)} values; is it damaged?")
        values = data.read(count + 1)  # one more: whether there are too many
    if len(values) != count:
        have = "more" if len(values) > count else f"{len(values):,}"
        raise DataError(f"The header of '{file}' says {_shape(sizes)} = {count:,} values, and it has {have}.")
    return np.frombuffer(values, np.uint8).reshape(sizes).copy()


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[tuple[BufferedIOBase, bytes]]:
    """Context manager: a file to read from, unpacked by what it holds and not by its name, and its first bytes."""
    try:
        with file.open("rb") as raw:
            beginning = raw.read(64)
            if reason := reason_of_bytes(beginning):
                raise DataError(f"'{file}' cannot be read: {reason}.")
            raw.seek(0)
            if beginning[:2] != b"\x1f\x8b":
                yield raw, beginning
            else:
                with gzip.open(raw) as unpacked:
                    yield unpacked, beginning
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{file}' is truncated or damaged: {getattr(error, 'strerror', None) or error}.") from None


def _shape(sizes: tuple[int, ...]) -> str:
    return " × ".join(f"{size:,}" for size in sizes)
