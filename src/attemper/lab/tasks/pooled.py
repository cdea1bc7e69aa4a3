"""Tasks with one pool of samples to split for training, and a test set apart from it."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks.classification import Classification
from attemper.lab.tasks.source import Source
from attemper.lab.tasks.split import FIXED, divide


@dataclasses.dataclass
class PooledTask(Classification):
    """Samples with one class each.

    shape: what a model must take and give.
    pool: loads the training set, out of which training and validation part are split.
    held_out: loads the test set.
    classes: their names, in the order of the targets.
    train, test_images: keep only so many samples, always the same ones, with every class in its proportion.
    """

    samples: ClassVar[str] = "images"
    """What messages call them."""

    name: str
    shape: Any
    fingerprint: str
    pool: Callable[[], Source]
    held_out: Callable[[], Source]
    classes: tuple[str, ...]
    train: int | None = None
    test_images: int | None = None
    primary: str = "accuracy"
    notes: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    """What a reader of a result should know of the data, such as what was left out, in sentences."""

    @cached_property
    def _training(self) -> Source:
        return self._limited(self.pool(), self.train, "training")

    @cached_property
    def _by_device(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def groups_of(self, source: Source) -> Tensor | None:
        """Which samples of a source must not be separated, int64 (N); None: none of them."""
        return None

    def split(self, seed: int, validation: float) -> tuple[Source, Source]:
        source = self._training
        self._check_every_class_has(source, 2, "training", "one to train on and one to validate on")
        train, held = divide(source.targets, round(len(source) * validation), seed, self.groups_of(source))
        return source.take(train), source.take(held)

    def test(self) -> Source:
        source = self._limited(self.held_out(), self.test_images, "test")
        if not len(source):
            raise DataError(f"The test set of '{self.name}' is empty.")
        return source

    def statistics_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and deviation of every channel over the training set, on a device."""
        if device not in self._by_device:
            mean, deviation = self._training.statistics()
            self._by_device[device] = mean.to(device), deviation.to(device)
        return self._by_device[device]

    def _limited(self, source: Source, limit: int | None, part: str) -> Source:
        if limit is None or limit == len(source):
            return source
        if limit > len(source):
            raise DataError(f"'{self.name}' asks for {limit} {part} {self.samples}, and there are {len(source)}.")
        return source.take(divide(source.targets, limit, FIXED)[1])

    def _check_every_class_has(self, source: Source, least: int, part: str, why: str) -> None:
        targets, groups, kind = source.targets.cpu(), self.groups_of(source), self.samples
        if groups is not None:  # what cannot be separated counts once for each of its classes
            targets = torch.stack([targets, groups.cpu()], 1).unique(dim=0)[:, 0]
            kind = f"different {self.samples}"
        counts = torch.bincount(targets, minlength=self.shape.classes)
        if int(counts.min()) < least:
            poorest = int(counts.argmin())
            raise DataError(
                f"'{self.name}' has {len(targets)} {part} {kind} of {self.shape.classes} classes, and class "
                f"'{self.classes[poorest]}' has {int(counts[poorest])} of them; it needs at least {least}: {why}."
            )
