"""The backward kernel for short rows: one program has a whole head on chip.

`backward.py` computes scores twice, and reads the sum that softmax's gradient subtracts from memory, since other
programs need it too. Where all queries and keys of a head are two tiles at most, one program does everything once. Its
scores have keys down and queries across; for dQ alone they are transposed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attemper.kernels.attention.backward import score_gradients
from attemper.kernels.attention.penalty_gradients import add_logit_penalty, add_value_penalty, penalties_of
from attemper.kernels.attention.seeds import head_tables
from attemper.kernels.common.groups import Dropping, Options, Stats
from attemper.kernels.common.tiles import (
    FLAG_ROWS,
    INFINITY_BITS,
    add_product,
    behind,
    groups_of,
    load_row_masks,
    load_tile,
    load_words,
    mask_of,
    rows_of,
    store_tile,
    without_last,
)


class QueryTile(NamedTuple):
    """What is known of a query tile. delta: Σ dO·O of its rows; words: their words, where keys are dropped."""

    queries: Any
    q: Any
    dout: Any
    lse: Any
    delta: Any
    words: Any
    row_masks: Any


class KeyTile(NamedTuple):
    """What is known of a key tile. columns, hard_columns: the words of its keys, of dropping and of hard masking."""

    keys: Any
    k: Any
    v: Any
    columns: Any
    hard_columns: Any


@triton.jit
def load_queries(first, q, dout, out, stats, tables, mask, options, BM: tl.constexpr, EDGE: tl.constexpr):
    """The `QueryTile` of BM queries from `first` on."""
    queries = first + tl.arange(0, BM)
    q_tile = load_tile(q, queries, mask.nq, options.E, options.BE, EDGE)
    dout_tile = load_tile(dout, queries, mask.nq, options.EV, options.BEV, EDGE)
    out_tile = load_tile(out, queries, mask.nq, options.EV, options.BEV, EDGE)
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    if behind(options.DROP):
        delta *= load_words(stats.shares, queries, mask.nq, 0, EDGE).to(tl.float32, bitcast=True)
    lse = load_words(stats.lse, queries, mask.nq, INFINITY_BITS, EDGE)
    words = load_words(stats.words, queries, mask.nq, INFINITY_BITS, EDGE) if options.DROP else queries
    row_masks = load_row_masks(queries, mask, tables, options, EDGE)
    return QueryTile(queries, q_tile, dout_tile, lse, delta, words, row_masks)


@triton.jit
def load_keys(first, k, v, tables, nk, options, BN: tl.constexpr, EDGE: tl.constexpr):
    """The `KeyTile` of BN keys from `first` on."""
    keys = first + tl.arange(0, BN)
    k_tile = load_tile(k, keys, nk, options.E, options.BE, EDGE)
    v_tile = load_tile(v, keys, nk, options.EV, options.BEV, EDGE)
    columns = load_words(tables.drop, keys, nk, 1, EDGE) if options.DROP else keys
    hard_columns = load_words(tables.hard, keys, nk, 1, EDGE) if options.HARD != "none" else keys
    return KeyTile(keys, k_tile, v_tile, columns, hard_columns)


@triton.jit
def pair_step(
    dq, dk, dv, row, column, limit, extra, tables, mask, scale, options, EDGE_M: tl.constexpr, EDGE_N: tl.constexpr
):
    """What a `QueryTile` and a `KeyTile` add to each other's gradients. limit, extra: as in `Dropping`."""
    dv, ds = score_gradients(
        dv, row.q, row.dout, row.lse[None, :], row.delta[None, :], Dropping(row.words[None, :], limit, extra),
        row.row_masks, row.queries, column.k, column.v, column.columns, column.hard_columns, column.keys,
        tables, mask, scale, options, EDGE_M or EDGE_N, EDGE_N,
    )  # fmt: skip
    ds = ds.to(row.q.dtype)
    dq = add_product(dq, tl.trans(ds), column.k, options.PRECISION)
    return dq, add_product(dk, ds, row.q, options.PRECISION), dv


