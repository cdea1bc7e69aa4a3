"""Images with structure at every scale, for tests of corruptions."""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.lab.evaluation.corruption_filters import plasma


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photos(count: int = 6, side: int = 32, channels: int = 3) -> Tensor:
    """Something with structure at every scale, in bytes / 255."""
    clouds = plasma(count * channels, 64, 1.4, seeded())[:, :side, :side].reshape(count, channels, side, side)
    return (255 * clouds).round() / 255
