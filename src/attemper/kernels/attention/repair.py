"""What the main kernels leave aside because it is rare: rows that need a running maximum, and rows that lost all keys.

Both kernels read the flags that the forward kernel wrote and return at once where there are none. A row whose allowed
keys would all be dropped is left undropped: it stores +inf as its log-sum-exp, so that whoever drops sees weights of
zero, and its true log-sum-exp in place of its row word.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.attention.backward import key_step
from attemper.kernels.attention.forward import LEAST_LEFT, finished, online_step
from attemper.kernels.attention.seeds import head_tables, load_dropping
from attemper.kernels.common.groups import Options, SavedRows, Stats
from attemper.kernels.common.tiles import (
    FLAG_ROWS,
    INFINITY_BITS,
    behind,
    detached,
    expand_row_masks,
    groups_of,
    load_row_masks,
    load_tile,
    load_words,
    mask_of,
    rows_of,
    store_tile,
    without_last,
)


@triton.jit
def repair_rows(first, b, h, q, k, v, out, stats, tables, mask, scale, options, BN: tl.constexpr):
    """Compute FLAG_ROWS rows again with a running maximum, and once more where a row has lost all of its keys.

    stats.flags stands at the flag of these rows, and is 1 from then on where one was left undropped.
    """
    queries = first + tl.arange(0, FLAG_ROWS)
    q_tile = load_tile(q, queries, mask.nq, options.E, options.BE, True)
    dropping = load_dropping(b, h, queries, mask.nk, tables, options.DROP)
    row_masks = expand_row_masks(load_row_masks(queries, mask, tables, options), 1)
    if options.MASK == "last":
        mask = without_last(mask)
    end = tl.minimum(mask.nk, first + FLAG_ROWS) if options.CAUSAL else mask.nk
    spared = tl.zeros((FLAG_ROWS,), tl.int32)
    acc = tl.zeros((FLAG_ROWS, options.BEV), tl.float32)
    total = tl.zeros((FLAG_ROWS,), tl.float32)
    left = tl.zeros((FLAG_ROWS,), tl.float32)
    top = tl.zeros((FLAG_ROWS,), tl.float32)
    left_top = top
    again = first >= 0
    for attempt in range(2):  # noqa: B007
        if again:
            acc = tl.zeros((FLAG_ROWS, options.BEV), tl.float32)
            total = tl.zeros((FLAG_ROWS,), tl.float32)
            seen = tl.zeros((FLAG_ROWS,), tl.float32)
            left = tl.zeros((FLAG_ROWS,), tl.float32)
            top = tl.full((FLAG_ROWS,), -float("inf"), tl.float32)
            left_top = top
            for start in tl.range(0, end, BN):
                acc, total, left, seen, top, left_top = online_step(
                    start, acc, total, left, seen, top, left_top, q_tile, spared, dropping, row_masks, queries,
                    k, v, tables, mask, scale, options, BN, True, True,
                )  # fmt: skip
            if options.DROP and options.MASK == "bias":
                lost = (seen == 0.0) & (queries < mask.nq)
            elif detached(options.DROP):
                lost = ~(left_top + tl.log2(left) - top - tl.log2(total) > LEAST_LEFT) & (queries < mask.nq)
            elif behind(options.DROP):
                lost = (left == 0.0) & (queries < mask.nq)
            else:
                lost = (top == -float("inf")) & (queries < mask.nq)
            spared = tl.where(lost, 1, spared)
            again = tl.max(lost.to(tl.int32), 0) > 0 if options.DROP else first < 0

    empty = total == 0.0
    result, lse, share = finished(acc, total, left, top, left_top, dropping.limit, spared, options)
    store_tile(out, result, queries, mask.nq, options.EV, options.BEV, True)
    if behind(options.DROP):
        tl.store(stats.shares + queries, share, mask=queries < mask.nq)
    if options.DROP:
        spared = tl.where(empty, 0, spared)
        words = tl.where(empty | (spared > 0), lse, dropping.words)
        tl.store(stats.words + queries, words, mask=queries < mask.nq)
        lse = tl.where(spared > 0, INFINITY_BITS, lse)
        tl.store(stats.flags, tl.max(spared, 0))
    tl.store(stats.lse + queries, lse, mask=queries < mask.nq)


@triton.jit
def repair_kernel(
    q, k, v, out, stats, tables, mask, sizes, scale,  # as in `forward_kernel`
    flags,  # how many there are
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns SPAN flags, and the rows of those that are set. Grid: spans of flags."""
    heads, group, nq, nk = sizes
    lse_ptr, words_ptr, flags_ptr, shares_ptr = stats
    begin = tl.program_id(0) * SPAN
    at = begin + tl.arange(0, SPAN)
    if tl.max(tl.load(flags_ptr + at, mask=at < flags, other=0), 0) > 0:
        groups = groups_of(nq)
        for spot in range(begin, tl.minimum(begin + SPAN, flags)):
            if tl.load(flags_ptr + spot) > 0:
                head = spot // groups
                b = (head // heads).to(tl.int64)
                h = (head % heads).to(tl.int64)
                row = head.to(tl.int64) * groups * FLAG_ROWS
                repair_rows(
                    (spot % groups) * FLAG_ROWS, b, h,
                    rows_of(q, b, h), rows_of(k, b, h // group), rows_of(v, b, h // group), rows_of(out, b, h),
                    Stats(lse_ptr + row, words_ptr + row, flags_ptr + spot, shares_ptr + row),
                    head_tables(tables, row, b, h, heads, nq, nk, DROP),
                    mask_of(mask, b, h, nq, nk), scale,
                    Options(E, BE, EV, BEV, DROP, HARD, CAUSAL, MASK, PRECISION), BN,
                )  # fmt: skip


@triton.jit
def spared_rows(first, q, k, v, dout, dk, dv, saved, tables, mask, scales, options, BN: tl.constexpr):
    """Add to dK and dV of one head what FLAG_ROWS rows contribute, those of them that were left undropped.

    options: without dropping.
    """
    scale, scale_log2 = scales
    nk = mask.nk
    for start in range(0, nk, BN):
        keys = start + tl.arange(0, BN)
        k_tile = load_tile(k, keys, nk, options.E, options.BE, True)
        v_tile = load_tile(v, keys, nk, options.EV, options.BEV, True)
        hard_columns = load_words(tables.hard, keys, nk, 1, True) if options.HARD != "none" else keys
        more_dk, more_dv = key_step(
            first, tl.zeros((BN, options.BE), tl.float32), tl.zeros((BN, options.BEV), tl.float32),
            k_tile, v_tile, keys, hard_columns, 0, 0, keys, q, dout, saved, tables, mask, scale_log2, options,
            FLAG_ROWS, True, True,
        )  # fmt: skip
        more_dk = more_dk * scale + load_tile(dk, keys, nk, options.E, options.BE, True)
        more_dv = more_dv + load_tile(dv, keys, nk, options.EV, options.BEV, True)
        store_tile(dk, more_dk, keys, nk, options.E, options.BE, True)
        store_tile(dv, more_dv, keys, nk, options.EV, options.BEV, True)
        tl.debug_barrier()


@triton.jit
def spared_kernel(
    q, k, v, dout, dk, dv,  # a tensor, its strides along samples, heads and tokens
    saved,  # row words; deltas paired with log-sum-exps
    flags_ptr, tables, mask, sizes,
    scales,  # of scores, and of logits to the base of two
    share, flags,  # flags of a program, and of all
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr,
    HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dK and dV what the rows that were left undropped contribute.

    Grid: shares of `share` flags, out of `flags`. A share is a whole number of key heads, so one program owns each.
    """
    heads, group, nq, nk = sizes
    words_ptr, pairs_ptr = saved
    groups = groups_of(nq)
    begin = tl.program_id(0).to(tl.int64) * share
    total = tl.minimum(share, flags - begin)
    for chunk in range(0, total, SPAN):
        at = chunk + tl.arange(0, SPAN)
        if tl.max(tl.load(flags_ptr + begin + at, mask=at < total, other=0), 0) > 0:
            for spot in range(begin + chunk, begin + tl.minimum(chunk + SPAN, total)):
                if tl.load(flags_ptr + spot) > 0:
                    head = spot // groups
                    b = head // heads
                    h = head % heads
                    first = (spot % groups).to(tl.int32) * FLAG_ROWS
                    row = head * groups * FLAG_ROWS
                    spared_rows(
                        first, rows_of(q, b, h), rows_of(k, b, h // group), rows_of(v, b, h // group),
                        rows_of(dout, b, h), rows_of(dk, b, h // group), rows_of(dv, b, h // group),
                        SavedRows(words_ptr + row, pairs_ptr + row), head_tables(tables, row, b, h, heads, nq, nk, 0),
                        mask_of(mask, b, h, nq, nk), scales,
                        Options(E, BE, EV, BEV, False, HARD, CAUSAL, MASK, PRECISION), BN,
                    )  # fmt: skip