@triton.jit
def add_spared(
    first, q, k, v, out, dout, dq, dk, dv, stats, tables, mask, scales, options, undropped, BN: tl.constexpr
):
    """Add what FLAG_ROWS rows contribute of which some were left undropped, and counted as zero so far.

    undropped: the options, but without dropping.
    """
    scale, scale_log2 = scales
    row = load_queries(first, q, dout, out, stats, tables, mask, options, FLAG_ROWS, True)
    lse = tl.where(row.lse == INFINITY_BITS, row.words, INFINITY_BITS)
    row = QueryTile(row.queries, row.q, row.dout, lse, row.delta, row.words, row.row_masks)
    dq_tile = tl.zeros((FLAG_ROWS, options.BE), tl.float32)
    for start in range(0, mask.nk, BN):
        column = load_keys(start, k, v, tables, mask.nk, undropped, BN, True)
        dq_tile, dk_tile, dv_tile = pair_step(
            dq_tile, tl.zeros((BN, options.BE), tl.float32), tl.zeros((BN, options.BEV), tl.float32), row, column, 0, 0,
            tables, mask, scale_log2, undropped, True, True,
        )  # fmt: skip
        keys = start + tl.arange(0, BN)
        dk_tile = dk_tile * scale + load_tile(dk, keys, mask.nk, options.E, options.BE, True)
        dv_tile = dv_tile + load_tile(dv, keys, mask.nk, options.EV, options.BEV, True)
        store_tile(dk, dk_tile, keys, mask.nk, options.E, options.BE, True)
        store_tile(dv, dv_tile, keys, mask.nk, options.EV, options.BEV, True)
    dq_tile = dq_tile * scale + load_tile(dq, row.queries, mask.nq, options.E, options.BE, True)
    store_tile(dq, dq_tile, row.queries, mask.nq, options.E, options.BE, True)


