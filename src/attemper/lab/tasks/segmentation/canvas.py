"""Images of any size on canvases of one size: as large as they fit, in the middle, the rest filled and ignored."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.lab.tasks.normalising import NORMALISATIONS
from attemper.lab.tasks.segmentation.masks import NOTHING

FILL = tuple(round(255 * mean) for mean in NORMALISATIONS["imagenet"].mean)
"""The colour round an image: close to 0 once it is normalised."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an image lies on its canvas, in pixels."""

    top: int
    left: int
    height: int
    width: int

    def cut(self, x: Tensor) -> Tensor:
        """The image out of a canvas (…, H, W)."""
        return x[..., self.top : self.top + self.height, self.left : self.left + self.width]


def place_of(size: tuple[int, int], canvas: tuple[int, int]) -> Place:
    """The place of an image of some height and width.

    >>> place_of((360, 480), (96, 96))
    Place(top=12, left=0, height=72, width=96)
    """
    scale = min(canvas[0] / size[0], canvas[1] / size[1])
    height, width = (max(1, min(most, round(side * scale))) for side, most in zip(size, canvas, strict=True))
    return Place((canvas[0] - height) // 2, (canvas[1] - width) // 2, height, width)


def on_canvas(image: Any, canvas: tuple[int, int]) -> Tensor:
    """Pillow's image in colours → uint8 (3, H, W)."""
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    place = place_of((image.height, image.width), canvas)
    sheet = Image.new("RGB", (canvas[1], canvas[0]), FILL)
    sheet.paste(image.resize((place.width, place.height), Image.Resampling.BICUBIC), (place.left, place.top))
    pixels: Tensor = pil_to_tensor(sheet)
    return pixels


def mask_on_canvas(mask: Tensor, canvas: tuple[int, int]) -> Tensor:
    """Classes uint8 (h, w) → uint8 (H, W), `NOTHING` round them. Every pixel keeps a number that the mask has."""
    place = place_of((mask.shape[0], mask.shape[1]), canvas)
    sheet = torch.full(canvas, NOTHING, dtype=torch.uint8)
    small = F.interpolate(mask[None, None], size=(place.height, place.width), mode="nearest-exact")
    place.cut(sheet).copy_(small[0, 0])
    return sheet


def classes_from_canvas(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """The class of every pixel of the image, int64 (h, w)."""
    return from_canvas(logits, size).max(0).indices  # of so few classes, argmax takes four times as long on a CPU


def from_canvas(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """The logits of one canvas (H, W, classes) → those of the image's own pixels (classes, h, w), bilinear."""
    classes_first = logits.movedim(-1, 0)
    cut = place_of(size, (logits.shape[0], logits.shape[1])).cut(classes_first)
    if cut.shape[1:] == torch.Size(size):
        return cut
    return F.interpolate(cut[None], size=size, mode="bilinear", align_corners=False)[0]
