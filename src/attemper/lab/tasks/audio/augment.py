"""SpecAugment: whole stretches of time and bands of frequency are hidden.

Park and others, Interspeech 2019. Without its warping of time, which that paper finds to matter least.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from attemper.lab.tasks.augment import MixUp, Transform, check, inside


@dataclasses.dataclass(frozen=True)
class SpecAugment(Transform):
    """Hide stretches of every spectrogram: the mean of the training set takes their place.

    time: the longest stretch of time, as a share of the clip; each has a length drawn evenly from none to that.
    freq: the same of the bands.
    masks: how many of either kind.
    """

    name: ClassVar[str] = "spec"
    stage: ClassVar[Literal["inputs"]] = "inputs"
    bands: ClassVar[int]

    time: float = 0.1
    freq: float = 0.25
    masks: int = 2

    def __post_init__(self) -> None:
        check("time", self.time, 0, 1)
        check("freq", self.freq, 0, 1)
        check("masks", self.masks, 1, 1000, whole=True)

    def __call__(self, inputs: Tensor) -> Tensor:
        mel = inputs.reshape(len(inputs), -1, self.bands)
        _, frames, bands = mel.shape
        rows = self._hidden(len(mel), frames, self.time)[:, :, None]
        columns = self._hidden(len(mel), bands, self.freq)[:, None, :]
        mask = (rows | columns).to(mel.device, non_blocking=True)
        return mel.masked_fill(mask, 0.0).reshape(inputs.shape)

    def _hidden(self, samples: int, places: int, longest: float) -> Tensor:
        """Which of the places of each sample are hidden: boolean (samples, places)."""
        hidden = torch.zeros(samples, places, dtype=torch.bool)
        for _ in range(self.masks):
            length = (torch.rand(samples) * (int(longest * places) + 1)).floor()
            start = (torch.rand(samples) * (places - length + 1)).floor()
            hidden |= inside(torch.arange(places), start, length)
        return hidden


@dataclasses.dataclass(frozen=True)
class SpectrogramMixUp(MixUp):
    """Blend every clip and its class with a neighbour's: that of images, on inputs without a channel."""

    def __call__(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        mixed, blended = super().__call__(inputs[:, None], targets, classes)
        return mixed[:, 0], blended


def spectrogram_kinds(bands: int) -> dict[str, type[Any]]:
    """The augmentations of spectrograms with so many bands, by name."""
    kind = type("SpecAugment", (SpecAugment,), {"bands": bands, "__doc__": SpecAugment.__doc__})
    return {"spec": kind, "mixup": SpectrogramMixUp}
