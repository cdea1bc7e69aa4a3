"""Small image files for tests."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int, height: int = 6, width: int = 8) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pictures(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), each: int = 10) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(each):
            file = folder / name / f"{index}.png"
            picture(zlib.crc32(str(file).encode())).save(file)
    return folder
