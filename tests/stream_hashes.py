"""The documented hash once more, in numpy's own 32-bit arithmetic, with places where a weaker part can be put in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MaskFn = Callable[[int, tuple[int, int, int, int], float], np.ndarray]
Start = tuple[np.ndarray, np.ndarray]


def word(x: int) -> np.ndarray:
    return np.array([x & 0xFFFFFFFF], np.uint32)


def counter(n: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.uint64).astype(np.uint32)


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> 16)) * word(0x7FEB352D)
    x = (x ^ (x >> 15)) * word(0x846CA68B)
    return x ^ (x >> 16)


def numpy_starts(low: np.ndarray, high: np.ndarray, path: int = 0, site: int = 0) -> tuple[Start, Start]:
    """What rows and columns start from; path: call · 256 + lane."""
    t = mix(low + word(0x9E3779B9))
    a = mix((mix(high ^ t) ^ word(site)) + word(path))
    b = mix((t ^ word(site)) + a)
    c = mix(a ^ word(0xA511E9B3))
    return (a, b), (c, mix(b + c))


def numpy_rows(start: Start, batch: int, heads: int, queries: int, at: tuple[int, ...] = (0, 0, 0)) -> np.ndarray:
    sample = mix(start[0] + counter(batch, at[0]) * word(0x9E3779B9))
    head = mix((sample ^ start[1])[:, None] + counter(heads, at[1]) * word(0x632BE5AB))
    query = mix(head[..., None] + counter(queries, at[2]) * word(0x85EBCA6B))
    return mix(query ^ sample[:, None, None]) | word(1)


def numpy_columns(start: Start, keys: int, first: int = 0) -> np.ndarray:
    return mix(mix(start[0] + counter(keys, first) * word(0x9E3779B9)) ^ start[1]) | word(1)


def kept(products: np.ndarray, p: float) -> np.ndarray:
    return products.view(np.int32) >= min(round(p * 2**32), 2**32 - 1) - 2**31


def numpy_keep(
    seed, shape, p, *, lane=0, site=0, call=0, at=(0, 0, 0, 0),
    starts=numpy_starts, rows=numpy_rows, columns=numpy_columns, combine=np.multiply,
) -> np.ndarray:  # fmt: skip
    row_start, column_start = starts(word(seed), word(seed >> 32), call * 256 + lane, site)
    *many, keys = shape
    words = rows(row_start, *many, at[:3]) if any(at) else rows(row_start, *many)
    column_words = columns(column_start, keys, at[3]) if any(at) else columns(column_start, keys)
    return kept(combine(words[..., None], column_words).reshape(shape), p)


# The stream of commit 63759d7: rows of sample · H + head, columns that were mixed once, starts of 32 bits.


def starts_of_32_bits(low: np.ndarray, high: np.ndarray, path: int = 0, site: int = 0) -> tuple[Start, Start]:
    rows = mix(mix(low + word(path * 0x632BE5AB)) ^ high)
    columns = mix(rows ^ word(0x5BD1E995))
    return (rows, rows), (columns, columns)


def rows_of_counted_heads(start: Start, batch: int, heads: int, queries: int) -> np.ndarray:
    head_words = mix(start[0] + counter(batch * heads) * word(0x9E3779B9))
    rows = mix(head_words[:, None] + counter(queries) * word(0x85EBCA6B)) | word(1)
    return rows.reshape(batch, heads, queries)


def columns_mixed_once(start: Start, keys: int) -> np.ndarray:
    x = start[0] + counter(keys) * word(0x9E3779B9)
    return (x ^ (x >> 16)) * word(0x7FEB352D) | word(1)


def keep_63759d7(seed: int, shape: tuple[int, int, int, int], p: float) -> np.ndarray:
    return numpy_keep(
        seed, shape, p, starts=starts_of_32_bits, rows=rows_of_counted_heads, columns=columns_mixed_once
    )  # fmt: skip


# Parts that are too weak.


def progression_columns(start, keys):
    return (start[0] | word(1)) + counter(keys) * word(2 * 0x9E3779B9)


def counted_rows(start, batch, heads, queries):
    return (word(2) * counter(batch * heads * queries) + word(1)).reshape(batch, heads, queries)


def progression_rows(start, batch, heads, queries):
    head_words = mix(start[0] + counter(batch * heads) * word(0x9E3779B9)) | word(1)
    return (head_words[:, None] + counter(queries) * word(2 * 0x85EBCA6B)).reshape(batch, heads, queries)


def rows_without_samples(start, batch, heads, queries):
    return np.repeat(numpy_rows(start, 1, heads, queries), batch, 0)


def rows_without_heads(start, batch, heads, queries):
    return np.repeat(numpy_rows(start, batch, 1, queries), heads, 1)


WEAK = {
    "column words in arithmetic progression": (
        {"columns": progression_columns},
        {"column triples 1", "column triples 2", "run lengths"},
    ),
    "row words that count": ({"rows": counted_rows}, {"row triples 1", "row triples 2", "run lengths down"}),
    "row words in arithmetic progression": (
        {"rows": progression_rows},
        {"row triples 1", "row triples 2", "run lengths down"},
    ),
    "row and column words xored": ({"combine": np.bitwise_xor}, {"2x2 parity"}),
    "samples left out": ({"rows": rows_without_samples}, {"neighbouring samples"}),
    "heads left out": ({"rows": rows_without_heads}, {"neighbouring heads"}),
}
"""Name → parts of `numpy_keep`, and checks of the battery that must find them."""
