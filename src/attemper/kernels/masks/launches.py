"""Launches of the kernels, each decided once for a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attemper.kernels.common.direct import Launch, is_aligned, memory, remember
from attemper.kernels.common.launch import on_device
from attemper.ops.stream import Stream, all_signed, threshold

HELD = 2048
"""Elements of a program."""
WIDEST = 128
"""Columns of a program, at most."""
_keeps: dict[Any, Launch] = memory()
_uniforms: dict[Any, Launch] = memory()


def keep(stream: Stream, shape: Sequence[int], p: float) -> Tensor:
    """What `Stream.keep` gives, bit for bit."""
    seed = stream.seed
    mask = torch.empty(tuple(shape), dtype=torch.bool, device=seed.device)
    if mask.numel() == 0:
        return mask
    samples, heads, queries, keys = shape
    rows = samples * heads * queries
    key = (*shape, seed.get_device())
    found = _keeps.get(key)
    if found is None:
        from attemper.kernels.masks.kernels import keep_kernel

        across, down = tile(keys)
        grid = -(-rows // down), -(-keys // across)
        found = Launch(keep_kernel, grid, seed.get_device(), BM=down, BN=across, num_warps=4)
        remember(_keeps, key, found)
    numbers = (stream.site, stream.path, *stream.at[:4])
    with on_device(seed):
        found(
            is_aligned(seed, mask), seed, mask.view(torch.uint8), threshold(p), heads, queries, keys, rows,
            *all_signed(numbers),
        )  # fmt: skip
    return mask


def tile(keys: int) -> tuple[int, int]:
    """Columns and rows of a program, powers of two.

    >>> tile(1), tile(197), tile(9)
    ((1, 2048), (128, 16), (16, 128))
    """
    across = min(WIDEST, 1 << math.ceil(math.log2(keys)))
    return across, HELD // across


def uniform(stream: Stream) -> Tensor:
    """What `Stream.uniform` gives, bit for bit."""
    seed = stream.seed
    out = torch.empty((), dtype=torch.float64, device=seed.device)
    found = _uniforms.get(seed.get_device())
    if found is None:
        from attemper.kernels.masks.kernels import uniform_kernel

        found = Launch(uniform_kernel, 1, seed.get_device(), num_warps=1)
        remember(_uniforms, seed.get_device(), found)
    with on_device(seed):
        found(is_aligned(seed, out), seed, out, *all_signed((stream.site, stream.path)))
    return out
