"""The random stream of `attemper.ops.stream` inside Triton kernels: the same words, so the same masks bit for bit."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.common.groups import Starts
from attemper.ops import stream_constants

STEP = tl.constexpr(stream_constants.STEP)
HEAD_STEP = tl.constexpr(stream_constants.HEAD_STEP)
QUERY_STEP = tl.constexpr(stream_constants.QUERY_STEP)
COLUMN_SALT = tl.constexpr(stream_constants.COLUMN_SALT)
MIX_1 = tl.constexpr(stream_constants.MIX_1)
MIX_2 = tl.constexpr(stream_constants.MIX_2)


@triton.jit
def mix(x):
    """`stream.mix` for uint32."""
    x = (x ^ (x >> 16)) * MIX_1
    x = (x ^ (x >> 15)) * MIX_2
    return x ^ (x >> 16)


@triton.jit
def starts_of(seed_ptr, site, path):
    """`Starts`, the words of `stream.stream_words`; path: call · LANES + lane."""
    seed = tl.load(seed_ptr)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    site = site.to(tl.uint32)
    first = mix(low + STEP)
    rows = mix((mix(high ^ first) ^ site) + path.to(tl.uint32))
    other = mix((first ^ site) + rows)
    columns = mix(rows ^ COLUMN_SALT)
    return Starts(rows, other, columns, mix(other + columns))


@triton.jit
def row_words(rows, other, sample, head, query):
    """One odd uint32 word per row. rows, other: the uint32 words that rows start from; the others: their numbers."""
    sample_word = mix(rows + sample.to(tl.uint32) * STEP)
    head_word = mix((sample_word ^ other) + head.to(tl.uint32) * HEAD_STEP)
    return mix(mix(head_word + query.to(tl.uint32) * QUERY_STEP) ^ sample_word) | 1


@triton.jit
def column_words(columns, other, key):
    """One odd uint32 word per key; columns, other: the words that columns start from."""
    return mix(mix(columns + key.to(tl.uint32) * STEP) ^ other) | 1


@triton.jit
def table_words(starts, at, keys, limit, sample, head, query, key):
    """The int32 words of a table, at places from 0 on: the column word of every key, then what kernels need of rows.

    That is, at keys + 0 … 6: the first word that rows start from, the limit below which keys are dropped, 0, the second
    word that rows start from, and the numbers of the first sample, head and query.
    """
    word = column_words(starts.columns, starts.other_columns, at + key).to(tl.int32, bitcast=True)
    word = tl.where(at == keys, starts.rows.to(tl.int32, bitcast=True), word)
    word = tl.where(at == keys + 1, limit, word)
    word = tl.where(at == keys + 2, 0, word)
    word = tl.where(at == keys + 3, starts.other_rows.to(tl.int32, bitcast=True), word)
    word = tl.where(at == keys + 4, sample, word)
    word = tl.where(at == keys + 5, head, word)
    return tl.where(at == keys + 6, query, word)


# A new seed, site, call or place compiles nothing: these are not specialised on.
@triton.jit(do_not_specialize=["limit", "keys", "site", "path", "sample", "head", "query", "key"])
def table_kernel(
    seed_ptr, limit_ptr, table_ptr, limit, keys,
    site, path,  # where the stream starts
    sample, head, query, key,  # numbers of the first of each
    HAS_LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `table_words`, for `table_row_words` and the kernels of attention.

    One program owns BLOCK words. Grid: blocks of the table.
    """
    if HAS_LIMIT:
        limit = tl.load(limit_ptr)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = table_words(starts_of(seed_ptr, site, path), at, keys, limit, sample, head, query, key)
    tl.store(table_ptr + at, word, mask=at < keys + 7)


@triton.jit
def table_row_words(table, nk, sample, head, queries):
    """One odd int32 word per query of a sample and head, by a table of nk keys that `table_kernel` wrote."""
    rows = tl.load(table + nk).to(tl.uint32, bitcast=True)
    other = tl.load(table + nk + 3).to(tl.uint32, bitcast=True)
    sample += tl.load(table + nk + 4)
    head += tl.load(table + nk + 5)
    queries += tl.load(table + nk + 6)
    return row_words(rows, other, sample, head, queries).to(tl.int32, bitcast=True)
