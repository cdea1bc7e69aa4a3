"""Where the k largest logits of every row begin, for a small k: one look at every logit, seven instructions each.

Keys are swept in tiles, and every column of the tile keeps the DEPTH largest logits that it met, row by row. The k + 1
largest of a row are then drawn from these. That is exact unless one column held more of them than it has room for, or
some are equal. Both can be seen. A tile of rows in which it happened is left to `largest.cuts_kernel`, with the
smallest that was drawn of each row: the k + 1 largest are not smaller.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.ops.triton_attention.largest import allowed_logits, census, store_cuts
from attemper.ops.triton_attention.tiles import FLAG_ROWS, expand_rule, groups_of, load_rule, load_tile
from attemper.ops.triton_words import row_words


@triton.jit
def push(x, first, second, third, fourth, DEPTH: tl.constexpr):
    """Put x into sorted lists of DEPTH entries, element by element; what is smallest falls out."""
    rest = tl.minimum(first, x)
    first = tl.maximum(first, x)
    if DEPTH > 1:
        x = rest
        rest = tl.minimum(second, x)
        second = tl.maximum(second, x)
    if DEPTH > 2:
        x = rest
        rest = tl.minimum(third, x)
        third = tl.maximum(third, x)
    if DEPTH > 3:
        fourth = tl.maximum(fourth, rest)
    return first, second, third, fourth


@triton.jit
def pop(first, second, third, fourth, drawn, DEPTH: tl.constexpr):
    """The largest entry of every row, which leaves its list, and the lists; `drawn` counts what left each of them."""
    top = tl.max(first, 1)
    hit = first == top[:, None]
    drawn += hit.to(tl.int32)
    first = tl.where(hit, second if DEPTH > 1 else -float("inf"), first)
    if DEPTH > 1:
        second = tl.where(hit, third if DEPTH > 2 else -float("inf"), second)
    if DEPTH > 2:
        third = tl.where(hit, fourth if DEPTH > 3 else -float("inf"), third)
    if DEPTH > 3:
        fourth = tl.where(hit, -float("inf"), fourth)
    return top, first, second, third, fourth, drawn


@triton.jit
def maxima_tile(
    first_row, head, q_ptr, q_n, k_ptr, k_n, cuts_ptr, unsure_ptr, table_ptr, hard_ptr, tops_ptr, tops_q, mask_ptr,
    mask_q, mask_k, nq, nk, scale, k_largest,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr, SPARE: tl.constexpr,
    DROP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything of one query tile. The pointers stand at the tile's sample and head, `unsure_ptr` at its flag."""
    queries = first_row + tl.arange(0, BM)
    q = load_tile(q_ptr, queries, q_n, nq, E, BE, True)
    rule = load_rule(queries, nq, nk, tops_ptr, tops_q, cuts_ptr, hard_ptr, MASK, "none")
    rule = expand_rule(rule, 1)
    hard_words = row_words(tl.load(hard_ptr + nk), head, queries)
    words = queries
    limit = 0
    if DROP:
        words = row_words(tl.load(table_ptr + nk), head, queries)
        limit = tl.load(table_ptr + nk + 1)
    end = tl.minimum(nk, first_row + BM) if CAUSAL else nk
    spared = queries * 0
    none = queries < 0
    if SPARE or DROP:
        spared, found, kept = census(
            end, rule, words, limit, hard_words, tl.load(hard_ptr + nk + 1), queries, nq, nk, table_ptr, hard_ptr,
            mask_ptr, mask_q, mask_k, BN, BM, DROP, CAUSAL, MASK,
        )  # fmt: skip
        if SPARE:
            none = (found <= k_largest) & (kept == 0)

    first = tl.full((BM, BN), -float("inf"), tl.float32)
    second = first
    third = first
    fourth = first
    whole = end // BN * BN
    for start in tl.range(0, whole, BN):
        x = allowed_logits(
            start, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q, mask_k,
            scale, E, BE, BN, False, DROP, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
        first, second, third, fourth = push(x, first, second, third, fourth, DEPTH)
    if whole < end:
        x = allowed_logits(
            whole, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q, mask_k,
            scale, E, BE, BN, True, DROP, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
        first, second, third, fourth = push(x, first, second, third, fourth, DEPTH)
    if DEPTH == 1:
        deepest = first
    elif DEPTH == 2:
        deepest = second
    elif DEPTH == 3:
        deepest = third
    else:
        deepest = fourth
    hidden = tl.max(deepest, 1)  # a column whose last place is taken may have seen more

    value = tl.full((BM,), float("inf"), tl.float32)
    below = value
    drawn = tl.zeros((BM, BN), tl.int32)
    for _ in range(k_largest + 1):
        value = below
        below, first, second, third, fourth, drawn = pop(first, second, third, fourth, drawn, DEPTH)
    lost = (hidden >= below) & (tl.cdiv(end, BN) > DEPTH)
    equal = (tl.sum(drawn, 1) != k_largest + 1) | (value == below)
    few = below == -float("inf")  # equal ones that are drawn together cannot be told from a short row
    unsure = (lost | equal | few) & (queries < nq)
    again = tl.max(unsure.to(tl.int32), 0)
    tl.store(unsure_ptr, again)
    store_cuts(cuts_ptr, queries, nq, tl.where(again > 0, below, value), below, hard_words, none)


@triton.jit
def maxima_kernel(
    q_ptr, k_ptr, cuts_ptr, unsure_ptr, table_ptr, hard_ptr, tops_ptr, mask_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_q, mask_k, tops_b, tops_h, tops_q,
    heads, group, nq, nk, scale, k_largest,
    NQ: tl.constexpr, NK: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, TAIL_M: tl.constexpr,
    BN: tl.constexpr, DEPTH: tl.constexpr, SPARE: tl.constexpr, DROP: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid, arguments and answer of `largest.cuts_kernel`; unsure: a flag per program, whether to ask that one."""
    if NQ > 0:
        nq = NQ
        nk = NK
    tiles = (nq + BM - 1) // BM
    pid = tl.program_id(0)
    head = pid // tiles
    first_row = (pid % tiles) * BM
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + (h // group) * k_h
    mask_ptr += b * mask_b + h * mask_h
    tops_ptr += b * tops_b + h * tops_h
    cuts_ptr += head.to(tl.int64) * groups_of(nq) * FLAG_ROWS
    unsure_ptr += pid
    if (nq % BM == 0) | (first_row + BM <= nq):
        maxima_tile(
            first_row, head, q_ptr, q_n, k_ptr, k_n, cuts_ptr, unsure_ptr, table_ptr, hard_ptr, tops_ptr, tops_q,
            mask_ptr, mask_q, mask_k, nq, nk, scale, k_largest,
            E, BE, BM, BN, DEPTH, SPARE, DROP, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    else:
        maxima_tile(
            first_row, head, q_ptr, q_n, k_ptr, k_n, cuts_ptr, unsure_ptr, table_ptr, hard_ptr, tops_ptr, tops_q,
            mask_ptr, mask_q, mask_k, nq, nk, scale, k_largest,
            E, BE, TAIL_M, BN, DEPTH, SPARE, DROP, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
