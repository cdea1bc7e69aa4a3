"""The Triton kernels that write a call's random words, with 0 for rows that would lose all of their keys.

FlashAttention-4's kernels then read words instead of drawing them. `tables.py` says where each stands.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import math

import triton
import triton.language as tl

from attemper.kernels.common.stream import column_words, row_words, starts_of
from attemper.kernels.common.tiles import INFINITY_BITS

LN_2 = tl.constexpr(math.log(2))


# One kernel for all lengths: sizes are not specialised on, and a size of 1 is no constant. Triton would specialise on
# what is in a tuple all the same, so the arguments are single ones here.
@triton.jit(
    do_not_specialize=[
        *("limit", "samples", "heads", "queries", "keys", "rows_at", "site", "path"),
        *("first_sample", "first_head", "first_query", "first_key"),
    ]
)
def words_kernel(
    seed_ptr, limit_ptr,  # of the stream; the limit is read where HAS_LIMIT
    words_ptr,  # what it writes
    limit,
    samples, heads, queries, keys, rows_at,  # how many there are, where the row words begin
    site, path,  # where the stream starts
    first_sample, first_head, first_query, first_key,  # numbers of the first of each
    HAS_LIMIT: tl.constexpr, CAUSAL: tl.constexpr, HEADER: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK words. Grid: blocks of what comes before the rows, then blocks of rows.

    Room is filled with 0.
    """
    starts = starts_of(seed_ptr, site, path)
    if HAS_LIMIT:
        limit = tl.load(limit_ptr)
    pid = tl.program_id(0)
    blocks = (rows_at + BLOCK - 1) // BLOCK
    if pid < blocks:
        at = pid * BLOCK + tl.arange(0, BLOCK)
        inside = (at >= HEADER) & (at < HEADER + keys)
        word = column_words(starts.columns, starts.other_columns, at - HEADER + first_key)
        word = tl.where(inside, word, 0).to(tl.int32, bitcast=True)
        tl.store(words_ptr + at, tl.where(at == 0, limit, word), mask=at < rows_at)
    else:
        row = (pid - blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        query = (row % queries).to(tl.int32)
        head = (row // queries).to(tl.int32)
        row_word = row_words(
            starts.rows, starts.other_rows, head // heads + first_sample, head % heads + first_head, query + first_query
        )
        total = samples.to(tl.int64) * heads * queries
        lost = (row < total).to(tl.int32)
        key = keys * 0
        # A row looks at the keys it sees until one is kept, which takes a few: log(rows of a block) / log(1/p).
        while key < tl.max(lost * (query + 1 if CAUSAL else keys), 0):
            column = column_words(starts.columns, starts.other_columns, key + first_key)
            kept = (row_word * column).to(tl.int32, bitcast=True) >= limit
            if CAUSAL:
                kept = kept & (key <= query)
            lost = tl.where(kept, 0, lost)
            key += 1
        row_word = tl.where((lost > 0) | (row >= total), 0, row_word)
        tl.store(words_ptr + rows_at + row, row_word.to(tl.int32, bitcast=True), mask=row < total + ROOM)


@triton.jit(do_not_specialize=["plane", "stride", "total", "queries", "keys", "rows_at", "lows_at"])
def restate_kernel(
    stats_ptr, cuts_ptr, table_ptr,  # what our forward kernel and hard masking left
    words_ptr, lse_ptr,  # what FlashAttention-4 takes
    plane, stride, total,  # numbers in a plane of stats, those of a head, rows of all heads
    queries, keys, rows_at, lows_at,  # tokens, where the row words begin, and where `low` of rows
    scale,
    HARD: tl.constexpr, HEADER: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK words, of keys or of rows, and writes the log-sum-exps of its rows. Grid as above."""
    pid = tl.program_id(0)
    blocks = (rows_at + BLOCK - 1) // BLOCK
    if pid < blocks:
        at = pid * BLOCK + tl.arange(0, BLOCK)
        inside = (at >= HEADER) & (at < HEADER + keys)
        column = tl.load(table_ptr + at - HEADER, mask=inside, other=0)
        tl.store(words_ptr + at, tl.where(at == 0, tl.load(table_ptr + keys + 1), column), mask=at < rows_at)
    else:
        row = (pid - blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        place = row // queries * stride + row % queries
        lse = tl.load(stats_ptr + place, mask=row < total, other=INFINITY_BITS)
        if HARD:
            pair = tl.load(cuts_ptr + place, mask=row < total, other=INFINITY_BITS)
            low = pair.to(tl.int32).to(tl.float32, bitcast=True) / scale
            tl.store(words_ptr + lows_at + row, low.to(tl.int32, bitcast=True), mask=row < total + ROOM)
            word = (pair >> 32).to(tl.int32)
        else:
            word = tl.load(stats_ptr + plane + place, mask=row < total, other=0)
            spared = lse == INFINITY_BITS
            lse = tl.where(spared, word, lse)
            word = tl.where(spared, 0, word)
        lse = lse.to(tl.float32, bitcast=True) * LN_2
        tl.store(lse_ptr + row, lse.to(tl.int32, bitcast=True), mask=row < total)
        tl.store(words_ptr + rows_at + row, word, mask=row < total + ROOM)
