"""The inputs of Transformers' models: text, images, both, pages, numbers over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from architectures.base import Inputs, ids


def text(length: int = 9, **more: Any) -> Callable[[], Inputs]:
    """Two sentences, the second with padding at its end."""

    def make() -> Inputs:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, length - 2 :] = 0
        return {"input_ids": ids(length=length), "attention_mask": mask, **more}

    return make


def floats(*shape: int) -> Tensor:
    """Random numbers, always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def named(**shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    """Tensors of random numbers by the names of the arguments."""
    return lambda: {name: floats(*shape) for name, shape in shapes.items()}


def pixels(size: int = 32) -> Callable[[], Inputs]:
    """Two square images."""
    return named(pixel_values=(2, 3, size, size))


def text_and_pixels(size: int = 32, **more: Any) -> Callable[[], Inputs]:
    """Two sentences without padding, and two images."""
    return lambda: {"input_ids": ids(), "pixel_values": floats(2, 3, size, size), **more}


def boxes(length: int = 9) -> Tensor:
    """Where words stand on a page."""
    return torch.tensor([1, 2, 3, 4]).expand(2, length, 4).clone()


def series() -> Inputs:
    """Numbers over time, with what is known of the time."""
    return {
        "past_values": floats(2, 10),
        "past_time_features": floats(2, 10, 2),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": floats(2, 4),
        "future_time_features": floats(2, 4, 2),
    }


def words_of_image() -> Inputs:
    """A sentence that has a place for each of an image's 16 patches."""
    tokens = ids(length=24)
    tokens[:, 4:20] = 99
    return {"input_ids": tokens, "pixel_values": floats(2, 3, 32, 32)}
