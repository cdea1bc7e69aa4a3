"""Crops of random size and shape, resized to the whole: for a batch at once, on the device where the images are."""

import math
from typing import Literal

import torch
from torch import Tensor

Interpolation = Literal["bicubic", "bilinear"]
INTERPOLATIONS = ("bicubic", "bilinear")

ASPECTS = 3 / 4, 4 / 3
"""Width over height, from the narrowest to the widest."""
TRIES = 10
"""Boxes that are drawn for an image; where none of them fits into it, the largest one in its middle is taken."""
AT_ONCE = 256
"""Images that are resized at a time: as float32, and with their weights, they take much more memory than as bytes."""


def random_boxes(images: int, height: int, width: int, scale: float) -> Tensor:
    """One box per image: int64 (4, images), each top, left, height and width.

    scale: the smallest share of the image's area. Area and the logarithm of the aspect are drawn evenly, as torchvision
        does; all tries of all images at once, from torch's CPU generator.
    """
    area = height * width * torch.empty(TRIES, images).uniform_(scale, 1)
    aspect = torch.empty(TRIES, images).uniform_(math.log(ASPECTS[0]), math.log(ASPECTS[1])).exp()
    tall, wide = (area / aspect).sqrt().round().long(), (area * aspect).sqrt().round().long()
    fits = (tall >= 1) & (tall <= height) & (wide >= 1) & (wide <= width)
    first = fits.byte().argmax(0, keepdim=True)  # of several largest values, the first
    tall, wide, found = (each.gather(0, first)[0] for each in (tall, wide, fits))
    tall = torch.where(found, tall, min(height, round(width / ASPECTS[0])))
    wide = torch.where(found, wide, min(width, round(height * ASPECTS[1])))
    top, left = torch.rand(2, images, dtype=torch.float64)
    top = torch.where(found, top * (height - tall + 1), (height - tall) / 2).long()
    left = torch.where(found, left * (width - wide + 1), (width - wide) / 2).long()
    return torch.stack([top, left, tall, wide])


def resize_boxes(images: Tensor, boxes: Tensor, mirrored: Tensor, interpolation: Interpolation) -> Tensor:
    """What each box holds, as large as the image was, mirrored left and right where asked for.

    images: uint8 (B, C, H, W). boxes: int64 (4, B). mirrored: boolean (B). The last two come from any device.

    A box is never larger than the image, so nothing is made smaller and there is nothing to smooth: the filters are
    torchvision's with antialias, which are Pillow's, and which see no pixel outside of the box. Like theirs, they give
    whole values after either direction: results are theirs, but for some pixels that are off by one or two of 255.
    """
    boxes = boxes.to(images.device, torch.float32, non_blocking=True)
    mirrored = mirrored.to(images.device, non_blocking=True)
    parts = zip(images.split(AT_ONCE), boxes.split(AT_ONCE, dim=1), mirrored.split(AT_ONCE), strict=True)
    return torch.cat([_resized(*part, interpolation) for part in parts])


def _resized(images: Tensor, boxes: Tensor, mirrored: Tensor, interpolation: Interpolation) -> Tensor:
    height, width = images.shape[-2:]
    top, left, tall, wide = boxes
    rows = resampling(top, tall, height, interpolation)
    columns = resampling(left, wide, width, interpolation)
    columns = torch.where(mirrored[:, None, None], columns.flip(1), columns)
    lines = _whole(images.float() @ columns[:, None].mT)
    return _whole(rows[:, None] @ lines).byte()


def _whole(values: Tensor) -> Tensor:
    """The nearest value that a byte has; halves go up, as in Pillow."""
    return values.add_(0.5).floor_().clamp_(0, 255)


def resampling(start: Tensor, length: Tensor, size: int, interpolation: Interpolation) -> Tensor:
    """How much each pixel of a line of `size` counts in each of `size` pixels that an interval of it becomes.

    start, length: (B). Returns (B, size, size), rows that add up to 1.
    """
    centres = torch.arange(size, device=start.device, dtype=start.dtype) + 0.5
    there = start[:, None] + centres * (length / size)[:, None]
    distance = (centres - there[:, :, None]).abs()
    inside = (centres > start[:, None]) & (centres < (start + length)[:, None])
    weights = FILTERS[interpolation](distance) * inside[:, None]
    return weights / weights.sum(-1, keepdim=True)


def _bilinear(distance: Tensor) -> Tensor:
    return (1 - distance).clamp_(min=0)


def _bicubic(distance: Tensor) -> Tensor:
    """Keys' cubic with a = -1/2."""
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, far * (distance < 2))


FILTERS = {"bicubic": _bicubic, "bilinear": _bilinear}
