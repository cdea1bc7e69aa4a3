"""Folders of images with masks, in the layouts that people use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def image(path: Path, size: tuple[int, int] = (8, 10), seed: int = 0) -> Path:
    """An image of noise. size: height and width."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng([seed, *path.name.encode()]).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def mask(path: Path, numbers: Any, mode: str = "L") -> Path:
    """A mask of these numbers (h, w)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Image.fromarray(np.asarray(numbers, dtype=np.uint8), mode="L")
    if mode == "P":
        made = Image.fromarray(np.asarray(numbers, dtype=np.uint8), mode="P")
        made.putpalette([255 - level for level in range(256) for _ in range(3)])  # what must not be looked at
    made.save(path)
    return path


def numbers(size: tuple[int, int] = (8, 10), classes: int = 3, first: int = 1, shift: int = 0) -> Any:
    """Columns of all classes in turn."""
    return np.broadcast_to((np.arange(size[1]) + shift) % classes + first, size)


def ade(folder: Path, training: int = 6, validation: int = 2, classes: int = 3) -> Path:
    """A set as of ADE20K."""
    for part, count in (("training", training), ("validation", validation)):
        for at in range(count):
            image(folder / "images" / part / f"{part}_{at}.png", seed=at)
            mask(folder / "annotations" / part / f"{part}_{at}.png", numbers(classes=classes, shift=at))
    return folder


def voc(folder: Path, training: int = 5, validation: int = 2, test: int = 0) -> Path:
    """A set as of Pascal VOC: palettes, lists, 255 at borders, and an image without a mask."""
    lists = {"train": training, "val": validation, "test": test}
    for part, count in lists.items():
        names = [f"{part}_{at}" for at in range(count)]
        for at, name in enumerate(names):
            image(folder / "JPEGImages" / f"{name}.png", seed=at)
            if part != "test":
                bordered = np.array(numbers(first=0, shift=at))
                bordered[0] = 255
                mask(folder / "SegmentationClass" / f"{name}.png", bordered, "P")
        if count:
            file = folder / "ImageSets" / "Segmentation" / f"{part}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{name}\n" for name in names))
    image(folder / "JPEGImages" / "other.png")
    return folder
