"""Small data sets in the layouts of large ones: tar files as WebDataset has them, parquet files of Hugging Face."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.streaming.order import Selection
from attemper.lab.tasks.streaming.task import StreamTask

__all__ = [
    "COLOURS",
    "MODEL",
    "jpeg",
    "members",
    "offline",
    "opened",
    "picture",
    "write_parquet",
    "write_shard",
    "write_wds",
]

MODEL = "vit-cifar(depth=1, width=16, heads=2, mlp=16, patch=8)"

COLOURS = ((220, 40, 40), (40, 200, 60), (50, 60, 220))
"""Of the classes."""


def picture(sample: int, label: int, size: tuple[int, int] = (36, 32)) -> Image.Image:
    """A colour that tells the class, with noise, no two alike."""
    draw = np.random.default_rng(sample)
    noise = draw.integers(-35, 36, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.array(COLOURS[label % 3]) + noise, 0, 255).astype(np.uint8))


def jpeg(sample: int, label: int) -> bytes:
    buffer = io.BytesIO()
    picture(sample, label).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def write_shard(path: Path, samples: Iterable[tuple[str, dict[str, bytes]]]) -> Path:
    """A tar file with the files of some samples, by ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, files in samples:
            for ending, data in files.items():
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def write_wds(
    folder: Path, train: Sequence[int] = (17, 5, 11), test: Sequence[int] = (9,), *, info: bool = False
) -> Path:
    """Shards with so many samples each; sample i has class i % 3."""
    first, splits = 0, {}
    for part, counts in (("train", train), ("val", test)):
        names = [f"{part}-{number:04d}.tar" for number in range(len(counts))]
        for name, count in zip(names, counts, strict=True):
            numbers = range(first, first + count)
            write_shard(
                folder / name, ((f"{i:06d}", {"jpg": jpeg(i, i % 3), "cls": str(i % 3).encode()}) for i in numbers)
            )
            first += count
        splits[part] = {"name": part, "filenames": names, "shard_lengths": list(counts), "num_samples": sum(counts)}
    if info:
        (folder / "_info.json").write_text(json.dumps({"num_classes": 3, "splits": splits}))
    return folder


def write_parquet(
    folder: Path, train: Sequence[int] = (20, 13), test: Sequence[int] = (9,), *, rows: int = 4, test_name: str = "test"
) -> Path:
    """Parquet files with so many samples each, in row groups of a few."""
    import datasets

    folder.mkdir(parents=True, exist_ok=True)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["red", "green", "blue"])}
    )
    first = 0
    for part, counts in (("train", train), (test_name, test)):
        for number, count in enumerate(counts):
            numbers = range(first, first + count)
            made = datasets.Dataset.from_dict(
                {
                    "image": [{"bytes": jpeg(i, i % 3), "path": None} for i in numbers],
                    "label": [i % 3 for i in numbers],
                },
                features=features,
            )
            made.to_parquet(folder / f"{part}-{number:05d}-of-{len(counts):05d}.parquet", batch_size=rows)
            first += count
    return folder


def opened(text: str, root: Path, workers: int = 0) -> StreamTask:
    """A task whose samples are decoded by so many processes; 0: by this one."""
    task = open_task(text, root)
    assert isinstance(task, StreamTask)
    task.pool.workers = task.held_out.workers = workers
    return task


def members(selection: Selection) -> list[int]:
    """The numbers of all samples of a selection."""
    return [sample for unit in range(len(selection.counts)) for sample in selection.unit(unit).tolist()]


@contextlib.contextmanager
def offline(cache: Path) -> Iterator[None]:
    """Context manager: inside it, Hugging Face's library keeps to this machine, and on it to a folder."""
    import datasets
    import huggingface_hub.constants

    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield
