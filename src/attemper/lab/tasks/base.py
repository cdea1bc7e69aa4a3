"""What a task is: data in a fixed split, the way from stored bytes to what a model takes, and what a result counts."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from attemper.lab.tasks.augment import Augment
from attemper.lab.tasks.classification import Details, Metrics
from attemper.lab.tasks.normalising import Normalisation
from attemper.lab.tasks.pictures import Picture
from attemper.lab.tasks.pooled import PooledTask
from attemper.lab.tasks.source import Source
from attemper.tempering.outputs import logits_of


class Shape(Protocol):
    """What a model must take and give; `str()` of it says so."""

    @property
    def classes(self) -> int: ...

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        """Inputs of noise with targets, to try a model on."""
        ...


@dataclasses.dataclass(frozen=True)
class InputShape:
    """Images in, scores of classes out."""

    channels: int
    height: int
    width: int
    classes: int

    def __str__(self) -> str:
        return f"{self.channels} × {self.height} × {self.width} and of {self.classes} classes"

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, self.channels, self.height, self.width), torch.arange(samples) % self.classes


@dataclasses.dataclass(frozen=True)
class SequenceShape:
    """Sequences of feature vectors in, scores of classes out."""

    tokens: int
    features: int
    classes: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens × {self.features} features and of {self.classes} classes"

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, self.tokens, self.features), torch.arange(samples) % self.classes


@runtime_checkable
class Task(Protocol):
    """What a run needs to know of its data. The test set is reached through `test()` and in no other way."""

    @property
    def name(self) -> str:
        """The text that opens this task."""
        ...

    @property
    def shape(self) -> Shape: ...

    @property
    def fingerprint(self) -> str:
        """A hash of the data: runs with equal fingerprints saw the same images and labels."""
        ...

    @property
    def primary(self) -> str:
        """The metric that epochs and configurations are chosen by, on validation; larger is better."""
        ...

    def split(self, seed: int, validation: float) -> tuple[Source, Source]:
        """Training and validation part of the training set: stratified, a function of the seed alone."""
        ...

    def test(self) -> Source: ...

    def to_input(self, stored: Tensor) -> Tensor:
        """A batch as the source stores it → what the model takes, on the same device."""
        ...

    def augmentation(self, text: str) -> Augment:
        """What the `augment` of a budget means here."""
        ...

    def loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """What training makes small: a scalar."""
        ...

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The share of a training batch that is right, for the learning curve: a scalar, without waiting for it."""
        ...

    def measure(self, model: nn.Module, source: Source) -> Metrics:
        """The metrics of a model in eval mode on a set of samples: "loss", `primary`, and whatever else there is."""
        ...


@runtime_checkable
class Detailed(Protocol):
    """A task with more to say about a model than a few numbers."""

    def details(self, model: nn.Module, source: Source) -> Details | None:
        """What a model in eval mode gets right and wrong, class by class; None where that is not worth its price."""
        ...


@runtime_checkable
class Structured(Protocol):
    """A task whose loss needs more of a model's output than its logits, such as boxes.

    Recipes that compare passes compare the logits all the same.
    """

    def read_output(self, out: Any) -> Tensor:
        """What `loss` and `right` get instead of the logits, in one tensor (B, …), from the output of a model."""
        ...


def output_of(task: Task, out: Any) -> Tensor:
    """What the task's loss gets of a model's output, in float32."""
    return (task.read_output(out) if isinstance(task, Structured) else logits_of(out)).float()


@runtime_checkable
class Tallied(Protocol):
    """A task whose metrics are no means over samples: each process tallies its samples, and one scores all tallies.

    Its `measure` is `measured(self, model, source)`.
    """

    def tally(self, model: nn.Module, source: Source) -> Any:
        """What metrics need of a model in eval mode on some samples, such as predictions or counts: plain data that
        can be sent to another process."""
        ...

    def score(self, tallies: Sequence[Any]) -> Metrics:
        """The metrics, from the tallies of all samples in their order; it does not matter how they are divided."""
        ...


def measured(task: Tallied, model: nn.Module, source: Source) -> Metrics:
    """The metrics of a task that tallies, by one process."""
    return task.score([task.tally(model, source)])


@runtime_checkable
class Illustrated(Protocol):
    """A task whose predictions can be looked at."""

    def pictures(self, model: nn.Module, source: Source, most: int) -> list[Picture]:
        """At most so many pictures of what a model in eval mode says of samples; of every model the same samples."""
        ...


@runtime_checkable
class Verified(Protocol):
    """A task that can look for more in its files than it does when it is opened."""

    def verify(self) -> list[str]:
        """Look at everything; sentences for people. What is wrong is one `DataError` that names all of it."""
        ...


@dataclasses.dataclass
class ImageTask(PooledTask):
    """Images with one class each, stored as uint8."""

    shape: InputShape
    normalise: Normalisation | None = dataclasses.field(default=None, kw_only=True)
    """What is taken out of every channel; none: mean and deviation over the training set."""

    def groups_of(self, source: Source) -> Tensor | None:
        return getattr(source, "groups", None)

    def to_input(self, stored: Tensor) -> Tensor:
        """uint8 (B, C, H, W) → float32, each channel with mean 0 and deviation 1 over the training set."""
        if self.normalise is not None:
            return self.normalise(stored)
        mean, deviation = self.statistics_on(stored.device)
        return (stored.float() - mean[:, None, None]) / deviation[:, None, None]
