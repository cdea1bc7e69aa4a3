"""Accuracy and calibration of predicted probabilities, summed up batch by batch.

Expected calibration error: Guo et al., On Calibration of Modern Neural Networks, ICML 2017. Brier score: the sum over
all classes, as Brier defined it in 1950, so that it lies between 0 and 2.
"""

import math
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.call_syntax import check_count

BINS = 15
"""Of the reliability diagram, as in Guo et al."""


class Bin(TypedDict):
    """The predictions whose confidence lies above `low` and not above `high`."""

    low: float
    high: float
    count: int
    confidence: float | None
    """Their mean; none: there are no such predictions."""
    accuracy: float | None


class Reading(TypedDict):
    """What a tally says; a value that is no finite number is None."""

    images: int
    accuracy: float | None
    top5: float | None
    """None where there are five classes or fewer: it could not be wrong."""
    nll: float | None
    brier: float | None
    ece: float | None
    bins: list[Bin]


@dataclass
class Tally:
    """Sums over the predictions so far, on the CPU in float64.

    >>> tally = Tally()
    >>> tally.add(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    >>> reading = tally.read()
    >>> reading["accuracy"], round(reading["brier"], 3)
    (0.5, 0.65)
    """

    bins: int = BINS

    def __post_init__(self) -> None:
        check_count("bins", self.bins)
        self.images = 0
        self.classes = 0
        self.sums = torch.zeros(4, dtype=torch.float64)
        """Of correct, among the first five, negative log-likelihood, Brier score."""
        self.by_bin = torch.zeros(3, self.bins, dtype=torch.float64)
        """Count, sum of confidences, sum of correct."""

    def add(self, probabilities: Tensor, targets: Tensor) -> None:
        """Count some predictions.

        probabilities: (B, classes), each row with the sum 1. targets: int64 (B).
        """
        p, targets = probabilities.detach().double(), targets.to(probabilities.device)
        check_targets(targets, p.shape[-1])
        truth = p.gather(1, targets[:, None]).squeeze(1)
        confidence, predicted = p.max(1)
        correct = (predicted == targets).double()
        # One minus twice the truth's share more than the plain sum of squares: no one-hot matrix is needed.
        brier = p.square().sum(1) - 2 * truth + 1
        first = p.topk(min(5, p.shape[1]), dim=1).indices
        among = (first == targets[:, None]).any(1).double()
        self.images += len(targets)
        self.classes = p.shape[1]
        self.sums += torch.stack([part.sum() for part in (correct, among, -truth.log(), brier)]).cpu()
        place = bin_of(confidence, self.bins)
        parts = torch.stack([torch.ones_like(correct), confidence, correct])
        self.by_bin.index_add_(1, place.cpu(), parts.cpu())

    def read(self) -> Reading:
        """The means so far."""
        correct, among, nll, brier = (self.sums / max(1, self.images)).tolist()
        bins = self._bins()
        return Reading(
            images=self.images,
            accuracy=finite(correct) if self.images else None,
            top5=finite(among) if self.classes > 5 else None,
            nll=finite(nll) if self.images else None,
            brier=finite(brier) if self.images else None,
            ece=calibration_error(bins),
            bins=bins,
        )

    def _bins(self) -> list[Bin]:
        found = []
        for at, (count, confidence, correct) in enumerate(self.by_bin.T.tolist()):
            mean = (finite(confidence / count), finite(correct / count)) if count else (None, None)
            low, high = at / self.bins, (at + 1) / self.bins
            found.append(Bin(low=low, high=high, count=int(count), confidence=mean[0], accuracy=mean[1]))
        return found


def bin_of(confidence: Tensor, bins: int) -> Tensor:
    """Which of the bins (0, 1/n], (1/n, 2/n], … each confidence falls into; what is no number, into the last."""
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    return torch.bucketize(confidence, edges[1:-1].contiguous())


def calibration_error(bins: list[Bin]) -> float | None:
    """Mean distance of confidence and accuracy, each bin by its share of the predictions; None without any.

    >>> sure = Bin(low=0.5, high=1.0, count=4, confidence=0.9, accuracy=0.75)
    >>> round(calibration_error([sure]), 3)
    0.15
    """
    total = sum(part["count"] for part in bins)
    found = 0.0
    for part in bins:
        if part["count"]:
            if part["confidence"] is None or part["accuracy"] is None:
                return None
            found += part["count"] / total * abs(part["confidence"] - part["accuracy"])
    return found if total else None


def read_probabilities(probabilities: Tensor, targets: Tensor, *, bins: int = BINS) -> Reading:
    """All metrics of some predictions at once. probabilities: (N, classes). targets: int64 (N)."""
    tally = Tally(bins)
    tally.add(probabilities, targets)
    return tally.read()


def check_targets(targets: Tensor, classes: int) -> None:
    """Raise unless every target is one of the model's classes."""
    if len(targets) and (int(targets.min()) < 0 or int(targets.max()) >= classes):
        odd = next(int(t) for t in targets if not 0 <= int(t) < classes)
        raise ParameterError(f"There is a target {odd}, and the model gives {classes} classes, 0 to {classes - 1}.")


def finite(value: float) -> float | None:
    """The value, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None
