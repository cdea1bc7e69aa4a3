"""The backward kernel: one launch, two kinds of programs, no atomics.

Some programs own a key tile and make dK and dV from transposed scores, others own a query tile and make dQ. Scores are
computed twice, nothing has to be transposed in registers, and the same inputs give the same bits. Column words are
loaded one tile ahead: a load that a product of the same round waits for would be staged through shared memory.

A row that the forward pass left undropped has +inf as its log-sum-exp, so that key programs count it as zero, and the
true one in place of its row word; `repair.py` adds its part to dK and dV.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.attention.hits import fills_zero, hard_way, hit_logits, hit_weights, same_way, weights_of
from attemper.kernels.attention.penalty_gradients import add_logit_penalty, add_value_penalty, penalties_of
from attemper.kernels.attention.seeds import drop_keys, head_tables, stripe_words, stripes_step
from attemper.kernels.common.groups import Dropping, Options, Rows, SavedRows, Tables
from attemper.kernels.common.tiles import (
    FLAG_ROWS,
    INFINITY_BITS,
    add_product,
    behind,
    by_sample,
    expand_row_masks,
    groups_of,
    load_row_masks,
    load_tile,
    load_words,
    mask_at,
    mask_of,
    restrict,
    rows_of,
    store_tile,
    to_logits,
    without_last,
)


@triton.jit
def delta_rows(
    first, out, dout, lse_ptr, shares_ptr, pairs_ptr, nq, EV: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """Write what `delta_kernel` does, of BM rows of one head from `first` on."""
    queries = first + tl.arange(0, BM)
    out_tile = load_tile(out, queries, nq, EV, BEV, True)
    dout_tile = load_tile(dout, queries, nq, EV, BEV, True)
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    rows = groups_of(nq) * FLAG_ROWS
    lse = tl.load(lse_ptr + queries, mask=queries < rows, other=0)
    if SHARES:
        delta *= tl.load(shares_ptr + queries, mask=queries < nq, other=0).to(tl.float32, bitcast=True)
    high = delta.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.store(pairs_ptr + queries, high | (lse.to(tl.int64) & 0xFFFFFFFF), mask=queries < rows)


@triton.jit
def delta_kernel(
    out, dout,  # a tensor, its strides along samples, heads and tokens
    lse_ptr, shares_ptr, pairs_ptr, heads, nq, EV: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """Σ dO·O of every row, which softmax's gradient subtracts, paired with the row's log-sum-exp in one 64-bit word.

    SHARES: times what is left of the row's weights (`common/dropping.py`).

    One program owns BM rows. A pass of its own, since both kinds of programs of `backward_kernel` read the sums.
    From the last head to the first: what was written last is in the cache, and what is read last will be read first.
    """
    tiles = (nq + BM - 1) // BM
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    head = pid // tiles
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    row = head.to(tl.int64) * groups_of(nq) * FLAG_ROWS
    first = (pid % tiles) * BM
    delta_rows(
        first, rows_of(out, b, h), rows_of(dout, b, h), lse_ptr + row, shares_ptr + row, pairs_ptr + row, nq,
        EV, BEV, BM, SHARES,
    )  # fmt: skip


@triton.jit
def load_pairs(ptr, at, n, EDGE: tl.constexpr):
    """(log-sum-exp as int32 bits, delta) of rows; +inf and 0 beyond n (where EDGE)."""
    pairs = load_words(ptr, at, n, INFINITY_BITS, EDGE)
    return pairs.to(tl.int32), (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def score_gradients(
    dv,  # what it adds to
    q_tile, dout_tile, lse, delta, dropping, row_masks, queries,  # of a query tile
    k_tile, v_tile, columns, hard_columns, keys,  # of a key tile
    tables, mask, scale, options, EDGE: tl.constexpr, EDGE_N: tl.constexpr,
):  # fmt: skip
    """dV with what a tile adds to it, and the float32 gradient of the tile's logits, keys down and queries across.

    lse, delta, dropping.words: a number per query, (1, queries), lse as int32 bits.
    EDGE_N: keys beyond nk get zeros; not needed where their rows of the result are not read.
    """
    scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=options.PRECISION)
    row_masks = expand_row_masks(row_masks, 0)
    logits = to_logits(scores, scale, row_masks, queries[None, :], keys[:, None], mask, options)
    if options.HARD != "none":
        p = hit_weights(
            logits, lse, row_masks, hard_columns[:, None], queries[None, :], keys[:, None], mask, options,
            not EDGE,
        )  # fmt: skip
    else:
        p = tl.exp2(logits - lse.to(tl.float32, bitcast=True))
    p = restrict(p, 0.0, queries[None, :], keys[:, None], mask, options, EDGE_N)
    every = p
    if options.DROP:
        p = drop_keys(p, dropping, columns[:, None], queries[None, :], keys[:, None], tables, mask, options, EDGE)
    if fills_zero(options.HARD):
        dv = add_product(dv, weights_of(p, dout_tile), dout_tile, options.PRECISION)
        p = tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)
        every = tl.maximum(every, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        dv = add_product(dv, p.to(dout_tile.dtype), dout_tile, options.PRECISION)
    dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=options.PRECISION)
    if behind(options.DROP):
        return dv, p * dp - every * delta
    return dv, p * (dp - delta)


@triton.jit
def key_step(
    start, dk, dv,  # where it is, and what it adds to
    k_tile, v_tile, columns, hard_columns, limit, extra, keys,  # of the program's keys
    q, dout, saved, tables, mask, scale, options,
    BM: tl.constexpr, EDGE: tl.constexpr, SPARED: tl.constexpr,
):  # fmt: skip
    """What one query tile adds to dK and dV; SPARED takes the rows that were left undropped, and no others."""
    queries = start + tl.arange(0, BM)
    q_tile = load_tile(q, queries, mask.nq, options.E, options.BE, EDGE)
    lse, delta = load_pairs(saved.pairs, queries, mask.nq, EDGE)
    words = queries
    if SPARED:
        words = load_words(saved.words, queries, mask.nq, INFINITY_BITS, EDGE)
        lse = tl.where(lse == INFINITY_BITS, words, INFINITY_BITS)
    row_masks = load_row_masks(queries, mask, tables, options, EDGE)
    if options.DROP:
        words = load_words(saved.words, queries, mask.nq, 1, EDGE)
    dout_tile = load_tile(dout, queries, mask.nq, options.EV, options.BEV, EDGE)
    dv, ds = score_gradients(
        dv, q_tile, dout_tile, lse[None, :], delta[None, :], Dropping(words[None, :], limit, extra), row_masks, queries,
        k_tile, v_tile, columns, hard_columns, keys, tables, mask, scale, options, EDGE, False,
    )  # fmt: skip
    return add_product(dk, ds.to(q_tile.dtype), q_tile, options.PRECISION), dv


@triton.jit
def key_tile(
    first, group, next_head, q, k, v, dout, dk, dv, saved, tables, mask, scales, penalties, options,
    PENALTY: tl.constexpr, BIAS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, TAIL_M: tl.constexpr, EDGE_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of BN keys from `first` on, summed over the query heads of their group.

    Queries come in tiles of BM, what is left in one of TAIL_M. All groups of arguments stand at the first query head.
    next_head: how far it is to the next one in q, dout, the mask and its row tops.
    """
    scale, scale_log2 = scales
    q_step, dout_step, mask_step, tops_step = next_head
    keys = first + tl.arange(0, BN)
    k_tile = load_tile(k, keys, mask.nk, options.E, options.BE, EDGE_N)
    v_tile = load_tile(v, keys, mask.nk, options.EV, options.BEV, EDGE_N)
    if options.DROP:
        limit = tl.load(tables.drop + mask.nk + 1)
        extra = tl.load(tables.drop + mask.nk + 2)
        columns = load_words(tables.drop, keys, mask.nk, 1, EDGE_N)
    else:
        limit = 0
        extra = 0
        columns = keys
    hard_columns = load_words(tables.hard, keys, mask.nk, 1, EDGE_N) if options.HARD != "none" else keys
    dk_tile = tl.zeros((BN, options.BE), tl.float32)
    dv_tile = tl.zeros((BN, options.BEV), tl.float32)
    begin = first // BM * BM if options.CAUSAL else 0
    whole = mask.nq // BM * BM
    q_ptr = q.ptr
    dout_ptr = dout.ptr
    mask_ptr = mask.ptr
    tops_ptr = mask.tops_ptr
    cuts_ptr = tables.cuts
    stripes_ptr = tables.stripes
    words_ptr = saved.words
    pairs_ptr = saved.pairs
    for _ in range(group):
        q_head = Rows(q_ptr, q.stride)
        dout_head = Rows(dout_ptr, dout.stride)
        saved_head = SavedRows(words_ptr, pairs_ptr)
        tables_head = Tables(tables.drop, tables.hard, cuts_ptr, stripes_ptr)
        mask_head = mask_at(mask, mask_ptr, tops_ptr)
        for start in tl.range(begin, whole, BM):
            dk_tile, dv_tile = key_step(
                start, dk_tile, dv_tile, k_tile, v_tile, columns, hard_columns, limit, extra, keys,
                q_head, dout_head, saved_head, tables_head, mask_head, scale_log2, options, BM, False, False,
            )  # fmt: skip
        if whole < mask.nq:
            dk_tile, dv_tile = key_step(
                whole, dk_tile, dv_tile, k_tile, v_tile, columns, hard_columns, limit, extra, keys,
                q_head, dout_head, saved_head, tables_head, mask_head, scale_log2, options, TAIL_M, True, False,
            )  # fmt: skip
        q_ptr += q_step
        dout_ptr += dout_step
        if options.MASK != "last":  # of which all heads of a group have the same
            mask_ptr += mask_step
        tops_ptr += tops_step
        cuts_ptr += groups_of(mask.nq) * FLAG_ROWS
        if stripe_words(options.DROP) > 0 and not by_sample(options.DROP):
            stripes_ptr += stripes_step(mask.nq, options.DROP)
        words_ptr += groups_of(mask.nq) * FLAG_ROWS
        pairs_ptr += groups_of(mask.nq) * FLAG_ROWS
    if options.MASK == "last":
        there = (keys < without_last(mask).nk)[:, None]
        dk_tile = tl.where(there, dk_tile, 0.0)
        dv_tile = tl.where(there, dv_tile, 0.0)
    dk_tile = add_logit_penalty(dk_tile * scale, k_tile, penalties, options, 1, PENALTY, BIAS)
    dv_tile = add_value_penalty(dv_tile, v, keys, mask.nk, penalties, options, PENALTY, BIAS)
    store_tile(dk, dk_tile, keys, mask.nk, options.E, options.BE, EDGE_N)
    store_tile(dv, dv_tile, keys, mask.nk, options.EV, options.BEV, EDGE_N)


