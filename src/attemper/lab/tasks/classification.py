"""What every task has in common whose samples have one class each: its loss, its metrics, its augmentations."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.lab.tasks.augment import Augment, parse_augmentation
from attemper.lab.tasks.source import Source
from attemper.tempering.outputs import logits_of

Metrics = dict[str, float | None]
"""Names to shares from 0 to 1, and "loss"; None where a model gave no finite number."""

Details = dict[str, Any]
"""Plain data for the report, any of:

"classes", their names, and "confusion", how often a class (row) was taken for each;
"right", which samples were right, in their order, as `packed` gives it;
"items", how many test samples there are, where no confusion matrix says so;
"table", a metric class by class, as `class_table` makes it."""

BATCH = 512
MOST_DETAILED = 20
"""Classes up to which a confusion matrix can be read on a page."""

MOST_SAMPLES = 50_000
"""Up to so many test samples a result says of each whether it was right: two letters for eight of them."""

Measure = TypeVar("Measure", bound=Callable[..., Metrics])


def averages(measure: Measure) -> Measure:
    """Marks a `measure` whose metrics are means over samples, so that several processes can each do a part of it."""
    measure.averages = True  # type: ignore[attr-defined]
    return measure


def packed(right: Tensor) -> str:
    """Booleans as text: their number, and eight of them in two letters.

    >>> packed(torch.tensor([True, False, True]))
    '3:a0'
    """
    bits = np.packbits(right.cpu().numpy().astype(np.uint8))
    return f"{len(right)}:{bits.tobytes().hex()}"


def class_table(metric: str, counted: str, rows: Iterable[tuple[str, int, float | None]]) -> dict[str, Any]:
    """A metric class by class.

    counted: what the numbers beside the classes count, such as "boxes".
    rows: name, number and metric of every class, as a share from 0 to 1; None where a class has nothing to measure.
    """
    return {
        "metric": metric,
        "counted": counted,
        "rows": [{"name": name, "count": count, "value": value} for name, count, value in rows],
    }


class Classification:
    """One class per sample: cross-entropy, accuracy, and the augmentations of images.

    A task derives from it and overrides what is different.
    """

    classes: tuple[str, ...]

    def to_input(self, stored: Tensor) -> Tensor:
        raise NotImplementedError

    def augmentation(self, text: str) -> Augment:
        """What the `augment` of a budget means here; an augmentation that does not fit is refused."""
        return parse_augmentation(text)

    def loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """What training makes small.

        logits: (B, classes). targets: int64 (B) or probabilities (B, classes).
        """
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The share of a training batch that is right, for the learning curve: a scalar, without waiting for it."""
        labels = targets if targets.dim() == 1 else targets.argmax(-1)
        return (logits.argmax(-1) == labels).double().mean()

    @averages
    def measure(self, model: nn.Module, source: Source) -> Metrics:
        """Accuracy and mean cross-entropy of a model in eval mode on a set of samples."""
        device = next(model.parameters()).device
        correct = torch.zeros((), dtype=torch.int64, device=device)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for logits, targets in self._predictions(model, source):
            correct += (logits.argmax(-1) == targets).sum()
            loss += F.cross_entropy(logits, targets, reduction="sum").double()
        return {"accuracy": int(correct) / len(source), "loss": float(loss) / len(source)}

    def details(self, model: nn.Module, source: Source) -> Details | None:
        """The confusion matrix of a model in eval mode.

        None where there are too many classes to look at, and where samples would have to be decoded once more.
        """
        count = len(self.classes)
        if count > MOST_DETAILED or not source.in_memory:
            return None
        found = torch.zeros(count * count, dtype=torch.int64, device=next(model.parameters()).device)
        right = []
        for logits, targets in self._predictions(model, source):
            taken_for = logits.argmax(-1)
            found += torch.bincount(targets * count + taken_for, minlength=count * count)
            right.append(taken_for == targets)
        known = {"classes": list(self.classes), "confusion": found.reshape(count, count).tolist()}
        return {**known, "right": packed(torch.cat(right))} if len(source) <= MOST_SAMPLES else known

    def _predictions(self, model: nn.Module, source: Source) -> Iterator[tuple[Tensor, Tensor]]:
        for stored, targets in source.batches(torch.arange(len(source)), BATCH):
            yield logits_of(model(self.to_input(stored))).float(), targets
