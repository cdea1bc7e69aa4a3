"""The Triton kernel that writes a call's random words, and finds the rows that would lose all of their keys."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.ops.triton_words import COLUMN_SALT, LANE_STEP, MIX_1, QUERY_STEP, STEP, mix


@triton.jit
def column_word(columns, key):
    """The odd word of a key; `columns` is the word that columns start from."""
    x = columns + key.to(tl.uint32) * STEP
    return ((x ^ (x >> 16)) * MIX_1) | 1


# One kernel for all lengths: sizes are not specialised on, and a size of 1 is no constant.
@triton.jit(do_not_specialize=["limit", "lane", "heads", "queries", "keys", "heads_at", "rows_at"])
def words_kernel(
    seed_ptr, limit_ptr, words_ptr, limit, lane, heads, queries, keys, heads_at, rows_at,
    HAS_LIMIT: tl.constexpr, CAUSAL: tl.constexpr, HEADER: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of what comes before the rows, then blocks of rows. `heads` counts B · H. Room is filled with 0."""
    seed = tl.load(seed_ptr)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    rows = mix(mix(low + lane.to(tl.uint32) * LANE_STEP) ^ high)
    columns = mix(rows ^ COLUMN_SALT)
    if HAS_LIMIT:
        limit = tl.load(limit_ptr)
    pid = tl.program_id(0)
    blocks = (rows_at + BLOCK - 1) // BLOCK
    if pid < blocks:
        at = pid * BLOCK + tl.arange(0, BLOCK)
        head = at - heads_at
        word = tl.where(at < HEADER + keys, column_word(columns, at - HEADER), 0)
        word = tl.where(at == 1, columns, word)
        word = tl.where(head >= 0, mix(rows + head.to(tl.uint32) * STEP), word).to(tl.int32, bitcast=True)
        tl.store(words_ptr + at, tl.where(at == 0, limit, word), mask=at < rows_at)
    else:
        row = (pid - blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        query = (row % queries).to(tl.int32)
        head_word = mix(rows + (row // queries).to(tl.uint32) * STEP)
        row_word = mix(head_word + query.to(tl.uint32) * QUERY_STEP) | 1
        total = heads.to(tl.int64) * queries
        lost = (row < total).to(tl.int32)
        key = keys * 0
        # A row looks at the keys it sees until one is kept, which takes a few: log(rows of a block) / log(1/p).
        while key < tl.max(lost * (query + 1 if CAUSAL else keys), 0):
            kept = (row_word * column_word(columns, key)).to(tl.int32, bitcast=True) >= limit
            if CAUSAL:
                kept = kept & (key <= query)
            lost = tl.where(kept, 0, lost)
            key += 1
        row_word = tl.where((lost > 0) | (row >= total), 0, row_word)
        tl.store(words_ptr + rows_at + row, row_word.to(tl.int32, bitcast=True), mask=row < total + ROOM)
