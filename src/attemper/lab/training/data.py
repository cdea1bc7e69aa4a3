"""The data of a run: which images it trains on, in which order, augmented how. All of it a function of the seed."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.tasks.augment import Augmentation, seed_of_batch
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.seed_streams import derive, generator
from attemper.lab.tasks.source import Source
from attemper.lab.tasks.streaming.source import StreamSource
from attemper.lab.training.ranks import ALONE, Ranks
from attemper.lab.training.spec import RunSpec

MEASURED = 2000
"""At most so many training images are looked at for the generalisation gap."""


class RunData:
    """Training and validation part of a task under one seed, on a device.

    An epoch has whole batches only. What is left over of its order is dropped, another part in every epoch. Several
    ranks share every batch: which samples it has, and how they are augmented, does not depend on how many there are.

    With `repeats` an epoch is as long as without, and sees the first part of its order that often.
    """

    def __init__(self, spec: RunSpec, task: Task, device: torch.device, ranks: Ranks = ALONE) -> None:
        budget = spec.budget
        self.seed = spec.seed
        self.task = task
        self.augmentation = task.augmentation(budget.augment)
        train, validation = task.split(spec.seed, budget.validation)
        self.device = device
        # What the CPU augments stays there: to get it back from a GPU would wait for the step before.
        here = getattr(self.augmentation, "by_cpu", False)
        self.train, self.validation = train if here else train.to(device), validation.to(device)
        self.repeats = budget.repeats
        self.batch_size = min(budget.batch_size, len(train) // self.repeats * self.repeats)
        if not self.batch_size:
            raise ParameterError(
                f"repeats is {self.repeats}; it must be at most the number of training samples, of which there are "
                f"{len(train)}."
            )
        if self.batch_size < ranks.size:
            raise ParameterError(
                f"A batch has {self.batch_size} samples, and {ranks.size} processes share it; each needs at least one. "
                "Give a larger batch_size, or start fewer processes."
            )
        self.part = ranks.part(self.batch_size)
        """This rank's samples of every batch."""
        self.share = (self.part.stop - self.part.start) / self.batch_size
        whole = len(train) // self.batch_size
        self.accumulate = min(budget.accumulate, whole)
        """Batches per optimiser step."""
        self.batches_per_epoch = whole - whole % self.accumulate
        self.steps_per_epoch = self.batches_per_epoch // self.accumulate

    @property
    def images_per_epoch(self) -> int:
        return self.batches_per_epoch * self.batch_size

    def epoch(self, epoch: int, after: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of the batches of an epoch, counted from 1, as the model takes them.

        after: so many batches were there before; they are neither read nor augmented again.
        """
        if after >= self.batches_per_epoch:
            return
        if isinstance(self.train, StreamSource):
            yield from self._streamed(self.train, epoch, after)
            return
        order = torch.randperm(len(self.train), generator=generator(self.seed, "order", epoch))
        order = order[: self.images_per_epoch // self.repeats].view(-1, self.batch_size // self.repeats)[after:]
        part = self.part
        if self.augmentation == Augmentation() and self.repeats == 1:  # no draw for the whole: read one's own part
            order, part = order[:, part], slice(None)
        stored = repeated(self.train.batches(order.flatten(), order.shape[1]), self.repeats)
        for batch, (images, targets) in enumerate(stored, start=after):
            inputs, aims = self.augmentation(
                images,
                targets,
                classes=self.task.shape.classes,
                to_input=self.to_input,
                seed=seed_of_batch(self.seed, epoch, batch),
            )
            yield inputs[part], moved(aims, self.device)[part]

    def _streamed(self, source: StreamSource, epoch: int, after: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same from a source that has an order of its own and augments images one by one.

        A rank reads its own part only. Where images are mixed with their neighbours, it needs the one before it too.
        """
        assert isinstance(self.augmentation, Augmentation)
        _, mixing = source.preparation.augmented(self.augmentation)
        before = int(bool(mixing.transforms) and self.share < 1)
        part = slice(self.part.start - before, self.part.stop)
        batches = range(after, self.batches_per_epoch)
        stored = source.epoch(self.seed, epoch, batches, self.batch_size, part, self.augmentation, self.repeats)
        for batch, (images, targets) in zip(batches, stored, strict=True):
            inputs, aims = mixing(
                images,
                targets,
                classes=self.task.shape.classes,
                to_input=self.task.to_input,
                seed=seed_of_batch(self.seed, epoch, batch),
            )
            yield inputs[before:], aims[before:]

    def measured_train(self) -> Source:
        """The training images that the generalisation gap is measured on."""
        if isinstance(self.train, StreamSource):
            return self.train.some(MEASURED, derive(self.seed, "measured"))
        order = torch.randperm(len(self.train), generator=generator(self.seed, "measured"))
        return self.train.take(order[:MEASURED].sort().values).to(self.device)

    def to_input(self, stored: Tensor) -> Tensor:
        """Stored samples as the model takes them, on its device."""
        return self.task.to_input(moved(stored, self.device))


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; to a GPU it goes while the CPU works on."""
    if x.device == device:
        return x
    return (x.pin_memory() if x.device.type == "cpu" and device.type == "cuda" else x).to(device, non_blocking=True)


def repeated(batches: Iterator[tuple[Tensor, Tensor]], times: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches with all of their samples so often, read once.

    The copies of a sample do not stand side by side: mixup and cutmix take a neighbour, which shall be another image.
    """
    for images, targets in batches:
        yield (images, targets) if times == 1 else (torch.cat([images] * times), torch.cat([targets] * times))
