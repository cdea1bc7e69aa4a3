"""The forward kernel: one program per query tile, keys swept in tiles, softmax without a running maximum.

A running maximum costs a comparison per score, a reduction and a rescaling of the accumulator per tile. Here (FIXED)
the offset of a row is set beforehand, from its scores with the first keys. The weights are the same, as long as the
row sum stays in the range where neither it nor the weights overflow or vanish. Rows that leave that range, and rows
that lost all of their keys, are flagged, a flag per FLAG_ROWS rows, and computed again by `repair.py`; where nothing is
dropped or masked, by the same program (AT_ONCE). In float16 the range is too narrow for this, so there the maximum runs
along.

Beside the output, a row stores what the backward pass needs: its log-sum-exp (base 2, as int32 bits) and its row word.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.attention.hits import hard_way, hit_logits
from attemper.kernels.common.stream import row_words
from attemper.kernels.common.tiles import (
    FLAG_ROWS,
    INFINITY_BITS,
    add_product,
    drop,
    expand_rule,
    groups_of,
    load_bias,
    load_rule,
    load_tile,
    load_words,
    restrict,
    store_tile,
    to_logits,
    without_last,
)

PROBE = tl.constexpr(16)  # keys that set a row's offset
LOWEST = tl.constexpr(2.0**-60)
HIGHEST = tl.constexpr(2.0**60)


@triton.jit
def in_reach(
    logits, words, columns, limit, rule, queries, keys, nq, nk, mask_ptr, mask_q, mask_k,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Which elements of a tile are kept and not pushed out of reach by an additive mask; a row without any is lost."""
    bias = load_bias(queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k)
    logits = restrict(
        logits, -float("inf"), queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k, EDGE, CAUSAL, MASK
    )
    return (logits > -float("inf")) & (bias > rule[0]) & (words[:, None] * columns[None, :] >= limit)


