"""Images of which a part is covered, in the middle or anywhere, by the share of the area that is gone."""

import math

import torch
from torch import Tensor

from attemper.errors import ParameterError


def check_share(share: float) -> float:
    """The share of an image's area that is covered: 0 is nothing, 1 is all of it."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        larger = "an occlusion cannot be larger than the image; " if _number(share) and share > 1 else ""
        raise ParameterError(f"The share of an occlusion is {share!r}; {larger}it must be from 0 to 1.")
    return float(share)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def covered(height: int, width: int, share: float) -> tuple[int, int]:
    """Height and width in pixels of a box with about the image's proportions and this share of its area.

    >>> covered(8, 8, 0.25), covered(8, 8, 0.5), covered(224, 224, 0.5)
    ((4, 4), (6, 5), (158, 159))
    """
    check_share(share)
    if share == 0:
        return 0, 0
    tall = min(height, max(1, round(height * math.sqrt(share))))
    return tall, min(width, max(1, round(share * height * width / tall)))


def occlude_centre(pixels: Tensor, share: float, *, fill: float = 0.0) -> Tensor:
    """Images (B, C, H, W) with a box in their middle set to `fill`."""
    height, width = pixels.shape[-2:]
    tall, wide = covered(height, width, share)
    top, left = (height - tall) // 2, (width - wide) // 2
    out = pixels.clone()
    out[..., top : top + tall, left : left + wide] = fill
    return out


def occlude_random(pixels: Tensor, share: float, *, generator: torch.Generator, fill: float = 0.0) -> Tensor:
    """Images (B, C, H, W) with a box set to `fill`, in each image somewhere else, always inside of it."""
    batch, _, height, width = pixels.shape
    tall, wide = covered(height, width, share)
    top = torch.randint(height - tall + 1, (batch, 1, 1, 1), generator=generator).to(pixels.device)
    left = torch.randint(width - wide + 1, (batch, 1, 1, 1), generator=generator).to(pixels.device)
    row = torch.arange(height, device=pixels.device)[:, None]
    column = torch.arange(width, device=pixels.device)
    inside = (row >= top) & (row < top + tall) & (column >= left) & (column < left + wide)
    return pixels.masked_fill(inside, fill)
