"""Structured dropping on the image grid: windows (block) and stripes (cross), at an exact expected rate."""

import functools
from typing import Literal

import torch
from torch import Tensor

from attemper.ops.stream import Stream


def covers(structure: str, grid: tuple[int, int], w: int) -> dict[int, int]:
    """By how many seeds a cell would be dropped → how many cells there are of which that is true.

    A block's seeds are the windows that fit in the grid; a cross may stand at any cell, its stripes cut at the border.
    """
    rows, columns = grid
    found: dict[int, int] = {}
    for down, many in _counted(rows, w, structure).items():
        for across, more in _counted(columns, w, structure).items():
            seeds = down * across if structure == "block" else down * columns + across * rows - down * across
            found[seeds] = found.get(seeds, 0) + many * more
    return found


def _counted(cells: int, w: int, structure: str) -> dict[int, int]:
    """The same along one axis: windows over a cell, or cells that are near enough to it."""
    found: dict[int, int] = {}
    for cell in range(cells):
        if structure == "block":
            seeds = min(cell, cells - w) - max(cell - w + 1, 0) + 1
        else:
            seeds = min(cell + w // 2, cells - 1) - max(cell - w // 2, 0) + 1
        found[seeds] = found.get(seeds, 0) + 1
    return found


@functools.lru_cache(maxsize=1024)
def seed_rate(structure: str, grid: tuple[int, int], w: int, p: float) -> float:
    """The probability γ of a seed at which the expected share of dropped cells is p, overlaps counted.

    It solves mean over cells of 1 − (1 − γ)^(seeds over the cell) = p by bisection, in plain numbers, which a compiler
    can follow.

    >>> round(seed_rate("cross", (4, 5), 1, 0.3), 12) == round(1 - 0.7 ** (1 / 8), 12)
    True
    """
    counts = covers(structure, grid, w)
    cells = grid[0] * grid[1]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        share = 1 - sum(many * (1 - middle) ** seeds for seeds, many in counts.items()) / cells
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
    """(batch, heads, queries, rows · columns) boolean, True = kept; every (batch, head, query) has seeds of its own.

    How many seeds drop a cell comes from products with matrices of zeros and ones, exact in any dtype: pooling is ten
    times as slow.
    """
    rows, columns = grid
    if structure == "block":
        seeds = _draw_seeds(stream, shape, rows - w + 1, columns - w + 1, rate).flatten(0, 2)
        down, across = _near(rows - w + 1, rows, 0, w - 1, seeds), _near(columns - w + 1, columns, 0, w - 1, seeds)
        hits = down.mT @ (seeds @ across)
    else:
        seeds = _draw_seeds(stream, shape, rows, columns, rate).flatten(3)
        down, across = (_near(cells, cells, -(w // 2), w // 2, seeds) for cells in (rows, columns))
        stripes = torch.cat([down.repeat_interleave(columns, 0), across.repeat(rows, 1)], 1)
        cells = torch.cat([_one(rows, seeds).repeat_interleave(columns, 1), _one(columns, seeds).repeat(1, rows)])
        hits = (seeds @ stripes).clamp(max=1) @ cells
    return (hits == 0).view(*shape, rows * columns)


def _near(seeds: int, cells: int, first: int, last: int, like: Tensor) -> Tensor:
    """(seeds, cells) of ones where a cell is from `first` to `last` places behind the seed."""
    ones = torch.ones(seeds, cells, dtype=like.dtype, device=like.device)
    return ones.triu(first).tril(last)


def _one(cells: int, like: Tensor) -> Tensor:
    return torch.eye(cells, dtype=like.dtype, device=like.device)


def _draw_seeds(stream: Stream, shape: tuple[int, int, int], rows: int, columns: int, rate: float) -> Tensor:
    keep = stream.placed(stream.at._replace(key=0)).keep((*shape, rows * columns), rate)
    return (~keep).to(torch.float32).view(*shape, rows, columns)
