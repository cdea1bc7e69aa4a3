"""Attention under any set of perturbations: one reference, fast implementations beside it, one random stream.

Names are loaded when they are asked for, so that kernels and methods can use the stream without loading each other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attemper.ops.dispatch import Verdict, attention, implementations
    from attemper.ops.perturbation import Perturbation
    from attemper.ops.seeds import draw_seed
    from attemper.ops.stream import Stream, keep_mask

__all__ = ["Perturbation", "Stream", "Verdict", "attention", "draw_seed", "implementations", "keep_mask"]

HOMES = {
    "dispatch": ("Verdict", "attention", "implementations"),
    "perturbation": ("Perturbation",),
    "seeds": ("draw_seed",),
    "stream": ("Stream", "keep_mask"),
}


def __getattr__(name: str) -> Any:
    for home, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"attemper.ops.{home}"), name)
    raise AttributeError(f"module 'attemper.ops' has no attribute '{name}'")