@triton.jit
def query_step(
    start, ahead, dq, columns, hard_columns,  # where it is, and what it changes
    q_tile, dout_tile, lse, delta, dropping, row_masks, queries,  # of the program's rows
    k, v, tables, mask, scale, options,
    BN: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """What one key tile adds to dQ; also loads the column words of the tile at `ahead`, which comes next."""
    keys = start + tl.arange(0, BN)
    k_tile = load_tile(k, keys, mask.nk, options.E, options.BE, EDGE)
    v_tile = load_tile(v, keys, mask.nk, options.EV, options.BEV, EDGE)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=options.PRECISION)
    logits = to_logits(scores, scale, row_masks, queries[:, None], keys[None, :], mask, options)
    if options.HARD != "none":
        # −inf whatever the fill: a logit that was set to 0 is a constant, and has no gradient.
        logits = hit_logits(
            logits, row_masks, hard_columns[None, :], queries[:, None], keys[None, :], mask, options,
            same_way(options.HARD, "neg_inf"), not EDGE,
        )  # fmt: skip
        hard_columns = load_words(tables.hard, ahead + tl.arange(0, BN), mask.nk, 1, EDGE)
    p = tl.exp2(logits - lse[:, None])
    p = restrict(p, 0.0, queries[:, None], keys[None, :], mask, options, EDGE)
    every = p
    if options.DROP:
        p = drop_keys(p, dropping, columns[None, :], queries[:, None], keys[None, :], tables, mask, options, EDGE)
        columns = load_words(tables.drop, ahead + tl.arange(0, BN), mask.nk, 1, EDGE)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=options.PRECISION)
    ds = p * dp - every * delta[:, None] if behind(options.DROP) else p * (dp - delta[:, None])
    return add_product(dq, ds.to(k_tile.dtype), k_tile, options.PRECISION), columns, hard_columns


