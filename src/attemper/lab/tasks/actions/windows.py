"""Windows of steps, cut when they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks.actions.arrays import FeatureFiles
from attemper.lab.tasks.actions.videos import Array, Video
from attemper.lab.tasks.source import LazySource


def cut(at: Tensor, first: Tensor, window: int) -> Tensor:
    """The steps of each window: (B, window), the current step last.

    at: current steps (B). first: the first step of the video of each (B), which stands for all that lies before it.

    >>> cut(torch.tensor([1, 4]), torch.tensor([0, 0]), 4).tolist()
    [[0, 0, 0, 1], [1, 2, 3, 4]]
    """
    steps = at[:, None] + torch.arange(1 - window, 1, device=at.device)
    return torch.maximum(steps, first[:, None])


class LabelSets:
    """What a step's labels are as one number, which is what a source gives out as the target of a sample.

    A number below that of the classes is that class alone. Above stand the combinations that occur, and last of all
    the ambiguous steps, which have no label at all.
    """

    def __init__(self, videos: Sequence[Video], classes: int) -> None:
        rows = np.unique(np.concatenate([video.labels for video in videos]), axis=0)
        several = rows[rows.sum(1) > 1]
        self.table = torch.from_numpy(
            np.concatenate([np.eye(classes, dtype=bool), several, np.zeros((1, classes), bool)])
        )
        """Boolean (sets, classes)."""
        self.ambiguous = len(self.table) - 1
        self._numbers = {row.tobytes(): number for number, row in enumerate(self.table.numpy())}

    def of(self, video: Video) -> Tensor:
        """The set of every step: int64 (steps)."""
        numbers = [self._numbers[row.tobytes()] for row in video.labels]
        return torch.where(torch.from_numpy(video.ambiguous), self.ambiguous, torch.tensor(numbers))


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Some videos, one after the other, as one long row of steps."""

    videos: tuple[Video, ...]
    sets: LabelSets

    @cached_property
    def offsets(self) -> Tensor:
        """Where each video begins, and at the end the number of all steps: int64 (videos + 1)."""
        return torch.tensor([0, *(video.steps for video in self.videos)]).cumsum(0)

    @cached_property
    def targets(self) -> Tensor:
        """The label set of every step."""
        return torch.cat([self.sets.of(video) for video in self.videos])

    @cached_property
    def video_of(self) -> Tensor:
        """The number of every step's video."""
        return torch.repeat_interleave(torch.arange(len(self.videos)), self.offsets.diff())

    def steps_of(self, videos: Tensor, stride: int = 1) -> Tensor:
        """Every stride-th step of some videos, in order."""
        return torch.cat(
            [torch.arange(int(self.offsets[v]), int(self.offsets[v + 1]), stride) for v in videos.tolist()]
        )


class Bank:
    """The features of a whole timeline, once on every device where they are used.

    features: (steps of all videos, width), as they are stored.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        features = torch.from_numpy(np.concatenate([read(video) for video in timeline.videos]))
        first = timeline.offsets[timeline.video_of]
        self._by_device = {torch.device("cpu"): (features, first)}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Features, and the first step of the video of every step: int64 (steps of all videos)."""
        if device not in self._by_device:
            features, first = self._by_device[torch.device("cpu")]
            self._by_device[device] = features.to(device), first.to(device)
        return self._by_device[device]


@dataclasses.dataclass
class MemoryWindows:
    """Windows of features that are all in memory, gathered by index on the device where they are."""

    bank: Bank
    window: int
    indices: Tensor
    """The current step of every sample."""
    targets: Tensor
    in_memory: bool = dataclasses.field(default=True, init=False)

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def timeline(self) -> Timeline:
        return self.bank.timeline

    @property
    def current(self) -> Tensor:
        return self.indices.cpu()

    def at(self, steps: Tensor) -> MemoryWindows:
        """The windows that end with these steps of the timeline."""
        device = self.targets.device
        return dataclasses.replace(
            self, indices=steps.to(device), targets=self.timeline.targets[steps.cpu()].to(device)
        )

    def take(self, indices: Tensor) -> MemoryWindows:
        return dataclasses.replace(self, indices=self.indices[indices], targets=self.targets[indices])

    def to(self, device: torch.device) -> MemoryWindows:
        return dataclasses.replace(self, indices=self.indices.to(device), targets=self.targets.to(device))

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        features, first = self.bank.on(self.targets.device)
        for chosen in order.to(self.targets.device).split(batch_size):
            at = self.indices[chosen]
            yield features[cut(at, first[at], self.window)], self.targets[chosen]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of every feature over the windows' current steps."""
        features, _ = self.bank.on(torch.device("cpu"))
        return moments([features[self.current].numpy()])


@dataclasses.dataclass
class WindowReader:
    """Step → its window, read from the files of its video."""

    timeline: Timeline
    window: int
    dtype: np.dtype[Any]

    def __call__(self, step: int) -> Tensor:
        number = int(self.timeline.video_of[step])
        here = torch.tensor([step]) - self.timeline.offsets[number]
        steps = cut(here, torch.zeros_like(here), self.window)[0].numpy()
        features = self.timeline.videos[number].features
        values = features.window(steps) if isinstance(features, FeatureFiles) else features.read()[steps]
        return torch.from_numpy(np.ascontiguousarray(values, dtype=self.dtype))


@dataclasses.dataclass
class StreamedWindows(LazySource):
    """Windows that are read from files while training runs."""

    @property
    def timeline(self) -> Timeline:
        assert isinstance(self.load, WindowReader)
        return self.load.timeline

    @property
    def current(self) -> Tensor:
        assert self.indices is not None
        return self.indices

    def at(self, steps: Tensor) -> StreamedWindows:
        """The windows that end with these steps of the timeline."""
        return dataclasses.replace(self, indices=steps, targets=self.timeline.targets[steps])

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of every feature over all steps of the videos that the windows come from, one by one."""
        numbers = self.timeline.video_of[self.current].unique()
        return moments(read(self.timeline.videos[number]) for number in numbers.tolist())


Windows = MemoryWindows | StreamedWindows
"""Samples of an action task: `current` holds the current step of each, on its timeline."""


def read(video: Video) -> Array:
    """The features of a whole video; values that are no numbers are refused."""
    values = video.features.read()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"The features of video '{video.name}' hold values that are no finite numbers.")
    return values


def moments(parts: Iterable[Array]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every column, over the rows of several arrays."""
    count, total, squares = 0, np.zeros(()), np.zeros(())
    for part in parts:
        values = part.astype(np.float64)
        count, total, squares = count + len(values), total + values.sum(0), squares + np.square(values).sum(0)
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - np.square(mean), 0.0))
    return torch.from_numpy(mean).float(), torch.from_numpy(deviation).float()