@triton.jit
def fixed_step(
    start, ahead, acc, total, seen, columns, hard_columns, q, offset, words, limit, zero, rule, queries, nq, nk,
    k_ptr, k_n, v_ptr, v_n, table_ptr, hard_ptr, mask_ptr, mask_q, mask_k, scale,
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile under a fixed offset; also loads the column words of the tile at `ahead`, which comes next."""
    keys = start + tl.arange(0, BN)
    k = load_tile(k_ptr, keys, k_n, nk, E, BE, EDGE)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    logits = to_logits(
        scores, scale, rule, queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k, MASK
    )  # fmt: skip
    if HARD != "none":
        logits = hit_logits(
            logits, rule, hard_columns[None, :], queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k,
            HARD, not EDGE, MASK,
        )  # fmt: skip
        hard_columns = load_words(hard_ptr, ahead + tl.arange(0, BN), nk, 1, EDGE)
    p = tl.exp2(logits - offset[:, None])
    p = restrict(p, 0.0, queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k, EDGE, CAUSAL, MASK)
    if MASK == "keys" or MASK == "full":
        one = scores * 0.0 + 1.0
        one = restrict(one, 0.0, queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k, EDGE, CAUSAL, MASK)
        seen += tl.sum(one, 1)
    if DROP and MASK == "bias":
        left = in_reach(
            logits, words, columns, limit, rule, queries, keys, nq, nk, mask_ptr, mask_q, mask_k, EDGE, CAUSAL, MASK
        )  # fmt: skip
        seen += tl.sum(left.to(tl.float32), 1)
    if DROP:
        p = drop(p, words[:, None], columns[None, :], limit, zero, not EDGE)
        columns = load_words(table_ptr, ahead + tl.arange(0, BN), nk, 1, EDGE)
    total += tl.sum(p, 1)
    v = load_tile(v_ptr, keys, v_n, nk, EV, BEV, EDGE)
    acc = add_product(acc, p.to(v.dtype), v, PRECISION)
    return acc, total, seen, columns, hard_columns


@triton.jit
def online_step(
    start, acc, total, seen, top, q, spared, words, limit, rule, queries, nq, nk, k_ptr, k_n, v_ptr, v_n, table_ptr,
    hard_ptr, mask_ptr, mask_q, mask_k, scale,
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr,
    DROP: tl.constexpr, SPARE: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile with a running maximum. Where SPARE, rows with `spared` = 1 drop nothing."""
    keys = start + tl.arange(0, BN)
    k = load_tile(k_ptr, keys, k_n, nk, E, BE, EDGE)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = to_logits(scores, scale, rule, queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k, MASK)
    if HARD != "none":
        hard_columns = load_words(hard_ptr, keys, nk, 1, EDGE)
        hit = hit_logits(
            scores, rule, hard_columns[None, :], queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k,
            HARD, not EDGE, MASK,
        )  # fmt: skip
    scores = restrict(
        scores, -float("inf"), queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k, EDGE, CAUSAL, MASK
    )
    if MASK == "keys" or MASK == "full":
        seen += tl.sum((scores > -float("inf")).to(tl.float32), 1)
    if HARD != "none":
        scores = restrict(
            hit, -float("inf"), queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k, EDGE, CAUSAL, MASK
        )  # fmt: skip
    if DROP:
        columns = load_words(table_ptr, keys, nk, 1, EDGE)
        keep = words[:, None] * columns[None, :] >= limit
        if SPARE:
            keep = keep | (spared[:, None] > 0)
        scores = tl.where(keep, scores, -float("inf"))
        if MASK == "bias":
            bias = load_bias(queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k)
            seen += tl.sum(((scores > -float("inf")) & (bias > rule[0])).to(tl.float32), 1)
    higher = tl.maximum(top, tl.max(scores, 1))
    offset = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(scores - offset[:, None])
    shrink = tl.exp2(top - offset)
    total = total * shrink + tl.sum(p, 1)
    v = load_tile(v_ptr, keys, v_n, nk, EV, BEV, EDGE)
    acc = add_product(acc * shrink[:, None], p.to(v.dtype), v, PRECISION)
    return acc, total, seen, higher


@triton.jit
def forward_tile(
    first, head, q_ptr, q_n, k_ptr, k_n, v_ptr, v_n, out_ptr, out_n, lse_ptr, words_ptr, flags_ptr, table_ptr,
    hard_ptr, cuts_ptr, tops_ptr, tops_q, mask_ptr, mask_q, mask_k, nq, nk, scale, EDGE_M: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TAIL_N: tl.constexpr, FIXED: tl.constexpr, AT_ONCE: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything of one query tile. The pointers stand at the tile's sample and head."""
    queries = first + tl.arange(0, BM)
    q = load_tile(q_ptr, queries, q_n, nq, E, BE, EDGE_M)
    if DROP:
        limit = tl.load(table_ptr + nk + 1)
        zero = tl.load(table_ptr + nk + 2)
        words = row_words(tl.load(table_ptr + nk), head, queries)
    else:
        limit = 0
        zero = 0
        words = queries
    rule = load_rule(queries, nq, nk, tops_ptr, tops_q, cuts_ptr, hard_ptr, MASK, HARD, EDGE_M)
    rule = expand_rule(rule, 1)
    end = tl.minimum(nk, first + BM) if CAUSAL else nk
    whole = end // BN * BN
    if MASK == "last":
        whole = (end - 1) // BN * BN
        nk = without_last(nk, mask_ptr)
    acc = tl.zeros((BM, BEV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    seen = tl.zeros((BM,), tl.float32)
    if FIXED:
        probed = tl.arange(0, PROBE)
        probe = load_tile(k_ptr, probed, k_n, nk, E, BE, True)
        scores = tl.dot(q, tl.trans(probe), input_precision=PRECISION)
        scores = to_logits(
            scores, scale, rule, queries[:, None], probed[None, :], nq, nk, mask_ptr, mask_q, mask_k, MASK
        )  # fmt: skip
        scores = restrict(
            scores, -float("inf"), queries[:, None], probed[None, :], nq, nk, mask_ptr, mask_q, mask_k,
            True, CAUSAL, MASK,
        )  # fmt: skip
        top = tl.max(scores, 1)
        top = tl.where(top == -float("inf"), 0.0, top)
        columns = tl.arange(0, BN)
        hard_columns = columns
        if HARD != "none":
            hard_columns = load_words(hard_ptr, columns, nk, 1, True)
        if DROP:
            columns = load_words(table_ptr, columns, nk, 1, True)
        for start in tl.range(0, whole, BN):
            acc, total, seen, columns, hard_columns = fixed_step(
                start, tl.minimum(start + BN, whole - BN), acc, total, seen, columns, hard_columns, q, top, words,
                limit, zero, rule, queries, nq, nk, k_ptr, k_n, v_ptr, v_n, table_ptr, hard_ptr, mask_ptr, mask_q,
                mask_k, scale,
                E, BE, EV, BEV, BN, False, DROP, HARD, CAUSAL, MASK, PRECISION,
            )  # fmt: skip
        if whole < end:
            tail_columns = whole + tl.arange(0, TAIL_N)
            hard_tail = tail_columns
            if HARD != "none":
                hard_tail = load_words(hard_ptr, tail_columns, nk, 1, True)
            if DROP:
                tail_columns = load_words(table_ptr, tail_columns, nk, 1, True)
            acc, total, seen, tail_columns, hard_tail = fixed_step(
                whole, whole, acc, total, seen, tail_columns, hard_tail, q, top, words, limit, zero, rule, queries,
                nq, nk, k_ptr, k_n, v_ptr, v_n, table_ptr, hard_ptr, mask_ptr, mask_q, mask_k, scale,
                E, BE, EV, BEV, TAIL_N, True, DROP, HARD, CAUSAL, MASK, PRECISION,
            )  # fmt: skip
        good = (total > LOWEST) & (total < HIGHEST)  # false for NaN
        if AT_ONCE and tl.min(good.to(tl.int32), 0) == 0:
            acc = tl.zeros((BM, BEV), tl.float32)
            total = tl.zeros((BM,), tl.float32)
            top = tl.full((BM,), -float("inf"), tl.float32)
            for start in tl.range(0, nk, TAIL_N, num_stages=1):
                acc, total, seen, top = online_step(
                    start, acc, total, seen, top, q, words, words, limit, rule, queries, nq, nk, k_ptr, k_n, v_ptr, v_n,
                    table_ptr, hard_ptr, mask_ptr, mask_q, mask_k, scale, E, BE, EV, BEV, TAIL_N, True, False, False,
                    HARD, CAUSAL, MASK, PRECISION,
                )  # fmt: skip
    else:
        top = tl.full((BM,), -float("inf"), tl.float32)
        for start in tl.range(0, whole, BN):
            acc, total, seen, top = online_step(
                start, acc, total, seen, top, q, words, words, limit, rule, queries, nq, nk, k_ptr, k_n, v_ptr, v_n,
                table_ptr, hard_ptr, mask_ptr, mask_q, mask_k, scale, E, BE, EV, BEV, BN, False, DROP, False, HARD,
                CAUSAL, MASK, PRECISION,
            )  # fmt: skip
        if whole < end:
            acc, total, seen, top = online_step(
                whole, acc, total, seen, top, q, words, words, limit, rule, queries, nq, nk, k_ptr, k_n, v_ptr, v_n,
                table_ptr, hard_ptr, mask_ptr, mask_q, mask_k, scale, E, BE, EV, BEV, TAIL_N, True, DROP, False, HARD,
                CAUSAL, MASK, PRECISION,
            )  # fmt: skip
        good = top > -float("inf")
    if MASK == "keys" or MASK == "full":
        good = good | (seen == 0.0)  # no key allowed: zeros, as they are
    if DROP and MASK == "bias":
        good = good & (seen > 0.0)
    if EDGE_M:
        good = good | (queries >= nq)

    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    store_tile(out_ptr, out, queries, out_n, nq, EV, BEV, EDGE_M)
    lse = tl.where(empty, float("inf"), top + tl.log2(total)).to(tl.int32, bitcast=True)
    if DROP:
        words = tl.where(empty, lse, words)
    if EDGE_M:
        stored = queries < groups_of(nq) * FLAG_ROWS
        tl.store(lse_ptr + queries, tl.where(queries < nq, lse, INFINITY_BITS), mask=stored)
        if DROP:
            tl.store(words_ptr + queries, tl.where(queries < nq, words, INFINITY_BITS), mask=stored)
    else:
        tl.store(lse_ptr + queries, lse)
        if DROP:
            tl.store(words_ptr + queries, words)
    bad = tl.zeros((BM // FLAG_ROWS,), tl.int32)
    if not AT_ONCE:
        bad = tl.max(tl.reshape((~good).to(tl.int32), (BM // FLAG_ROWS, FLAG_ROWS)), 1)
    groups = first // FLAG_ROWS + tl.arange(0, BM // FLAG_ROWS)
    tl.store(flags_ptr + groups, bad, mask=groups * FLAG_ROWS < nq)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, words_ptr, flags_ptr, table_ptr, hard_ptr, cuts_ptr, tops_ptr, mask_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, out_b, out_h, out_n, mask_b, mask_h, mask_q, mask_k,
    tops_b, tops_h, tops_q, heads, group, nq, nk, scale,
    NQ: tl.constexpr, NK: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TAIL_M: tl.constexpr, TAIL_N: tl.constexpr, FIXED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: sample × head × query tile, tiles fastest. NQ and NK are 0 where sizes are no compile-time constants."""
    if NQ > 0:
        nq = NQ
        nk = NK
    hard: tl.constexpr = hard_way(HARD, NK)
    tiles = (nq + BM - 1) // BM
    pid = tl.program_id(0)
    head = pid // tiles
    first = (pid % tiles) * BM
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + (h // group) * k_h
    v_ptr += b * v_b + (h // group) * v_h
    out_ptr += b * out_b + h * out_h
    mask_ptr += b * mask_b + h * mask_h
    tops_ptr += b * tops_b + h * tops_h
    groups = head.to(tl.int64) * groups_of(nq)
    lse_ptr += groups * FLAG_ROWS
    words_ptr += groups * FLAG_ROWS
    flags_ptr += groups
    cuts_ptr += groups * FLAG_ROWS
    if (nq % BM == 0) | (first + BM <= nq):
        forward_tile(
            first, head, q_ptr, q_n, k_ptr, k_n, v_ptr, v_n, out_ptr, out_n, lse_ptr, words_ptr, flags_ptr, table_ptr,
            hard_ptr, cuts_ptr, tops_ptr, tops_q, mask_ptr, mask_q, mask_k, nq, nk, scale,
            False, E, BE, EV, BEV, BM, BN, TAIL_N, FIXED, AT_ONCE, DROP, hard, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    else:
        forward_tile(
            first, head, q_ptr, q_n, k_ptr, k_n, v_ptr, v_n, out_ptr, out_n, lse_ptr, words_ptr, flags_ptr, table_ptr,
            hard_ptr, cuts_ptr, tops_ptr, tops_q, mask_ptr, mask_q, mask_k, nq, nk, scale,
            True, E, BE, EV, BEV, TAIL_M, BN, TAIL_N, FIXED, AT_ONCE, DROP, hard, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