@triton.jit
def query_tile(
    first, q, k, v, dout, dq, saved, tables, mask, scales, penalties, options,
    PENALTY: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TAIL_N: tl.constexpr, EDGE_M: tl.constexpr,
):  # fmt: skip
    """dQ of BM queries from `first` on. Keys come in tiles of BN, what is left in one of TAIL_N.

    A row that was left undropped gets its true log-sum-exp, and a limit that drops nothing.
    """
    scale, scale_log2 = scales
    queries = first + tl.arange(0, BM)
    q_tile = load_tile(q, queries, mask.nq, options.E, options.BE, EDGE_M)
    dout_tile = load_tile(dout, queries, mask.nq, options.EV, options.BEV, EDGE_M)
    lse, delta = load_pairs(saved.pairs, queries, mask.nq, EDGE_M)
    columns = tl.arange(0, BN)
    hard_columns = load_words(tables.hard, columns, mask.nk, 1, True) if options.HARD != "none" else columns
    if options.DROP:
        words = load_words(saved.words, queries, mask.nq, INFINITY_BITS, EDGE_M)
        spared = lse == INFINITY_BITS
        lse = tl.where(spared, words, lse)
        limits = tl.where(spared, -2147483648, tl.load(tables.drop + mask.nk + 1))
        extra = tl.load(tables.drop + mask.nk + 2)
        columns = load_words(tables.drop, columns, mask.nk, 1, True)
    else:
        words = queries
        limits = queries
        extra = 0
    dropping = Dropping(words[:, None], limits[:, None], extra)
    lse = lse.to(tl.float32, bitcast=True)
    row_masks = expand_row_masks(load_row_masks(queries, mask, tables, options, EDGE_M), 1)
    end = tl.minimum(mask.nk, first + BM) if options.CAUSAL else mask.nk
    whole = end // BN * BN
    if options.MASK == "last":
        whole = (end - 1) // BN * BN
        mask = without_last(mask)
    dq_tile = tl.zeros((BM, options.BE), tl.float32)
    for start in tl.range(0, whole, BN):
        dq_tile, columns, hard_columns = query_step(
            start, tl.minimum(start + BN, whole - BN), dq_tile, columns, hard_columns,
            q_tile, dout_tile, lse, delta, dropping, row_masks, queries,
            k, v, tables, mask, scale_log2, options, BN, False,
        )  # fmt: skip
    if whole < end:
        tail = whole + tl.arange(0, TAIL_N)
        hard_tail = load_words(tables.hard, tail, mask.nk, 1, True) if options.HARD != "none" else tail
        tail = load_words(tables.drop, tail, mask.nk, 1, True) if options.DROP else tail
        dq_tile, tail, hard_tail = query_step(
            whole, whole, dq_tile, tail, hard_tail, q_tile, dout_tile, lse, delta, dropping, row_masks, queries,
            k, v, tables, mask, scale_log2, options, TAIL_N, True,
        )  # fmt: skip
    dq_tile = add_logit_penalty(dq_tile * scale, q_tile, penalties, options, 0, PENALTY, BIAS)
    store_tile(dq, dq_tile, queries, mask.nq, options.E, options.BE, EDGE_M)


