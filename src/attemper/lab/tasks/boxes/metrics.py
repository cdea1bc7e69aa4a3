"""Average precision as COCO defines it: by torchmetrics, with pycocotools behind it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.tasks.boxes.geometry import to_corners
from attemper.lab.tasks.boxes.matching import split
from attemper.lab.tasks.boxes.shape import AREA, BOX, CLASS, CROWD
from attemper.lab.tasks.classification import Metrics

MOST_FOUND = 100
"""Boxes of an image that count, those with the highest scores, as COCO has it."""
NAMES = {"AP": "map", "AP50": "map_50", "AP75": "map_75", "AP small": "map_small", "AP medium": "map_medium",
         "AP large": "map_large"}  # fmt: skip
"""Ours → torchmetrics'. Small is below 32² pixels of the file, large from 96² on."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was found in an image and what is there, in pixels of the file; plain tensors on the CPU."""

    found: dict[str, Tensor]
    """boxes (n, 4), corners; scores (n); labels (n)."""
    true: dict[str, Tensor]
    """boxes (m, 4), labels (m), area (m), iscrowd (m)."""


def found_boxes(packed: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
    """Of every image of a batch, the likeliest class of the surest queries, as `Answer.found` has them.

    packed: the last layer, (B, queries, classes + 1 + 4). sizes: of the images, in pixels of their files, (B, 2).
    """
    scores, boxes = split(packed.float())
    sure, labels = scores.softmax(-1)[..., :-1].max(-1)
    best = sure.topk(min(MOST_FOUND, sure.shape[1]), dim=1).indices
    corners = to_corners(boxes).gather(1, best[..., None].expand(-1, -1, 4)).clamp(0, 1).cpu()
    sure, labels = sure.gather(1, best).cpu(), labels.gather(1, best).cpu()
    sides = sizes.max(-1).values.tolist()
    return [
        {"boxes": side * each, "scores": scores, "labels": classes}
        for each, scores, classes, side in zip(corners, sure, labels, sides, strict=True)
    ]


def answers(packed: Tensor, targets: Tensor, sizes: Tensor) -> list[Answer]:
    """Of a batch: what is found, and what the data say. packed, sizes: as `found_boxes` takes them."""
    true = map(_true_boxes, targets.cpu(), sizes.max(-1).values.tolist())
    return [Answer(*each) for each in zip(found_boxes(packed, sizes), true, strict=True)]


def _true_boxes(rows: Tensor, side: int) -> dict[str, Tensor]:
    rows = rows[rows[:, CLASS] >= 0]
    return {
        "boxes": side * rows[:, BOX],
        "labels": rows[:, CLASS].long(),
        "area": rows[:, AREA],
        "iscrowd": rows[:, CROWD].long(),
    }


def average_precision(given: Sequence[Answer], *, by_class: bool = False) -> tuple[Metrics, dict[int, float | None]]:
    """The metrics as shares from 0 to 1, and AP class by class where asked for; None where there is nothing to find."""
    metric = make_metric(by_class)
    if not any(len(each.true["labels"]) for each in given):
        return dict.fromkeys(NAMES), {}
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools tells how long it takes
        metric.update([dict(each.found) for each in given], [dict(each.true) for each in given])
        found = metric.compute()
    classes: dict[int, float | None] = {}
    if by_class:
        numbers, values = torch.atleast_1d(found["classes"]), torch.atleast_1d(found["map_per_class"])
        classes = {int(number): _share(value) for number, value in zip(numbers, values, strict=True)}
    return {name: _share(found[theirs]) for name, theirs in NAMES.items()}, classes


def _share(value: Any) -> float | None:
    """COCO writes −1 where there is nothing to find."""
    return None if float(value) < 0 else float(value)


def require_packages() -> None:
    """Raise unless what measures boxes is installed; nothing is imported yet, which takes seconds."""
    for name in ("torchmetrics", "pycocotools"):
        if importlib.util.find_spec(name) is None:
            raise ParameterError(
                f"Boxes are measured by torchmetrics with pycocotools, and {name} is missing: "
                "pip install 'attemper[detection]'."
            )


def make_metric(by_class: bool = False) -> Any:
    """torchmetrics' metric with the thresholds of pycocotools, by this process alone.

    Those of torchmetrics are rounded to float32, and a recall of 0.3 falls short of them.
    """
    from torchmetrics.detection import MeanAveragePrecision

    overlaps, recalls = np.linspace(0.5, 0.95, 10).tolist(), np.linspace(0, 1, 101).tolist()
    return MeanAveragePrecision(
        iou_thresholds=overlaps,
        rec_thresholds=recalls,
        backend="pycocotools",
        class_metrics=by_class,
        sync_on_compute=False,  # it has the tallies of all processes already, and the others do not compute
    )
