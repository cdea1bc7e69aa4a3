"""From an image file to a canvas: the whole image, made as large as fits, in the upper left, and a mask beside it."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks.boxes.shape import CHANNELS
from attemper.lab.tasks.broken import reason_of, shown
from attemper.lab.tasks.image_files import as_rgb, upright
from attemper.lab.tasks.sample_files import open_image

SHOWN = 255
"""The mask where the image is; elsewhere it is 0."""


def on_canvas(image: Any, size: int) -> Tensor:
    """Pillow's image in colours → uint8 (4, size, size)."""
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    width, height = fitted(image.width, image.height, size)
    pixels = pil_to_tensor(image.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=3.0))
    canvas = torch.zeros(CHANNELS, size, size, dtype=torch.uint8)
    canvas[:3, :height, :width] = pixels
    canvas[3, :height, :width] = SHOWN
    return canvas


def fitted(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height of an image whose longer side has `size` pixels.

    >>> fitted(640, 480, 128)
    (128, 96)
    """
    scale = size / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


@dataclasses.dataclass
class CanvasLoader:
    """Number of a file → its canvas, uint8 (4, size, size). Goes to worker processes, so it can be pickled.

    files: paths, and whether EXIF data turn the image.
    """

    files: list[tuple[Path, bool]]
    size: int

    def __call__(self, index: int) -> Tensor:
        file, turn = self.files[index]
        try:
            return on_canvas(open_image(file, lambda image: as_rgb(upright(image) if turn else image)), self.size)
        except Exception as error:  # it was whole when it was examined; what Pillow raises depends on the format
            name = shown(str(file))
            raise DataError(f"'{name}' is not an image that can be read: {reason_of(error, file)}.") from None
