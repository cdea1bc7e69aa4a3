"""One seed for every draw in a model, so that its masks can be written down."""

from __future__ import annotations

import pytest
import torch

from attemper.ops.stream import Source


def draw_from(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every site of tempered models draw from a seed, as if it were alone in the world."""
    for module in ("layers", "parts", "written"):
        monkeypatch.setattr(f"attemper.tempering.{module}.source", lambda *_, **__: Source(torch.tensor(seed)))
    for module in ("layers", "parts"):
        monkeypatch.setattr(f"attemper.tempering.{module}.ordinary_source", lambda *_: Source(torch.tensor(seed)))
