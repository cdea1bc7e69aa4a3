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
from attemper.kernels.attention.penalty_gradients import add_logit_penalty, add_value_penalty, penalties_of_head
from attemper.kernels.common.tiles import (
    FLAG_ROWS,
    INFINITY_BITS,
    add_product,
    drop,
    expand_rule,
    groups_of,
    load_rule,
    load_tile,
    load_words,
    restrict,
    store_tile,
    to_logits,
    without_last,
)


@triton.jit
def delta_kernel(
    out_ptr, dout_ptr, lse_ptr, pairs_ptr, out_b, out_h, out_n, dout_b, dout_h, dout_n, heads, nq,
    EV: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Σ dO·O of every row, which softmax's gradient subtracts, paired with the row's log-sum-exp in one 64-bit word.

    From the last head to the first: what was written last is in the cache, and what is read last will be read first.
    """
    tiles = (nq + BM - 1) // BM
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    head = pid // tiles
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    queries = (pid % tiles) * BM + tl.arange(0, BM)
    out = load_tile(out_ptr + b * out_b + h * out_h, queries, out_n, nq, EV, BEV, True)
    dout = load_tile(dout_ptr + b * dout_b + h * dout_h, queries, dout_n, nq, EV, BEV, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    rows = groups_of(nq) * FLAG_ROWS
    at = head.to(tl.int64) * rows + queries
    lse = tl.load(lse_ptr + at, mask=queries < rows, other=0)
    high = delta.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.store(pairs_ptr + at, high | (lse.to(tl.int64) & 0xFFFFFFFF), mask=queries < rows)


@triton.jit
def load_pairs(ptr, at, n, EDGE: tl.constexpr):
    """(log-sum-exp as int32 bits, delta) of rows; +inf and 0 beyond n (where EDGE)."""
    pairs = load_words(ptr, at, n, INFINITY_BITS, EDGE)
    return pairs.to(tl.int32), (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def score_gradients(
    dv, q, dout, k, v, lse, delta, words, columns, hard_columns, limit, zero, rule, queries, keys, nq, nk,
    mask_ptr, mask_q, mask_k, scale,
    EDGE: tl.constexpr, EDGE_N: tl.constexpr, DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV with what a tile adds to it, and the gradient of the tile's logits, keys down and queries across.

    lse, delta, words: a number per query, (1, queries), lse as int32 bits.
    EDGE_N: keys beyond nk get zeros; not needed where their rows of the result are not read.
    """
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    rule = expand_rule(rule, 0)
    logits = to_logits(scores, scale, rule, queries[None, :], keys[:, None], nq, nk, mask_ptr, mask_q, mask_k, MASK)
    if HARD != "none":
        p = hit_weights(
            logits, lse, rule, hard_columns[:, None], queries[None, :], keys[:, None], nq, nk, mask_ptr, mask_q, mask_k,
            HARD, not EDGE, MASK,
        )  # fmt: skip
    else:
        p = tl.exp2(logits - lse.to(tl.float32, bitcast=True))
    p = restrict(p, 0.0, queries[None, :], keys[:, None], nq, nk, mask_ptr, mask_q, mask_k, EDGE_N, CAUSAL, MASK)
    if DROP:
        p = drop(p, words, columns[:, None], limit, zero, not EDGE)
    if fills_zero(HARD):
        dv = add_product(dv, weights_of(p, dout), dout, PRECISION)
        p = tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        dv = add_product(dv, p.to(dout.dtype), dout, PRECISION)
    dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
    return dv, (p * (dp - delta)).to(q.dtype)


@triton.jit
def key_step(
    start, dk, dv, k, v, columns, hard_columns, limit, zero, keys, nq, nk, q_ptr, q_n, dout_ptr, dout_n, words_ptr,
    pairs_ptr,
    hard_ptr, cuts_ptr, tops_ptr, tops_q, mask_ptr, mask_q, mask_k, scale,
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, EDGE: tl.constexpr,
    SPARED: tl.constexpr, DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What one query tile adds to dK and dV; SPARED takes the rows that were left undropped, and no others."""
    queries = start + tl.arange(0, BM)
    q = load_tile(q_ptr, queries, q_n, nq, E, BE, EDGE)
    lse, delta = load_pairs(pairs_ptr, queries, nq, EDGE)
    words = queries
    if SPARED:
        words = load_words(words_ptr, queries, nq, INFINITY_BITS, EDGE)
        lse = tl.where(lse == INFINITY_BITS, words, INFINITY_BITS)
    rule = load_rule(queries, nq, nk, tops_ptr, tops_q, cuts_ptr, hard_ptr, MASK, HARD, EDGE)
    if DROP:
        words = load_words(words_ptr, queries, nq, 1, EDGE)
    dout = load_tile(dout_ptr, queries, dout_n, nq, EV, BEV, EDGE)
    dv, ds = score_gradients(
        dv, q, dout, k, v, lse[None, :], delta[None, :], words[None, :], columns, hard_columns, limit, zero, rule,
        queries, keys, nq, nk, mask_ptr, mask_q, mask_k, scale, EDGE, False, DROP, HARD, CAUSAL, MASK, PRECISION,
    )  # fmt: skip
    return add_product(dk, ds, q, PRECISION), dv


@triton.jit
def key_tile(
    first, group, q_ptr, q_h, q_n, k_ptr, k_n, v_ptr, v_n, dout_ptr, dout_h, dout_n, dk_ptr, dk_n, dv_ptr, dv_n,
    words_ptr, pairs_ptr, table_ptr, hard_ptr, cuts_ptr, tops_ptr, tops_h, tops_q,
    mask_ptr, mask_h, mask_q, mask_k, nq, nk, scale, scale_log2, penalties,
    EDGE_N: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, TAIL_M: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    PENALTY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile, summed over the query heads of its group."""
    keys = first + tl.arange(0, BN)
    k = load_tile(k_ptr, keys, k_n, nk, E, BE, EDGE_N)
    v = load_tile(v_ptr, keys, v_n, nk, EV, BEV, EDGE_N)
    if DROP:
        limit = tl.load(table_ptr + nk + 1)
        zero = tl.load(table_ptr + nk + 2)
        columns = load_words(table_ptr, keys, nk, 1, EDGE_N)
    else:
        limit = 0
        zero = 0
        columns = keys
    hard_columns = load_words(hard_ptr, keys, nk, 1, EDGE_N) if HARD != "none" else keys
    dk = tl.zeros((BN, BE), tl.float32)
    dv = tl.zeros((BN, BEV), tl.float32)
    begin = first // BM * BM if CAUSAL else 0
    whole = nq // BM * BM
    for _ in range(group):
        for start in tl.range(begin, whole, BM):
            dk, dv = key_step(
                start, dk, dv, k, v, columns, hard_columns, limit, zero, keys, nq, nk, q_ptr, q_n, dout_ptr, dout_n,
                words_ptr, pairs_ptr, hard_ptr, cuts_ptr, tops_ptr, tops_q, mask_ptr, mask_q, mask_k, scale_log2,
                E, BE, EV, BEV, BM, False, False, DROP, HARD, CAUSAL, MASK, PRECISION,
            )  # fmt: skip
        if whole < nq:
            dk, dv = key_step(
                whole, dk, dv, k, v, columns, hard_columns, limit, zero, keys, nq, nk, q_ptr, q_n, dout_ptr, dout_n,
                words_ptr, pairs_ptr, hard_ptr, cuts_ptr, tops_ptr, tops_q, mask_ptr, mask_q, mask_k, scale_log2,
                E, BE, EV, BEV, TAIL_M, True, False, DROP, HARD, CAUSAL, MASK, PRECISION,
            )  # fmt: skip
        q_ptr += q_h
        dout_ptr += dout_h
        if MASK != "last":  # of which all heads of a group have the same
            mask_ptr += mask_h
        tops_ptr += tops_h
        cuts_ptr += groups_of(nq) * FLAG_ROWS
        words_ptr += groups_of(nq) * FLAG_ROWS
        pairs_ptr += groups_of(nq) * FLAG_ROWS
    if MASK == "last":
        there = (keys < without_last(nk, mask_ptr))[:, None]
        dk = tl.where(there, dk, 0.0)
        dv = tl.where(there, dv, 0.0)
    dk = add_logit_penalty(dk * scale, k, penalties, 1, E, BE, PRECISION, PENALTY, BIAS)
    dv = add_value_penalty(dv, v_ptr, keys, v_n, nk, penalties, EV, BEV, PENALTY, BIAS)
    store_tile(dk_ptr, dk, keys, dk_n, nk, E, BE, EDGE_N)
    store_tile(dv_ptr, dv, keys, dv_n, nk, EV, BEV, EDGE_N)


@triton.jit
def query_step(
    start, ahead, dq, columns, hard_columns, q, dout, lse, delta, words, limits, zero, rule, queries, nq, nk,
    k_ptr, k_n, v_ptr, v_n, table_ptr, hard_ptr, mask_ptr, mask_q, mask_k, scale,
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one key tile adds to dQ; also loads the column words of the tile at `ahead`, which comes next."""
    keys = start + tl.arange(0, BN)
    k = load_tile(k_ptr, keys, k_n, nk, E, BE, EDGE)
    v = load_tile(v_ptr, keys, v_n, nk, EV, BEV, EDGE)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    logits = to_logits(scores, scale, rule, queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k, MASK)
    if HARD != "none":
        # −inf whatever the fill: a logit that was set to 0 is a constant, and has no gradient.
        logits = hit_logits(
            logits, rule, hard_columns[None, :], queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k,
            same_way(HARD, "neg_inf"), not EDGE, MASK,
        )  # fmt: skip
        hard_columns = load_words(hard_ptr, ahead + tl.arange(0, BN), nk, 1, EDGE)
    p = tl.exp2(logits - lse[:, None])
    p = restrict(p, 0.0, queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k, EDGE, CAUSAL, MASK)
    if DROP:
        p = drop(p, words[:, None], columns[None, :], limits[:, None], zero, not EDGE)
        columns = load_words(table_ptr, ahead + tl.arange(0, BN), nk, 1, EDGE)
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    return add_product(dq, ds.to(k.dtype), k, PRECISION), columns, hard_columns


@triton.jit
def query_tile(
    first, q_ptr, q_n, k_ptr, k_n, v_ptr, v_n, dout_ptr, dout_n, dq_ptr, dq_n,
    words_ptr, pairs_ptr, table_ptr, hard_ptr, cuts_ptr, tops_ptr, tops_q, mask_ptr, mask_q, mask_k,
    nq, nk, scale, scale_log2, penalties,
    EDGE_M: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TAIL_N: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    PENALTY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile."""
    queries = first + tl.arange(0, BM)
    q = load_tile(q_ptr, queries, q_n, nq, E, BE, EDGE_M)
    dout = load_tile(dout_ptr, queries, dout_n, nq, EV, BEV, EDGE_M)
    lse, delta = load_pairs(pairs_ptr, queries, nq, EDGE_M)
    columns = tl.arange(0, BN)
    hard_columns = load_words(hard_ptr, columns, nk, 1, True) if HARD != "none" else columns
    if DROP:
        words = load_words(words_ptr, queries, nq, INFINITY_BITS, EDGE_M)
        spared = lse == INFINITY_BITS
        lse = tl.where(spared, words, lse)
        limits = tl.where(spared, -2147483648, tl.load(table_ptr + nk + 1))
        zero = tl.load(table_ptr + nk + 2)
        columns = load_words(table_ptr, columns, nk, 1, True)
    else:
        words = queries
        limits = queries
        zero = 0
    lse = lse.to(tl.float32, bitcast=True)
    rule = load_rule(queries, nq, nk, tops_ptr, tops_q, cuts_ptr, hard_ptr, MASK, HARD, EDGE_M)
    rule = expand_rule(rule, 1)
    end = tl.minimum(nk, first + BM) if CAUSAL else nk
    whole = end // BN * BN
    if MASK == "last":
        whole = (end - 1) // BN * BN
        nk = without_last(nk, mask_ptr)
    dq = tl.zeros((BM, BE), tl.float32)
    for start in tl.range(0, whole, BN):
        dq, columns, hard_columns = query_step(
            start, tl.minimum(start + BN, whole - BN), dq, columns, hard_columns, q, dout, lse, delta, words, limits,
            zero, rule, queries, nq, nk, k_ptr, k_n, v_ptr, v_n, table_ptr, hard_ptr, mask_ptr, mask_q, mask_k,
            scale_log2,
            E, BE, EV, BEV, BN, False, DROP, HARD, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    if whole < end:
        tail = whole + tl.arange(0, TAIL_N)
        hard_tail = load_words(hard_ptr, tail, nk, 1, True) if HARD != "none" else tail
        tail = load_words(table_ptr, tail, nk, 1, True) if DROP else tail
        dq, tail, hard_tail = query_step(
            whole, whole, dq, tail, hard_tail, q, dout, lse, delta, words, limits, zero, rule, queries,
            nq, nk, k_ptr, k_n, v_ptr, v_n, table_ptr, hard_ptr, mask_ptr, mask_q, mask_k, scale_log2,
            E, BE, EV, BEV, TAIL_N, True, DROP, HARD, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    dq = add_logit_penalty(dq * scale, q, penalties, 0, E, BE, PRECISION, PENALTY, BIAS)
    store_tile(dq_ptr, dq, queries, dq_n, nq, E, BE, EDGE_M)


@triton.jit
def backward_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr, words_ptr, pairs_ptr, table_ptr, hard_ptr, cuts_ptr,
    tops_ptr, mask_ptr, factors_ptr, bias_ptr, grams_ptr, shifts_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n, dq_b, dq_h, dq_n,
    dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, mask_b, mask_h, mask_q, mask_k,
    tops_b, tops_h, tops_q, heads, group, nq, nk, scale, scale_log2,
    NQ: tl.constexpr, NK: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr,
    KEY_N: tl.constexpr, KEY_M: tl.constexpr, KEY_TAIL_N: tl.constexpr, KEY_TAIL_M: tl.constexpr,
    QUERY_M: tl.constexpr, QUERY_N: tl.constexpr, QUERY_TAIL_M: tl.constexpr, QUERY_TAIL_N: tl.constexpr,
    GROUP: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    PENALTY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Grid: sample × key head × (key tiles, then the query tiles of the group's heads), tiles fastest."""
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
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    penalties = penalties_of_head(factors_ptr, bias_ptr, grams_ptr, shifts_ptr, b, h, heads, E)
    if tile < key_tiles:
        first = tile * KEY_N
        head = b * heads + h * group
        q_ptr += b * q_b + h * group * q_h
        dout_ptr += b * dout_b + h * group * dout_h
        dk_ptr += b * dk_b + h * dk_h
        dv_ptr += b * dv_b + h * dv_h
        mask_ptr += b * mask_b + h * group * mask_h
        tops_ptr += b * tops_b + h * group * tops_h
        cuts_ptr += head * groups_of(nq) * FLAG_ROWS
        words_ptr += head * groups_of(nq) * FLAG_ROWS
        pairs_ptr += head * groups_of(nq) * FLAG_ROWS
        if (nk % KEY_N == 0) | (first + KEY_N <= nk):
            key_tile(
                first, group, q_ptr, q_h, q_n, k_ptr, k_n, v_ptr, v_n, dout_ptr, dout_h, dout_n, dk_ptr, dk_n,
                dv_ptr, dv_n, words_ptr, pairs_ptr, table_ptr, hard_ptr, cuts_ptr, tops_ptr, tops_h, tops_q,
                mask_ptr, mask_h, mask_q, mask_k, nq, nk, scale, scale_log2, penalties,
                False, E, BE, EV, BEV, KEY_N, KEY_M, KEY_TAIL_M, DROP, hard, CAUSAL, MASK, PRECISION,
                PENALTY, BIAS,
            )  # fmt: skip
        else:
            key_tile(
                first, group, q_ptr, q_h, q_n, k_ptr, k_n, v_ptr, v_n, dout_ptr, dout_h, dout_n, dk_ptr, dk_n,
                dv_ptr, dv_n, words_ptr, pairs_ptr, table_ptr, hard_ptr, cuts_ptr, tops_ptr, tops_h, tops_q,
                mask_ptr, mask_h, mask_q, mask_k, nq, nk, scale, scale_log2, penalties,
                True, E, BE, EV, BEV, KEY_TAIL_N, KEY_M, KEY_TAIL_M, DROP, hard, CAUSAL, MASK, PRECISION,
                PENALTY, BIAS,
            )  # fmt: skip
    else:
        tile -= key_tiles
        query_head = h * group + tile // query_tiles
        first = (tile % query_tiles) * QUERY_M
        head = b * heads + query_head
        q_ptr += b * q_b + query_head * q_h
        dout_ptr += b * dout_b + query_head * dout_h
        dq_ptr += b * dq_b + query_head * dq_h
        mask_ptr += b * mask_b + query_head * mask_h
        tops_ptr += b * tops_b + query_head * tops_h
        cuts_ptr += head * groups_of(nq) * FLAG_ROWS
        words_ptr += head * groups_of(nq) * FLAG_ROWS
        pairs_ptr += head * groups_of(nq) * FLAG_ROWS
        if (nq % QUERY_M == 0) | (first + QUERY_M <= nq):
            query_tile(
                first, q_ptr, q_n, k_ptr, k_n, v_ptr, v_n, dout_ptr, dout_n, dq_ptr, dq_n, words_ptr,
                pairs_ptr, table_ptr, hard_ptr, cuts_ptr, tops_ptr, tops_q, mask_ptr, mask_q, mask_k,
                nq, nk, scale, scale_log2, penalties,
                False, E, BE, EV, BEV, QUERY_M, QUERY_N, QUERY_TAIL_N, DROP, hard, CAUSAL, MASK, PRECISION,
                PENALTY, BIAS,
            )  # fmt: skip
        else:
            query_tile(
                first, q_ptr, q_n, k_ptr, k_n, v_ptr, v_n, dout_ptr, dout_n, dq_ptr, dq_n, words_ptr,
                pairs_ptr, table_ptr, hard_ptr, cuts_ptr, tops_ptr, tops_q, mask_ptr, mask_q, mask_k,
                nq, nk, scale, scale_log2, penalties,
                True, E, BE, EV, BEV, QUERY_TAIL_M, QUERY_N, QUERY_TAIL_N, DROP, hard, CAUSAL, MASK, PRECISION,
                PENALTY, BIAS,
            )  # fmt: skip
