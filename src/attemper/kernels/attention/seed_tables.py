"""Tables of keys that seeds drop (`seeds.py`), as a torch library operator."""

from typing import Any

import torch
from torch import Tensor

from attemper.kernels.attention.prepare import TABLE_BLOCK, TAIL
from attemper.kernels.common.direct import Launch, is_aligned, memory, remember
from attemper.kernels.common.dropping import seed_words
from attemper.kernels.common.eager import is_plain
from attemper.kernels.common.launch import DEVICES, on_device
from attemper.ops.perturbation import SeedDrop
from attemper.ops.stream import Stream, signed

HELD = 1024
"""Bits of lines that one program of stripes has on chip."""
_tables: dict[Any, Launch] = memory()

torch.library.define(
    "attemper::seed_table",
    "(Tensor seed, Tensor? limit, SymInt threshold, SymInt[] shape, SymInt[] image, int w, int words, SymInt site, "
    "SymInt path, SymInt sample, SymInt head, SymInt query) -> Tensor",
)


def seed_table(stream: Stream, limit: int | Tensor, shape: tuple[int, int, int, int], drop: SeedDrop) -> Tensor:
    """What the kernels read of keys that seeds drop, int32, of one axis.

    limit: `stream.threshold` of the rate of seeds, or a 0-dim int32 tensor of it. shape: (B, H, Nq, Nk).
    """
    samples, heads, queries, keys = shape
    if drop.for_all_heads:
        heads, stream = 1, stream.for_all_heads()
    if drop.for_all_queries:
        queries, stream = 1, stream.for_all_queries()
    threshold = 0 if isinstance(limit, Tensor) else limit
    make = _seed_table if is_plain(stream.seed) else torch.ops.attemper.seed_table
    table: Tensor = make(
        stream.seed, limit if isinstance(limit, Tensor) else None, threshold, [samples, heads, queries, keys],
        [drop.prefix, *drop.grid], drop.w, seed_words(drop), stream.site, stream.path, *stream.at[:3],
    )  # fmt: skip
    return table


def _seed_table(
    seed: Tensor, limit: Tensor | None, threshold: int, shape: list[int], image: list[int], w: int, words: int,
    *numbers: int,
) -> Tensor:  # fmt: skip
    table = _seed_table_fake(seed, limit, threshold, shape, image, w, words)
    keys, device = shape[3], seed.get_device()
    rows = shape[0] * shape[1] * shape[2]
    given = table if limit is None else limit
    common = (seed, given, table, threshold, keys, *image)
    key = (keys, rows, image[2], w, words, limit is None, device)
    found = _tables.get(key)
    if found is None:
        found = _plan(table.numel(), rows, w, words, device, limit is not None)
        remember(_tables, key, found)
    own = (rows, shape[1], shape[2], w // 2) if words else (_lead(image[2], w),)
    with on_device(seed):
        found(is_aligned(seed, given, table), *common, *own, *map(signed, numbers))
    return table


def _plan(size: int, rows: int, w: int, words: int, device: int, has_limit: bool) -> Launch:
    from attemper.kernels.attention.seeds import stripes_kernel, windows_kernel

    if not words:
        programs = -(-size // TABLE_BLOCK)
        return Launch(windows_kernel, programs, device, HAS_LIMIT=has_limit, W=w, BLOCK=TABLE_BLOCK)
    block = max(1, HELD // (32 * words))
    constants = {"HAS_LIMIT": has_limit, "WORDS": words, "BM": block, "BLOCK": TABLE_BLOCK}
    return Launch(stripes_kernel, -(-rows // block), device, **constants)


def _lead(columns: int, w: int) -> int:
    """How many words stand before those of keys: as far as the first corner of a window is from its last, and one."""
    return (w - 1) * (columns + 1) + 1


def _seed_table_fake(
    seed: Tensor, limit: Tensor | None, threshold: int, shape: list[int], image: list[int], w: int, words: int,
    *_: int,
) -> Tensor:  # fmt: skip
    samples, heads, queries, keys = shape
    more = samples * heads * queries * 2 * words if words else _lead(image[2], w)
    return torch.empty(keys + TAIL + more, dtype=torch.int32, device=seed.device)


for _device in DEVICES:
    torch.library.impl("attemper::seed_table", _device, _seed_table)
torch.library.register_fake("attemper::seed_table", _seed_table_fake)
