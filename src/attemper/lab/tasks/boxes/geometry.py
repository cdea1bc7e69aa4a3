"""Boxes as corners (left, top, right, bottom) and as centres (x, y, width, height), and how far two of them agree."""

import torch
from torch import Tensor

SMALLEST = 1e-7
"""What areas are divided by at least."""


def to_corners(boxes: Tensor) -> Tensor:
    """(…, 4) centres → corners.

    >>> to_corners(torch.tensor([0.5, 0.5, 0.2, 0.4]))
    tensor([0.4000, 0.3000, 0.6000, 0.7000])
    """
    centre, side = boxes[..., :2], boxes[..., 2:]
    return torch.cat([centre - side / 2, centre + side / 2], -1)


def to_centres(boxes: Tensor) -> Tensor:
    """(…, 4) corners → centres."""
    first, last = boxes[..., :2], boxes[..., 2:]
    return torch.cat([(first + last) / 2, last - first], -1)


def overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union, and the area of the union: (…) each, of corners that broadcast against each other."""
    first, last = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    common = (last - first).clamp(min=0).prod(-1)
    union = _area(a) + _area(b) - common
    return common / union.clamp(min=SMALLEST), union


def generalised_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union, less the share of the smallest box round both that neither fills: from −1 to 1.

    Rezatofighi et al., 2019, https://arxiv.org/abs/1902.09630.
    """
    shared, union = overlap(a, b)
    first, last = torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])
    around = (last - first).prod(-1).clamp(min=SMALLEST)
    return shared - (around - union) / around


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
