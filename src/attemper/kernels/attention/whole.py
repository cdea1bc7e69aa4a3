"""The backward kernel for short rows: one program has a whole head on chip.

`backward.py` computes scores twice, and reads the sum that softmax's gradient subtracts from memory, since other
programs need it too. Where all queries and keys of a head are two tiles at most, one program does everything once. Its
scores have keys down and queries across; for dQ alone they are transposed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.attention.backward import score_gradients
from attemper.kernels.attention.penalty_gradients import add_logit_penalty, add_value_penalty, penalties_of_head
from attemper.kernels.common.tiles import (
    FLAG_ROWS,
    INFINITY_BITS,
    add_product,
    groups_of,
    load_rule,
    load_tile,
    load_words,
    store_tile,
    without_last,
)


@triton.jit
def load_queries(
    first, q_ptr, q_n, dout_ptr, dout_n, out_ptr, out_n, lse_ptr, words_ptr, hard_ptr, cuts_ptr, tops_ptr,
    tops_q, nq, nk, E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr,
    EDGE: tl.constexpr, DROP: tl.constexpr, HARD: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """What is known of a query tile: (queries, Q, dO, log-sum-exp, Σ dO·O, row words, rule)."""
    queries = first + tl.arange(0, BM)
    q = load_tile(q_ptr, queries, q_n, nq, E, BE, EDGE)
    dout = load_tile(dout_ptr, queries, dout_n, nq, EV, BEV, EDGE)
    out = load_tile(out_ptr, queries, out_n, nq, EV, BEV, EDGE)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    lse = load_words(lse_ptr, queries, nq, INFINITY_BITS, EDGE)
    words = load_words(words_ptr, queries, nq, INFINITY_BITS, EDGE) if DROP else queries
    rule = load_rule(queries, nq, nk, tops_ptr, tops_q, cuts_ptr, hard_ptr, MASK, HARD, EDGE)
    return queries, q, dout, lse, delta, words, rule


@triton.jit
def load_keys(
    first, k_ptr, k_n, v_ptr, v_n, table_ptr, hard_ptr, nk,
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """What is known of a key tile: (keys, K, V, column words of dropping, those of hard masking)."""
    keys = first + tl.arange(0, BN)
    k = load_tile(k_ptr, keys, k_n, nk, E, BE, EDGE)
    v = load_tile(v_ptr, keys, v_n, nk, EV, BEV, EDGE)
    columns = load_words(table_ptr, keys, nk, 1, EDGE) if DROP else keys
    hard_columns = load_words(hard_ptr, keys, nk, 1, EDGE) if HARD != "none" else keys
    return keys, k, v, columns, hard_columns


@triton.jit
def pair_step(
    dq, dk, dv, row, column, limit, zero, nq, nk, mask_ptr, mask_q, mask_k, scale,
    EDGE_M: tl.constexpr, EDGE_N: tl.constexpr, DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a query tile (from `load_queries`) and a key tile (from `load_keys`) add to each other's gradients."""
    queries, q, dout, lse, delta, words, rule = row
    keys, k, v, columns, hard_columns = column
    dv, ds = score_gradients(
        dv, q, dout, k, v, lse[None, :], delta[None, :], words[None, :], columns, hard_columns, limit, zero, rule,
        queries, keys, nq, nk, mask_ptr, mask_q, mask_k, scale,
        EDGE_M or EDGE_N, EDGE_N, DROP, HARD, CAUSAL, MASK, PRECISION,
    )  # fmt: skip
    return add_product(dq, tl.trans(ds), k, PRECISION), add_product(dk, ds, q, PRECISION), dv


