"""Clips of sound with one class each, held as spectrograms and given to models as tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks.audio.augment import spectrogram_kinds
from attemper.lab.tasks.augment import Augment, parse_augmentation
from attemper.lab.tasks.base import SequenceShape
from attemper.lab.tasks.pooled import PooledTask
from attemper.lab.tasks.source import Source, channel_statistics

FRAMES_PER_TOKEN = 8
"""A quarter of a second: a clip of 30 s has 120 tokens, as in the paper on explicit dropout."""


@dataclasses.dataclass
class MelSource:
    """Spectrograms in one uint8 tensor (N, frames, bands), on the device where they are used.

    groups: clips that must not be separated have the same number, int64 (N).
    """

    mel: Tensor
    targets: Tensor
    groups: Tensor
    in_memory: bool = dataclasses.field(default=True, init=False)

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> MelSource:
        return MelSource(self.mel[indices], self.targets[indices], self.groups[indices])

    def to(self, device: torch.device) -> MelSource:
        return MelSource(self.mel.to(device), self.targets.to(device), self.groups.to(device))

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in order.to(self.targets.device).split(batch_size):
            yield self.mel[indices], self.targets[indices]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of every band, two float32 tensors (bands)."""
        return channel_statistics(self.mel.transpose(1, 2))


@dataclasses.dataclass
class AudioTask(PooledTask):
    """Spectrograms with one class each, cut into tokens of some frames."""

    samples: ClassVar[str] = "clips"

    shape: SequenceShape
    bands: int = dataclasses.field(kw_only=True)
    """Of a spectrogram: so many features of a token belong to one frame."""

    def groups_of(self, source: Source) -> Tensor | None:
        return source.groups if isinstance(source, MelSource) else None

    def to_input(self, stored: Tensor) -> Tensor:
        """uint8 (B, frames, bands) → float32 (B, tokens, frames per token · bands).

        Each band has mean 0 and deviation 1 over the training set.
        """
        mean, deviation = self.statistics_on(stored.device)
        return ((stored.float() - mean) / deviation).reshape(len(stored), self.shape.tokens, self.shape.features)

    def augmentation(self, text: str) -> Augment:
        """What the `augment` of a budget means here: SpecAugment, mixup, or none."""
        return parse_augmentation(text, spectrogram_kinds(self.bands))


def token_shape(name: str, frames: int, bands: int, tokens: int | None, classes: int) -> SequenceShape:
    """The shape of frames cut into equal tokens; None: tokens of a quarter of a second."""
    wanted = max(1, frames // FRAMES_PER_TOKEN) if tokens is None else tokens
    if frames % wanted:
        fitting = [count for count in range(1, frames + 1) if frames % count == 0]
        near = sorted(sorted(fitting, key=lambda count: abs(count - wanted))[:5])
        raise DataError(
            f"'{name}': {frames} frames cannot be cut into {wanted} equal tokens; say tokens= one of "
            f"{', '.join(map(str, near))}."
        )
    return SequenceShape(tokens=wanted, features=frames // wanted * bands, classes=classes)
