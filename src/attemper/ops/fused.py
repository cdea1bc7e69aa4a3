"""Small functions that kernels may take over from torch: a method asks here whether they serve, and never imports one.

They are found by name, so that methods and the reference stay readable, and runnable, without any GPU code.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor

__all__ = ["KeyFunctions", "PenaltyFunctions", "keys", "penalties"]


class KeyFunctions(Protocol):
    """What can be done to keys before they meet the queries."""

    def serves(self, x: Tensor) -> bool:
        """Whether the functions take keys (B, H, N, e) such as these."""

    def runs_on(self, x: Tensor) -> bool:
        """Whether they run where a tensor lies."""

    def blur_keys(
        self,
        x: Tensor,
        seed: Tensor,
        lane: int,
        sigma: float,
        w: int,
        causal: bool,
        real: Tensor | None,
        grid: Sequence[int],
    ) -> Tensor:
        """Keys (B, H, N, e) blurred along the sequence, or over an image of grid (prefix, rows, columns)."""

    def draw_order(
        self, seed: Tensor, lane: int, batch: int, sets: int, keys: int, count: int, limit: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The order in which keys are drawn, its inverse, and which of the drawn ones are kept."""


class PenaltyFunctions(Protocol):
    """Sums of squares that stay on the chip."""

    def reads(self, out: Tensor) -> bool:
        """Whether `output_square` takes a layer's output such as this."""

    def output_square(self, out: Tensor, bias: Tensor | None) -> Tensor:
        """‖out − bias‖²."""

    def serves(self, q: Tensor, k: Tensor, heads: int) -> bool:
        """Whether `logit_squares` takes queries and keys (B, N, H · e) such as these."""

    def logit_squares(self, q: Tensor, k: Tensor, q_bias: Tensor | None, k_bias: Tensor | None, heads: int) -> Tensor:
        """‖(Q − b_q)(K − b_k)ᵀ‖² of every sample and head."""


keys = cast(KeyFunctions, importlib.import_module("attemper.kernels.keys"))
penalties = cast(PenaltyFunctions, importlib.import_module("attemper.kernels.penalties"))