@triton.jit
def add_spared(
    first, q_ptr, q_n, k_ptr, k_n, v_ptr, v_n, out_ptr, out_n, dout_ptr, dout_n, dq_ptr, dq_n, dk_ptr, dk_n,
    dv_ptr, dv_n, lse_ptr, words_ptr, hard_ptr, cuts_ptr, tops_ptr, tops_q, mask_ptr, mask_q, mask_k, nq, nk,
    scale, scale_log2, E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr,
    HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what FLAG_ROWS rows contribute of which some were left undropped, and counted as zero so far."""
    queries, q, dout, lse, delta, words, rule = load_queries(
        first, q_ptr, q_n, dout_ptr, dout_n, out_ptr, out_n, lse_ptr, words_ptr, hard_ptr, cuts_ptr, tops_ptr, tops_q,
        nq, nk, E, BE, EV, BEV, FLAG_ROWS, True, True, HARD, MASK,
    )  # fmt: skip
    lse = tl.where(lse == INFINITY_BITS, words, INFINITY_BITS)
    row = queries, q, dout, lse, delta, words, rule
    dq = tl.zeros((FLAG_ROWS, BE), tl.float32)
    for start in range(0, nk, BN):
        column = load_keys(
            start, k_ptr, k_n, v_ptr, v_n, hard_ptr, hard_ptr, nk, E, BE, EV, BEV, BN, True, False, HARD
        )  # fmt: skip
        dq, dk, dv = pair_step(
            dq, tl.zeros((BN, BE), tl.float32), tl.zeros((BN, BEV), tl.float32), row, column, 0, 0, nq, nk,
            mask_ptr, mask_q, mask_k, scale_log2, True, True, False, HARD, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
        keys = start + tl.arange(0, BN)
        dk = dk * scale + load_tile(dk_ptr, keys, dk_n, nk, E, BE, True)
        dv = dv + load_tile(dv_ptr, keys, dv_n, nk, EV, BEV, True)
        store_tile(dk_ptr, dk, keys, dk_n, nk, E, BE, True)
        store_tile(dv_ptr, dv, keys, dv_n, nk, EV, BEV, True)
    dq = dq * scale + load_tile(dq_ptr, queries, dq_n, nq, E, BE, True)
    store_tile(dq_ptr, dq, queries, dq_n, nq, E, BE, True)


@triton.jit
def whole_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, words_ptr, flags_ptr, table_ptr, hard_ptr,
    cuts_ptr, tops_ptr, mask_ptr, factors_ptr, bias_ptr, grams_ptr, shifts_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    out_b, out_h, out_n, dq_b, dq_h, dq_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, mask_b, mask_h, mask_q, mask_k,
    tops_b, tops_h, tops_q, heads, scale, scale_log2,
    NQ: tl.constexpr, NK: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr,
    BM: tl.constexpr, TAIL_M: tl.constexpr, BN: tl.constexpr, TAIL_N: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    PENALTY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Grid: sample × head. BM queries and BN keys are a tile, TAIL_M and TAIL_N what is left; 0: nothing is."""
    head = tl.program_id(0)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    out_ptr += b * out_b + h * out_h
    dout_ptr += b * dout_b + h * dout_h
    dq_ptr += b * dq_b + h * dq_h
    dk_ptr += b * dk_b + h * dk_h
    dv_ptr += b * dv_b + h * dv_h
    mask_ptr += b * mask_b + h * mask_h
    tops_ptr += b * tops_b + h * tops_h
    penalties = penalties_of_head(factors_ptr, bias_ptr, grams_ptr, shifts_ptr, b, h, heads, E)
    groups = groups_of(NQ)
    flags_ptr += head.to(tl.int64) * groups
    at = head.to(tl.int64) * groups * FLAG_ROWS
    lse_ptr += at
    words_ptr += at
    cuts_ptr += at
    nk = NK
    if MASK == "last":
        nk = without_last(NK, mask_ptr)
    limit = 0
    zero = 0
    if DROP:
        limit = tl.load(table_ptr + NK + 1)
        zero = tl.load(table_ptr + NK + 2)
    edge_m: tl.constexpr = BM > NQ
    edge_n: tl.constexpr = BN > NK or (MASK == "last" and TAIL_N == 0)
    queries = tl.arange(0, BM)
    keys = tl.arange(0, BN)

    row = load_queries(
        0, q_ptr, q_n, dout_ptr, dout_n, out_ptr, out_n, lse_ptr, words_ptr, hard_ptr, cuts_ptr, tops_ptr,
        tops_q, NQ, NK, E, BE, EV, BEV, BM, edge_m, DROP, HARD, MASK,
    )  # fmt: skip
    column = load_keys(
        0, k_ptr, k_n, v_ptr, v_n, table_ptr, hard_ptr, NK, E, BE, EV, BEV, BN, edge_n, DROP, HARD
    )  # fmt: skip
    dq, dk, dv = pair_step(
        tl.zeros((BM, BE), tl.float32), tl.zeros((BN, BE), tl.float32), tl.zeros((BN, BEV), tl.float32), row, column,
        limit, zero, NQ, nk, mask_ptr, mask_q, mask_k, scale_log2,
        edge_m, edge_n, DROP, HARD, CAUSAL, MASK, PRECISION,
    )  # fmt: skip
    if TAIL_M > 0:
        last_row = load_queries(
            BM, q_ptr, q_n, dout_ptr, dout_n, out_ptr, out_n, lse_ptr, words_ptr, hard_ptr, cuts_ptr,
            tops_ptr, tops_q, NQ, NK, E, BE, EV, BEV, TAIL_M, True, DROP, HARD, MASK,
        )  # fmt: skip
        last_dq, dk, dv = pair_step(
            tl.zeros((TAIL_M, BE), tl.float32), dk, dv, last_row, column,
            limit, zero, NQ, nk, mask_ptr, mask_q, mask_k, scale_log2,
            True, edge_n, DROP, HARD, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    dk = add_logit_penalty(dk * scale, column[1], penalties, 1, E, BE, PRECISION, PENALTY, BIAS)
    dv = add_value_penalty(dv, v_ptr, keys, v_n, NK, penalties, EV, BEV, PENALTY, BIAS)
    store_tile(dk_ptr, dk, keys, dk_n, NK, E, BE, edge_n)
    store_tile(dv_ptr, dv, keys, dv_n, NK, EV, BEV, edge_n)
    if TAIL_N > 0:
        last_column = load_keys(
            BN, k_ptr, k_n, v_ptr, v_n, table_ptr, hard_ptr, NK, E, BE, EV, BEV, TAIL_N, True, DROP, HARD
        )  # fmt: skip
        dq, dk, dv = pair_step(
            dq, tl.zeros((TAIL_N, BE), tl.float32), tl.zeros((TAIL_N, BEV), tl.float32), row, last_column,
            limit, zero, NQ, nk, mask_ptr, mask_q, mask_k, scale_log2,
            edge_m, True, DROP, HARD, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
        if TAIL_M > 0:
            last_dq, dk, dv = pair_step(
                last_dq, dk, dv, last_row, last_column, limit, zero, NQ, nk, mask_ptr, mask_q, mask_k, scale_log2,
                True, True, DROP, HARD, CAUSAL, MASK, PRECISION,
            )  # fmt: skip
        keys = BN + tl.arange(0, TAIL_N)
        dk = add_logit_penalty(dk * scale, last_column[1], penalties, 1, E, BE, PRECISION, PENALTY, BIAS)
        dv = add_value_penalty(dv, v_ptr, keys, v_n, NK, penalties, EV, BEV, PENALTY, BIAS)
        store_tile(dk_ptr, dk, keys, dk_n, NK, E, BE, True)
        store_tile(dv_ptr, dv, keys, dv_n, NK, EV, BEV, True)
    dq = add_logit_penalty(dq * scale, row[1], penalties, 0, E, BE, PRECISION, PENALTY, BIAS)
    store_tile(dq_ptr, dq, queries, dq_n, NQ, E, BE, edge_m)
    if TAIL_M > 0:
        queries = BM + tl.arange(0, TAIL_M)
        last_dq = add_logit_penalty(last_dq * scale, last_row[1], penalties, 0, E, BE, PRECISION, PENALTY, BIAS)
        store_tile(dq_ptr, last_dq, queries, dq_n, NQ, E, BE, True)
    if DROP:
        for group in range(groups):
            if tl.load(flags_ptr + group) > 0:
                tl.debug_barrier()  # what was stored above, or in the round before, is read again
                add_spared(
                    group * FLAG_ROWS, q_ptr, q_n, k_ptr, k_n, v_ptr, v_n, out_ptr, out_n, dout_ptr, dout_n,
                    dq_ptr, dq_n, dk_ptr, dk_n, dv_ptr, dv_n, lse_ptr, words_ptr, hard_ptr, cuts_ptr, tops_ptr, tops_q,
                    mask_ptr, mask_q, mask_k, NQ, nk, scale, scale_log2,
                    E, BE, EV, BEV, 32, HARD, CAUSAL, MASK, PRECISION,
                )  # fmt: skip
