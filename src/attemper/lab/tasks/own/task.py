"""Tasks on data of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError, first_line, suggestion
from attemper.lab.tasks.augment import KINDS, Augment, parse_augmentation
from attemper.lab.tasks.base import ImageTask
from attemper.lab.tasks.classification import Metrics
from attemper.lab.tasks.pooled import PooledTask
from attemper.lab.tasks.source import Source

Metric = Callable[[Tensor, Tensor], float]
"""Logits (N, classes) and targets (N), on the CPU → a share from 0 to 1; larger is better."""


def _balanced(logits: Tensor, targets: Tensor) -> float:
    from sklearn.metrics import recall_score  # type: ignore[import-untyped]

    return float(recall_score(targets, logits.argmax(-1), average="macro", labels=targets.unique(), zero_division=0))


def _f1(logits: Tensor, targets: Tensor) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(targets, logits.argmax(-1), average="macro", zero_division=0))


def _auroc(logits: Tensor, targets: Tensor) -> float:
    from sklearn.metrics import roc_auc_score

    shares = logits.double().softmax(-1)
    if logits.shape[-1] == 2:
        return float(roc_auc_score(targets, shares[:, 1]))
    return float(roc_auc_score(targets, shares, multi_class="ovr", labels=range(logits.shape[-1])))


METRICS: dict[str, Metric] = {"balanced_accuracy": _balanced, "macro_f1": _f1, "auroc": _auroc}
"""Beside accuracy, which every task has."""


def read_metric(given: str | Metric | None) -> tuple[str, Metric | None]:
    """The name of a metric, and what computes it; none: accuracy."""
    if given is None or given == "accuracy":
        return "accuracy", None
    if isinstance(given, str):
        if given not in METRICS:
            known = ["accuracy", *METRICS]
            raise ParameterError(
                f"There is no metric '{given}'.{suggestion(given, known)} There are: {', '.join(known)}."
            )
        return given, METRICS[given]
    if not callable(given):
        raise ParameterError(f"metric is {given!r}; it must be a name or a function of logits and targets.")
    name = getattr(given, "__name__", type(given).__name__)
    return "metric" if name in ("<lambda>", "accuracy", "loss") else name, given


@dataclasses.dataclass
class OwnTask(PooledTask):
    """Tensors of any shape with one class each, given to the model as they are.

    validate_on: a validation set of somebody's own; none: it is split off the training set, by the seed.
    """

    samples: ClassVar[str] = "samples"

    validate_on: Callable[[], Source] | None = dataclasses.field(default=None, kw_only=True)
    metric: Metric | None = dataclasses.field(default=None, kw_only=True)

    def groups_of(self, source: Source) -> Tensor | None:
        return getattr(source, "groups", None)

    def split(self, seed: int, validation: float) -> tuple[Source, Source]:
        if self.validate_on is None:
            return super().split(seed, validation)
        return self._training, self.validate_on()

    def to_input(self, stored: Tensor) -> Tensor:
        return stored

    def augmentation(self, text: str) -> Augment:
        """Images can be erased and mixed; what acts on pixels needs images in bytes."""
        fitting = {name: kind for name, kind in KINDS.items() if kind.stage != "pixels"}
        return parse_augmentation(text, fitting if len(self.shape.example(1)[0].shape) == 4 else {})

    def measure(self, model: nn.Module, source: Source) -> Metrics:
        """Accuracy, loss, and the metric of one's own."""
        if self.metric is None:
            return super().measure(model, source)
        found = [(logits.cpu(), targets.cpu()) for logits, targets in self._predictions(model, source)]
        logits, targets = (torch.cat(each) for each in zip(*found, strict=True))
        try:
            value = float(self.metric(logits, targets))
        except Exception as error:  # whatever somebody's own function does
            raise ParameterError(
                f"The metric '{self.primary}' failed on {len(targets)} samples: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error
        accuracy = float((logits.argmax(-1) == targets).double().mean())
        return {self.primary: value, "accuracy": accuracy, "loss": float(F.cross_entropy(logits, targets))}


@dataclasses.dataclass
class OwnImages(ImageTask, OwnTask):
    """Images of one's own, stored as uint8, normalised and augmented as all images are."""

    samples: ClassVar[str] = "images"

    def to_input(self, stored: Tensor) -> Tensor:
        return ImageTask.to_input(self, stored)

    def augmentation(self, text: str) -> Augment:
        return parse_augmentation(text)


@dataclasses.dataclass(frozen=True)
class SampleShape:
    """Tensors of any shape in, scores of classes out. looks_like: two samples, to try a model on."""

    size: tuple[int, ...]
    classes: int
    looks_like: Tensor = dataclasses.field(compare=False, hash=False, repr=False)

    def __str__(self) -> str:
        return f"{' × '.join(map(str, self.size))} numbers and of {self.classes} classes"

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        some = self.looks_like[torch.arange(samples) % len(self.looks_like)]
        return some.clone(), torch.arange(samples) % self.classes
