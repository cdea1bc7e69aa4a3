"""Which query answers for which box, and the loss that follows. Carion et al., DETR, 2020,
https://arxiv.org/abs/2005.12872.

Predictions are packed in one tensor (B, layers, queries, classes + 1 + 4): the scores of the classes and of "no
object", and a box as centre and sides in shares of the canvas. The last layer is the model's answer; those before it,
which only training has, are corrected too.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.lab.tasks.boxes.geometry import generalised_overlap, overlap, to_centres, to_corners
from attemper.lab.tasks.boxes.shape import BOX, CLASS, is_box

NOTHING = 0.1
"""What a query counts in the loss of classes that shall say that it has no object, against 1 of those that have one."""
OF_CLASS, OF_DISTANCE, OF_OVERLAP = 1.0, 5.0, 2.0
"""Weights in the costs of a match and in the loss, as published."""
FOUND = 0.5
"""Intersection over union from which a box is found."""


@dataclasses.dataclass(frozen=True)
class Matches:
    """Which query of which layer and sample is matched with which row of the targets: int64 (matches) each."""

    sample: Tensor
    layer: Tensor
    query: Tensor
    row: Tensor


def split(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of the classes and of no object (…, classes + 1), and boxes (…, 4)."""
    return packed[..., :-4], packed[..., -4:]


@torch.no_grad()
def match(packed: Tensor, targets: Tensor) -> Matches:
    """The cheapest way to give every box a query of its own, in every sample and layer, found by the CPU."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    cost = torch.nan_to_num(costs(packed, targets), nan=1e6, posinf=1e6, neginf=-1e6).cpu().numpy()
    there = is_box(targets).cpu().numpy()
    found: list[np.ndarray] = []
    for sample, rows in enumerate(there):
        (wanted,) = rows.nonzero()
        if not len(wanted):
            continue
        for layer, costs_here in enumerate(cost[sample]):
            queries, columns = linear_sum_assignment(costs_here[:, wanted])
            places = (np.full_like(queries, sample), np.full_like(queries, layer), queries, wanted[columns])
            found.append(np.stack(places))
    every = np.concatenate(found, 1) if found else np.zeros((4, 0), np.int64)
    return Matches(*torch.from_numpy(every.astype(np.int64)).to(packed.device))


def costs(packed: Tensor, targets: Tensor) -> Tensor:
    """What it costs that a query answers for a row of the targets: (B, layers, queries, rows)."""
    scores, boxes = split(packed.float())
    classes = targets[..., CLASS].long().clamp(min=0)[:, None, None].expand(*scores.shape[:-1], -1)
    likely = scores.softmax(-1).gather(-1, classes)
    wanted = targets[:, None, None, :, BOX]
    boxes = boxes[..., None, :]
    distance = (boxes - to_centres(wanted)).abs().sum(-1)
    return OF_DISTANCE * distance - OF_CLASS * likely - OF_OVERLAP * generalised_overlap(to_corners(boxes), wanted)


def loss(packed: Tensor, targets: Tensor, per_image: float, smoothing: float = 0.0) -> Tensor:
    """The mean over samples and layers of what classes and boxes are off: a scalar.

    per_image: boxes of a training image in the mean. What an image adds is divided by it, and not by the boxes of the
        batch that the image happens to be in: so a batch that several processes share has the same gradient.
    """
    scores, boxes = split(packed.float())
    samples, layers, queries, width = scores.shape
    at = match(packed, targets)
    nothing = width - 1
    wanted = torch.full((samples, layers, queries), nothing, device=packed.device)
    wanted[at.sample, at.layer, at.query] = targets[at.sample, at.row, CLASS].long()
    weights = torch.where(wanted == nothing, NOTHING, 1.0)
    each = F.cross_entropy(scores.flatten(0, 2), wanted.flatten(), reduction="none", label_smoothing=smoothing)
    usual = per_image + NOTHING * max(0.0, queries - per_image)
    classes = (each * weights.flatten()).sum() / usual
    given, true = boxes[at.sample, at.layer, at.query], targets[at.sample, at.row][:, BOX]
    distance = (given - to_centres(true)).abs().sum() / per_image
    apart = (1 - generalised_overlap(to_corners(given), true)).sum() / per_image
    return (OF_CLASS * classes + OF_DISTANCE * distance + OF_OVERLAP * apart) / (samples * layers)


@torch.no_grad()
def recall(packed: Tensor, targets: Tensor) -> Tensor:
    """The share of an image's boxes that some query of the last layer has, with the right class and in the right place.

    The mean over the images; one without boxes counts 1.
    """
    scores, boxes = split(packed[:, -1].float())
    named = scores.argmax(-1)[:, :, None] == targets[:, None, :, CLASS]
    shared, _ = overlap(to_corners(boxes)[:, :, None], targets[:, None, :, BOX])
    there = is_box(targets)
    found = ((named & (shared >= FOUND)).any(1) & there).sum(-1).double()
    return torch.where(there.any(-1), found / there.sum(-1).clamp(min=1), 1.0).mean()
