"""What a convolution adds to the loss, from the matrix that it is."""

from __future__ import annotations

import math

import torch
from torch import nn

P = 0.3
EXPECTATIONS = ("paper", "exact", "inverted")
FACTORS = {"paper": (P**2, 0.0), "exact": (P**2, P * (1 - P)), "inverted": (0.0, P / (1 - P))}
"""Of ‖w ∗ x‖², and of what each entry makes by itself."""


def by_matrix(layer: nn.Module, x: torch.Tensor, expectation: str) -> torch.Tensor:
    """E‖w ∗ X̃‖² from the matrix that the layer is, entry by entry, without any formula for convolutions."""
    out, shape = layer(x), x.shape[1:]
    units = torch.eye(math.prod(shape), dtype=x.dtype).view(-1, *shape)
    bias = layer(torch.zeros(1, *shape, dtype=x.dtype))
    matrix = (layer(units) - bias).flatten(1)  # (inputs, outputs)
    joint, own = FACTORS[expectation]
    entries = x.flatten(1)
    together = (entries @ matrix).square().sum()
    torch.testing.assert_close((entries @ matrix).view_as(out), out - bias)
    return joint * together + own * (entries.square() @ matrix.square()).sum()
