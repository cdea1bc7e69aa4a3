"""How well classes of pixels are found: intersection over union and accuracy, by torchmetrics.

Both are of a whole set, not means over images: the pixels of all images are counted in one confusion matrix. A class
that neither the truth nor any prediction has is left out of the mean. ADE20K's and VOC's evaluations do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.tasks.segmentation.masks import NOTHING

if TYPE_CHECKING:
    from torchmetrics.classification import MulticlassJaccardIndex


def make_metric(classes: int) -> MulticlassJaccardIndex:
    """torchmetrics' intersection over union, which counts pixels in a confusion matrix `confmat` (truth, predicted)."""
    try:
        from torchmetrics.classification import MulticlassJaccardIndex
    except ModuleNotFoundError:
        raise ParameterError(
            "Segmentation is measured by torchmetrics, which is missing: pip install 'attemper[segmentation]'."
        ) from None
    # Ranks add up tallies; torchmetrics would wait for all of them when one alone scores.
    return MulticlassJaccardIndex(
        classes, average="macro", ignore_index=NOTHING, validate_args=False, sync_on_compute=False
    )


def mean_iou(matrix: Tensor) -> float | None:
    """The mean of the classes' intersection over union; None: there is no pixel.

    matrix: int64 (classes, classes), pixels by their class and by what they were taken for.

    >>> import torch
    >>> mean_iou(torch.tensor([[3, 1, 0], [0, 4, 0], [0, 0, 0]]))  # (3/4 + 4/5) / 2, without the third class
    0.77...
    """
    if not int(matrix.sum()):
        return None
    metric = make_metric(len(matrix)).to(matrix.device)
    metric.confmat = matrix
    metric._update_count = 1  # it was not fed batch by batch, which it would warn of
    return float(metric.compute())


def class_ious(matrix: Tensor) -> list[float | None]:
    """Every class's intersection over union; None: neither the truth nor a prediction has it.

    >>> import torch
    >>> class_ious(torch.tensor([[3, 1, 0], [0, 4, 0], [0, 0, 0]]))
    [0.75, 0.8, None]
    """
    both = matrix.diagonal().tolist()
    either = (matrix.sum(0) + matrix.sum(1) - matrix.diagonal()).tolist()
    return [hit / total if total else None for hit, total in zip(both, either, strict=True)]


def pixel_accuracy(matrix: Tensor) -> float | None:
    """The share of labelled pixels that are right; None: there is none."""
    total = int(matrix.sum())
    return int(matrix.trace()) / total if total else None
