"""The kernels: every element by its row's and its column's word, both made where they are used."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.common.stream import column_words, row_words, starts_of

UNSPECIALISED = ["limit", "site", "path", "sample", "head", "query", "key"]
"""A new seed, site, rate, call or place compiles nothing."""


@triton.jit(do_not_specialize=UNSPECIALISED)
def keep_kernel(
    seed_ptr, keep_ptr, limit,
    heads, queries, keys, rows,  # rows: samples · heads · queries
    site, path,  # where the stream starts
    sample, head, query, key,  # numbers of the first of each
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write 1 where an element is kept, 0 where not. keep_ptr: bytes, (samples, heads, queries, keys) without gaps.

    One program owns BM rows × BN columns. Grid: blocks of rows × blocks of columns.
    """
    starts = starts_of(seed_ptr, site, path)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    of_sample = row // (heads * queries) + sample
    of_head = row // queries % heads + head
    words = row_words(starts.rows, starts.other_rows, of_sample, of_head, row % queries + query)
    columns = column_words(starts.columns, starts.other_columns, column + key)
    product = (words[:, None] * columns[None, :]).to(tl.int32, bitcast=True)
    at = row.to(tl.int64)[:, None] * keys + column[None, :]
    inside = (row < rows)[:, None] & (column < keys)[None, :]
    tl.store(keep_ptr + at, (product >= limit).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["site", "path"])
def uniform_kernel(seed_ptr, out_ptr, site, path):
    """Write the word of row 0 as a float64 in [0, 1). Grid: one program."""
    starts = starts_of(seed_ptr, site, path)
    zero = tl.zeros((1,), tl.int32)
    word = row_words(starts.rows, starts.other_rows, zero, zero, zero)
    tl.store(out_ptr + tl.arange(0, 1), word.to(tl.float64) / 4294967296.0)


@triton.jit(do_not_specialize=["limit", "site", "path", "sample", "query", "key"])
def dropped_kernel(
    seed_ptr, x_ptr, out_ptr, limit, scale,
    tokens, channels, rows,  # rows: samples · tokens
    site, path,  # where the stream starts
    sample, query, key,  # numbers of the first of each
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What `keep_kernel` keeps of x for head 0, times `scale`; 0 elsewhere. x, out: (samples, tokens, channels).

    One program owns BM rows × BN channels. Grid: blocks of rows × blocks of channels.
    """
    starts = starts_of(seed_ptr, site, path)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    words = row_words(starts.rows, starts.other_rows, row // tokens + sample, row * 0, row % tokens + query)
    columns = column_words(starts.columns, starts.other_columns, column + key)
    product = (words[:, None] * columns[None, :]).to(tl.int32, bitcast=True)
    at = row.to(tl.int64)[:, None] * channels + column[None, :]
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out = tl.where(product >= limit, x * scale, 0.0)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["limit", "site", "path", "sample"])
def branch_kernel(
    seed_ptr, branch_ptr, stream_ptr, out_ptr, limit, scale, each,  # each: elements of a sample
    site, path, sample,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A residual branch times `scale` in the samples that keep it, 0 in the others; ADD: and the stream added to it.

    One program owns BLOCK elements of a sample. Grid: samples × blocks of a sample.
    """
    starts = starts_of(seed_ptr, site, path)
    number = tl.program_id(0)
    word = row_words(starts.rows, starts.other_rows, number + sample, number * 0, number * 0)
    product = (word * column_words(starts.columns, starts.other_columns, number * 0)).to(tl.int32, bitcast=True)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < each
    first = number.to(tl.int64) * each
    out = tl.zeros((BLOCK,), tl.float32)
    if product >= limit:
        out = tl.load(branch_ptr + first + at, mask=inside, other=0.0).to(tl.float32) * scale
    if ADD:
        out += tl.load(stream_ptr + first + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + first + at, out.to(out_ptr.dtype.element_ty), mask=inside)
