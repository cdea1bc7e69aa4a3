"""What two runs must have in common to have ended alike, for several files of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attemper.lab.training.checkpoint import load_checkpoint

__all__ = ["assert_equal_bits", "assert_same_end", "flat", "timeless"]


def timeless(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "timing"}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Everything in nested containers, by path."""
    if isinstance(value, dict):
        return {k: v for key, each in value.items() for k, v in flat(each, f"{name}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for key, each in enumerate(value) for k, v in flat(each, f"{name}/{key}").items()}
    return {name: value}


def assert_same_end(one: Path, other: Path) -> None:
    """The last checkpoints hold the same bits: weights, optimiser, average, best weights, random states, curve."""
    assert_equal_bits(*(flat(load_checkpoint(folder)) for folder in (one, other)))


def assert_equal_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    """All entries but times are equal."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if "seconds" not in name:
            same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
            assert same, name
