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
from attemper.kernels.attention.forward import online_step
from attemper.kernels.common.stream import row_words
from attemper.kernels.common.tiles import (
    FLAG_ROWS,
    INFINITY_BITS,
    expand_rule,
    groups_of,
    load_rule,
    load_tile,
    load_words,
    store_tile,
    without_last,
)


@triton.jit
def repair_rows(
    first, head, q_ptr, q_n, k_ptr, k_n, v_ptr, v_n, out_ptr, out_n, lse_ptr, words_ptr, flag_ptr, table_ptr,
    hard_ptr, cuts_ptr, tops_ptr, tops_q, mask_ptr, mask_q, mask_k, nq, nk, scale,
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute FLAG_ROWS rows again with a running maximum, and once more where a row has lost all of its keys."""
    queries = first + tl.arange(0, FLAG_ROWS)
    q = load_tile(q_ptr, queries, q_n, nq, E, BE, True)
    if DROP:
        limit = tl.load(table_ptr + nk + 1)
        words = row_words(tl.load(table_ptr + nk), head, queries)
    else:
        limit = 0
        words = queries
    rule = load_rule(queries, nq, nk, tops_ptr, tops_q, cuts_ptr, hard_ptr, MASK, HARD)
    rule = expand_rule(rule, 1)
    if MASK == "last":
        nk = without_last(nk, mask_ptr)
    end = tl.minimum(nk, first + FLAG_ROWS) if CAUSAL else nk
    spared = tl.zeros((FLAG_ROWS,), tl.int32)
    acc = tl.zeros((FLAG_ROWS, BEV), tl.float32)
    total = tl.zeros((FLAG_ROWS,), tl.float32)
    top = tl.zeros((FLAG_ROWS,), tl.float32)
    again = first >= 0
    for attempt in range(2):  # noqa: B007
        if again:
            acc = tl.zeros((FLAG_ROWS, BEV), tl.float32)
            total = tl.zeros((FLAG_ROWS,), tl.float32)
            seen = tl.zeros((FLAG_ROWS,), tl.float32)
            top = tl.full((FLAG_ROWS,), -float("inf"), tl.float32)
            for start in tl.range(0, end, BN):
                acc, total, seen, top = online_step(
                    start, acc, total, seen, top, q, spared, words, limit, rule, queries, nq, nk, k_ptr, k_n, v_ptr,
                    v_n, table_ptr, hard_ptr, mask_ptr, mask_q, mask_k, scale, E, BE, EV, BEV, BN, True, DROP, True,
                    HARD, CAUSAL, MASK, PRECISION,
                )  # fmt: skip
            if DROP and MASK == "bias":
                lost = (seen == 0.0) & (queries < nq)
            else:
                lost = (top == -float("inf")) & (queries < nq)
            spared = tl.where(lost, 1, spared)
            again = tl.max(lost.to(tl.int32), 0) > 0 if DROP else first < 0

    empty = total == 0.0
    store_tile(out_ptr, acc / tl.where(empty, 1.0, total)[:, None], queries, out_n, nq, EV, BEV, True)
    lse = tl.where(empty, float("inf"), top + tl.log2(total)).to(tl.int32, bitcast=True)
    if DROP:
        spared = tl.where(empty, 0, spared)
        tl.store(words_ptr + queries, tl.where(empty | (spared > 0), lse, words), mask=queries < nq)
        lse = tl.where(spared > 0, INFINITY_BITS, lse)
        tl.store(flag_ptr, tl.max(spared, 0))
    tl.store(lse_ptr + queries, lse, mask=queries < nq)


@triton.jit
def repair_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, words_ptr, flags_ptr, table_ptr, hard_ptr, cuts_ptr, tops_ptr, mask_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, out_b, out_h, out_n, mask_b, mask_h, mask_q, mask_k,
    tops_b, tops_h, tops_q, heads, group, nq, nk, scale, flags,
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: spans of SPAN flags."""
    begin = tl.program_id(0) * SPAN
    at = begin + tl.arange(0, SPAN)
    if tl.max(tl.load(flags_ptr + at, mask=at < flags, other=0), 0) > 0:
        groups = groups_of(nq)
        for spot in range(begin, tl.minimum(begin + SPAN, flags)):
            if tl.load(flags_ptr + spot) > 0:
                head = spot // groups
                b = (head // heads).to(tl.int64)
                h = (head % heads).to(tl.int64)
                repair_rows(
                    (spot % groups) * FLAG_ROWS, head, q_ptr + b * q_b + h * q_h, q_n,
                    k_ptr + b * k_b + (h // group) * k_h, k_n, v_ptr + b * v_b + (h // group) * v_h, v_n,
                    out_ptr + b * out_b + h * out_h, out_n, lse_ptr + head.to(tl.int64) * groups * FLAG_ROWS,
                    words_ptr + head.to(tl.int64) * groups * FLAG_ROWS, flags_ptr + spot, table_ptr,
                    hard_ptr, cuts_ptr + head.to(tl.int64) * groups * FLAG_ROWS,
                    tops_ptr + b * tops_b + h * tops_h, tops_q,
                    mask_ptr + b * mask_b + h * mask_h, mask_q, mask_k, nq, nk, scale,
                    E, BE, EV, BEV, BN, DROP, HARD, CAUSAL, MASK, PRECISION,
                )  # fmt: skip


@triton.jit
def spared_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, words_ptr, flags_ptr, pairs_ptr, hard_ptr, cuts_ptr, tops_ptr,
    mask_ptr, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dout_b, dout_h, dout_n,
    dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, mask_b, mask_h, mask_q, mask_k, tops_b, tops_h, tops_q,
    heads, group, nq, nk, scale, scale_log2, share, flags,
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr,
    HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dK and dV what the rows that were left undropped contribute.

    Grid: shares of `share` flags, out of `flags`. A share is a whole number of key heads, so one program owns each.
    """
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
                    for start in range(0, nk, BN):
                        keys = start + tl.arange(0, BN)
                        k = load_tile(k_ptr + b * k_b + (h // group) * k_h, keys, k_n, nk, E, BE, True)
                        v = load_tile(v_ptr + b * v_b + (h // group) * v_h, keys, v_n, nk, EV, BEV, True)
                        hard_columns = load_words(hard_ptr, keys, nk, 1, True) if HARD != "none" else keys
                        dk_at = dk_ptr + b * dk_b + (h // group) * dk_h
                        dv_at = dv_ptr + b * dv_b + (h // group) * dv_h
                        dk, dv = key_step(
                            first, tl.zeros((BN, BE), tl.float32), tl.zeros((BN, BEV), tl.float32), k, v, keys,
                            hard_columns, 0, 0, keys, nq, nk, q_ptr + b * q_b + h * q_h, q_n,
                            dout_ptr + b * dout_b + h * dout_h, dout_n,
                            words_ptr + head * groups * FLAG_ROWS, pairs_ptr + head * groups * FLAG_ROWS,
                            hard_ptr, cuts_ptr + head * groups * FLAG_ROWS,
                            tops_ptr + b * tops_b + h * tops_h, tops_q,
                            mask_ptr + b * mask_b + h * mask_h, mask_q, mask_k, scale_log2,
                            E, BE, EV, BEV, FLAG_ROWS, True, True, False, HARD, CAUSAL, MASK, PRECISION,
                        )  # fmt: skip
                        dk = dk * scale + load_tile(dk_at, keys, dk_n, nk, E, BE, True)
                        dv = dv + load_tile(dv_at, keys, dv_n, nk, EV, BEV, True)
                        store_tile(dk_at, dk, keys, dk_n, nk, E, BE, True)
                        store_tile(dv_at, dv, keys, dv_n, nk, EV, BEV, True)
                        tl.debug_barrier()
