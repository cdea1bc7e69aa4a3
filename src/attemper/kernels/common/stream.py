"""The random stream of `attemper.ops.stream` inside Triton kernels: the same words, so the same masks bit for bit."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.ops import stream

STEP = tl.constexpr(stream.STEP)
QUERY_STEP = tl.constexpr(stream.QUERY_STEP)
LANE_STEP = tl.constexpr(stream.LANE_STEP)
COLUMN_SALT = tl.constexpr(stream.COLUMN_SALT)
MIX_1 = tl.constexpr(stream.MIX_1)
MIX_2 = tl.constexpr(stream.MIX_2)


@triton.jit
def mix(x):
    """`stream.mix` for uint32."""
    x = (x ^ (x >> 16)) * MIX_1
    x = (x ^ (x >> 15)) * MIX_2
    return x ^ (x >> 16)


@triton.jit
def row_words(start, head, queries):
    """One odd int32 word per query; `head` counts sample · H + head, `start` is the stream's row word."""
    head_word = mix(start.to(tl.uint32, bitcast=True) + head.to(tl.uint32) * STEP)
    return (mix(head_word + queries.to(tl.uint32) * QUERY_STEP) | 1).to(tl.int32, bitcast=True)


@triton.jit
def column_words(start, keys):
    """One odd uint32 word per key; `start` is the word that columns start from."""
    x = start + keys.to(tl.uint32) * STEP
    return ((x ^ (x >> 16)) * MIX_1) | 1


@triton.jit
def start_of(seed_ptr, lane_step):
    """The stream's row word, `stream.stream_words`; `lane_step` is lane · LANE_STEP."""
    seed = tl.load(seed_ptr)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return mix(mix(low + lane_step.to(tl.uint32)) ^ high)


@triton.jit
def table_kernel(seed_ptr, limit_ptr, table_ptr, limit, keys, lane_step, HAS_LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """Write the column word of every key, then the stream's row word, the limit below which keys are dropped, and 0.

    One program owns BLOCK words. Grid: blocks of the table.
    """
    rows = start_of(seed_ptr, lane_step)
    columns = mix(rows ^ COLUMN_SALT)
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = column_words(columns, key)
    if HAS_LIMIT:
        limit = tl.load(limit_ptr)
    word = tl.where(key == keys, rows, word).to(tl.int32, bitcast=True)
    word = tl.where(key == keys + 1, limit, word)
    word = tl.where(key == keys + 2, 0, word)
    tl.store(table_ptr + key, word, mask=key < keys + 3)