@triton.jit
def whole_head(
    q, k, v, out, dout, dq, dk, dv, stats, tables, mask, penalties, scales, options, undropped,
    PENALTY: tl.constexpr, BIAS: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
    BM: tl.constexpr, TAIL_M: tl.constexpr, BN: tl.constexpr, TAIL_N: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one head.

    BM queries and BN keys are a tile, TAIL_M and TAIL_N what is left; 0: nothing is. The tiles of queries stay on chip
    until the end, those of keys until both tiles of queries have met them.
    """
    scale, scale_log2 = scales
    reach = mask  # without the last key, where that is not there
    if options.MASK == "last":
        reach = without_last(mask)
    limit = 0
    extra = 0
    if options.DROP:
        limit = tl.load(tables.drop + NK + 1)
        extra = tl.load(tables.drop + NK + 2)
    edge_m: tl.constexpr = BM > NQ
    edge_n: tl.constexpr = BN > NK or (options.MASK == "last" and TAIL_N == 0)
    queries = tl.arange(0, BM)
    keys = tl.arange(0, BN)

    row = load_queries(0, q, dout, out, stats, tables, mask, options, BM, edge_m)
    column = load_keys(0, k, v, tables, NK, options, BN, edge_n)
    dq_tile, dk_tile, dv_tile = pair_step(
        tl.zeros((BM, options.BE), tl.float32), tl.zeros((BN, options.BE), tl.float32),
        tl.zeros((BN, options.BEV), tl.float32), row, column,
        limit, extra, tables, reach, scale_log2, options, edge_m, edge_n,
    )  # fmt: skip
    if TAIL_M > 0:
        last_row = load_queries(BM, q, dout, out, stats, tables, mask, options, TAIL_M, True)
        last_dq, dk_tile, dv_tile = pair_step(
            tl.zeros((TAIL_M, options.BE), tl.float32), dk_tile, dv_tile, last_row, column,
            limit, extra, tables, reach, scale_log2, options, True, edge_n,
        )  # fmt: skip
    dk_tile = add_logit_penalty(dk_tile * scale, column.k, penalties, options, 1, PENALTY, BIAS)
    dv_tile = add_value_penalty(dv_tile, v, keys, NK, penalties, options, PENALTY, BIAS)
    store_tile(dk, dk_tile, keys, NK, options.E, options.BE, edge_n)
    store_tile(dv, dv_tile, keys, NK, options.EV, options.BEV, edge_n)
    if TAIL_N > 0:
        last_column = load_keys(BN, k, v, tables, NK, options, TAIL_N, True)
        dq_tile, dk_tile, dv_tile = pair_step(
            dq_tile, tl.zeros((TAIL_N, options.BE), tl.float32), tl.zeros((TAIL_N, options.BEV), tl.float32),
            row, last_column,
            limit, extra, tables, reach, scale_log2, options, edge_m, True,
        )  # fmt: skip
        if TAIL_M > 0:
            last_dq, dk_tile, dv_tile = pair_step(
                last_dq, dk_tile, dv_tile, last_row, last_column,
                limit, extra, tables, reach, scale_log2, options, True, True,
            )  # fmt: skip
        keys = BN + tl.arange(0, TAIL_N)
        dk_tile = add_logit_penalty(dk_tile * scale, last_column.k, penalties, options, 1, PENALTY, BIAS)
        dv_tile = add_value_penalty(dv_tile, v, keys, NK, penalties, options, PENALTY, BIAS)
        store_tile(dk, dk_tile, keys, NK, options.E, options.BE, True)
        store_tile(dv, dv_tile, keys, NK, options.EV, options.BEV, True)
    dq_tile = add_logit_penalty(dq_tile * scale, row.q, penalties, options, 0, PENALTY, BIAS)
    store_tile(dq, dq_tile, queries, NQ, options.E, options.BE, edge_m)
    if TAIL_M > 0:
        queries = BM + tl.arange(0, TAIL_M)
        last_dq = add_logit_penalty(last_dq * scale, last_row.q, penalties, options, 0, PENALTY, BIAS)
        store_tile(dq, last_dq, queries, NQ, options.E, options.BE, True)
    if options.DROP:
        for group in range(groups_of(NQ)):
            if tl.load(stats.flags + group) > 0:
                tl.debug_barrier()  # what was stored above, or in the round before, is read again
                add_spared(
                    group * FLAG_ROWS, q, k, v, out, dout, dq, dk, dv, stats, tables, reach, scales, options, undropped,
                    32,
                )  # fmt: skip


@triton.jit
def whole_kernel(
    q, k, v, out, dout, dq, dk, dv,  # a tensor, its strides along samples, heads and tokens
    stats,  # log-sum-exps, row words, flags, shares
    tables,  # of dropping, of hard masking, cuts of its rows
    mask,  # elements, four strides, row tops, their three strides
    penalties,  # factors, biases, Gram matrices, shifts, what the factors are multiplied with
    heads,
    scales,  # of scores, and of logits to the base of two
    NQ: tl.constexpr, NK: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr,
    BM: tl.constexpr, TAIL_M: tl.constexpr, BN: tl.constexpr, TAIL_N: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    PENALTY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program owns a head: all of its dQ, dK and dV. Grid: sample × head."""
    head = tl.program_id(0)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    groups = groups_of(NQ)
    at = head.to(tl.int64) * groups * FLAG_ROWS
    whole_head(
        rows_of(q, b, h), rows_of(k, b, h), rows_of(v, b, h), rows_of(out, b, h), rows_of(dout, b, h),
        rows_of(dq, b, h), rows_of(dk, b, h), rows_of(dv, b, h),
        Stats(stats[0] + at, stats[1] + at, stats[2] + head.to(tl.int64) * groups, stats[3] + at),
        head_tables(tables, at, b, h, heads, NQ, NK, DROP),
        mask_of(mask, b, h, NQ, NK), penalties_of(penalties, b, h, heads, E), scales,
        Options(E, BE, EV, BEV, DROP, HARD, CAUSAL, MASK, PRECISION),
        Options(E, BE, EV, BEV, False, HARD, CAUSAL, MASK, PRECISION),
        PENALTY, BIAS, NQ, NK, BM, TAIL_M, BN, TAIL_N,
    )  # fmt: skip