@triton.jit
def backward_kernel(
    q, k, v, dout, dq, dk, dv,  # a tensor, its strides along samples, heads and tokens
    saved,  # row words; deltas paired with log-sum-exps
    tables,  # of dropping, of hard masking, cuts of its rows
    mask,  # elements, four strides, row tops, their three strides
    penalties,  # factors, biases, Gram matrices, shifts, what the factors are multiplied with
    sizes,  # query heads, how many of them share a key head, queries, keys
    scales,  # of scores, and of logits to the base of two
    NQ: tl.constexpr, NK: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr,
    KEY_N: tl.constexpr, KEY_M: tl.constexpr, KEY_TAIL_N: tl.constexpr, KEY_TAIL_M: tl.constexpr,
    QUERY_M: tl.constexpr, QUERY_N: tl.constexpr, QUERY_TAIL_M: tl.constexpr, QUERY_TAIL_N: tl.constexpr,
    GROUP: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    PENALTY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program owns KEY_N keys, and writes their dK and dV, or QUERY_M queries of a head, and writes their dQ.

    Grid: sample × key head × (key tiles, then the query tiles of the group's heads), tiles fastest.
    """
    heads, group, nq, nk = sizes
    if NQ > 0:
        nq = NQ
        nk = NK
    if GROUP == 1:
        group = 1
    hard: tl.constexpr = hard_way(HARD, NK)
    key_tiles = (nk + KEY_N - 1) // KEY_N
    query_tiles = (nq + QUERY_M - 1) // QUERY_M
    tiles = key_tiles + group * query_tiles
    pid = tl.program_id(0)
    tile = pid % tiles
    key_head = pid // tiles
    key_heads = heads // group
    b = (key_head // key_heads).to(tl.int64)
    h = (key_head % key_heads).to(tl.int64)
    k_rows = rows_of(k, b, h)
    v_rows = rows_of(v, b, h)
    added = penalties_of(penalties, b, h, heads, E)
    if tile < key_tiles:
        first = tile * KEY_N
        head = b * heads + h * group
        next_head = (q[2], dout[2], mask[2], mask[7])  # strides along heads
        row = head * groups_of(nq) * FLAG_ROWS
        q_rows = rows_of(q, b, h * group)
        dout_rows = rows_of(dout, b, h * group)
        dk_rows = rows_of(dk, b, h)
        dv_rows = rows_of(dv, b, h)
        masked = mask_of(mask, b, h * group, nq, nk)
        known = head_tables(tables, row, b, h * group, heads, nq, nk, DROP)
        stored = SavedRows(saved[0] + row, saved[1] + row)
        if (nk % KEY_N == 0) | (first + KEY_N <= nk):
            key_tile(
                first, group, next_head, q_rows, k_rows, v_rows, dout_rows, dk_rows, dv_rows, stored, known, masked,
                scales, added, Options(E, BE, EV, BEV, DROP, hard, CAUSAL, MASK, PRECISION), PENALTY, BIAS,
                KEY_N, KEY_M, KEY_TAIL_M, False,
            )  # fmt: skip
        else:
            key_tile(
                first, group, next_head, q_rows, k_rows, v_rows, dout_rows, dk_rows, dv_rows, stored, known, masked,
                scales, added, Options(E, BE, EV, BEV, DROP, hard, CAUSAL, MASK, PRECISION), PENALTY, BIAS,
                KEY_TAIL_N, KEY_M, KEY_TAIL_M, True,
            )  # fmt: skip
    else:
        tile -= key_tiles
        query_head = h * group + tile // query_tiles
        first = (tile % query_tiles) * QUERY_M
        head = b * heads + query_head
        row = head * groups_of(nq) * FLAG_ROWS
        q_rows = rows_of(q, b, query_head)
        dout_rows = rows_of(dout, b, query_head)
        dq_rows = rows_of(dq, b, query_head)
        masked = mask_of(mask, b, query_head, nq, nk)
        known = head_tables(tables, row, b, query_head, heads, nq, nk, DROP)
        stored = SavedRows(saved[0] + row, saved[1] + row)
        if (nq % QUERY_M == 0) | (first + QUERY_M <= nq):
            query_tile(
                first, q_rows, k_rows, v_rows, dout_rows, dq_rows, stored, known, masked,
                scales, added, Options(E, BE, EV, BEV, DROP, hard, CAUSAL, MASK, PRECISION), PENALTY, BIAS,
                QUERY_M, QUERY_N, QUERY_TAIL_N, False,
            )  # fmt: skip
        else:
            query_tile(
                first, q_rows, k_rows, v_rows, dout_rows, dq_rows, stored, known, masked,
                scales, added, Options(E, BE, EV, BEV, DROP, hard, CAUSAL, MASK, PRECISION), PENALTY, BIAS,
                QUERY_TAIL_M, QUERY_N, QUERY_TAIL_N, True,
            )  # fmt: skip
