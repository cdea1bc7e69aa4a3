"""Structured dropping on the image grid: windows (block) and stripes (cross), at an exact expected rate."""

import functools
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from attemper.ops.stream import Stream

Counts = NDArray[np.int64]


def covers(structure: str, grid: tuple[int, int], w: int) -> Counts:
    """(rows, columns): by how many seeds each cell would be dropped.

    A block's seeds are the windows that fit in the grid; a cross may stand at any cell, its stripes cut at the border.
    """
    rows, columns = grid
    if structure == "block":
        return _windows_over(rows, w)[:, None] * _windows_over(columns, w)
    down, across = _near(rows, w), _near(columns, w)
    return down[:, None] * columns + across * rows - down[:, None] * across


def _windows_over(cells: int, w: int) -> Counts:
    cell = np.arange(cells)
    return np.minimum(cell, cells - w) - np.maximum(cell - w + 1, 0) + 1


def _near(cells: int, w: int) -> Counts:
    cell = np.arange(cells)
    return np.minimum(cell + w // 2, cells - 1) - np.maximum(cell - w // 2, 0) + 1


@functools.lru_cache(maxsize=1024)
def seed_rate(structure: str, grid: tuple[int, int], w: int, p: float) -> float:
    """The probability γ of a seed at which the expected share of dropped cells is p, overlaps counted.

    It solves mean over cells of 1 − (1 − γ)^(seeds over the cell) = p by bisection.

    >>> round(seed_rate("cross", (4, 5), 1, 0.3), 12) == round(1 - 0.7 ** (1 / 8), 12)
    True
    """
    count = covers(structure, grid, w)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        share = float(np.mean(1 - (1 - middle) ** count))
        low, high = (middle, high) if share < p else (low, middle)
    return (low + high) / 2 if p > 0 else 0.0


def structured_keep(
    stream: Stream,
    shape: tuple[int, int, int],
    grid: tuple[int, int],
    structure: Literal["block", "cross"] | str,
    w: int,
    rate: float,
) -> Tensor:
    """(batch, heads, queries, rows · columns) boolean, True = kept; every (batch, head, query) has seeds of its own."""
    rows, columns = grid
    if structure == "block":
        seeds = _draw_seeds(stream, shape, rows - w + 1, columns - w + 1, rate)
        padded = F.pad(seeds.flatten(0, 2)[:, None], (w - 1, w - 1, w - 1, w - 1))
        dropped = F.max_pool2d(padded, w, stride=1).view(*shape, rows * columns) > 0
        return ~dropped
    seeds = _draw_seeds(stream, shape, rows, columns, rate).flatten(0, 2)
    down = F.max_pool1d(seeds.amax(2)[:, None], w, stride=1, padding=w // 2)[:, 0] > 0
    across = F.max_pool1d(seeds.amax(1)[:, None], w, stride=1, padding=w // 2)[:, 0] > 0
    return ~(down[:, :, None] | across[:, None, :]).view(*shape, rows * columns)


def _draw_seeds(stream: Stream, shape: tuple[int, int, int], rows: int, columns: int, rate: float) -> Tensor:
    keep = stream.keep((*shape, rows * columns), rate)
    return (~keep).to(torch.float32).view(*shape, rows, columns)
