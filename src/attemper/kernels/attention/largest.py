"""Where the k largest logits of every row begin, exactly: what hard masking asks first.

A row's answer is one number, half-way from the k-th largest value to the next smaller one. Later kernels compute the
logits again, in other tiles; a difference in the last digit then moves nothing over the border. Logits that equal the
k-th largest are among the largest, too.

Three ways, by how much there is to look at:
- whole: all logits of a row are on chip; take the largest value k times.
- slots: keys are swept in tiles, and the k + 1 largest so far stay in registers.
- digits: k is large; find the k-th largest value bit by bit, four bits for each sweep.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.common.stream import row_words
from attemper.kernels.common.tiles import (
    FLAG_ROWS,
    INFINITY_BITS,
    expand_rule,
    groups_of,
    load_bias,
    load_rule,
    load_tile,
    restrict,
    to_logits,
)


@triton.jit
def allowed_logits(
    start, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q, mask_k, scale,
    E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr, DROP: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of one key tile, −inf where a key is not allowed, or (DROP) was dropped before."""
    keys = start + tl.arange(0, BN)
    k = load_tile(k_ptr, keys, k_n, nk, E, BE, EDGE)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    x = to_logits(scores, scale, rule, queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k, MASK)
    if EDGE or CAUSAL or DROP or MASK != "none":
        allowed = is_allowed(rule, queries, keys, nq, nk, mask_ptr, mask_q, mask_k, EDGE, CAUSAL, MASK)
        if DROP:
            columns = tl.load(table_ptr + keys, mask=keys < nk, other=1)
            allowed = allowed & ((words[:, None] * columns[None, :] >= limit) | (spared[:, None] > 0))
        x = tl.where(allowed, x, -float("inf"))
    return x


@triton.jit
def is_allowed(
    rule, queries, keys, nq, nk, mask_ptr, mask_q, mask_k, EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """Boolean (rows, keys): what masks leave in reach."""
    one = tl.full((queries.shape[0], keys.shape[0]), 1, tl.int32)
    one = restrict(one, 0, queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k, EDGE, CAUSAL, MASK)
    if MASK == "bias":
        bias = load_bias(queries[:, None], keys[None, :], nq, nk, mask_ptr, mask_q, mask_k)
        return (one > 0) & (bias > rule[0])
    return one > 0


@triton.jit
def census(
    end, rule, words, limit, hard_words, hard_limit, queries, nq, nk, table_ptr, hard_ptr, mask_ptr, mask_q, mask_k,
    BN: tl.constexpr, BM: tl.constexpr, DROP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Who is left in every row, without a look at logits.

    Returns whether dropping came first and would have emptied the row, so that it spared it; how many keys hard masking
    then finds; and how many of them it would keep, whatever their logits.
    """
    found = tl.zeros((BM,), tl.int32)
    kept = tl.zeros((BM,), tl.int32)
    undropped = tl.zeros((BM,), tl.int32)
    undropped_kept = tl.zeros((BM,), tl.int32)
    for start in tl.range(0, end, BN):
        keys = start + tl.arange(0, BN)
        allowed = is_allowed(rule, queries, keys, nq, nk, mask_ptr, mask_q, mask_k, True, CAUSAL, MASK)
        columns = tl.load(hard_ptr + keys, mask=keys < nk, other=1)
        keep = allowed & (hard_words[:, None] * columns[None, :] >= hard_limit)
        undropped += tl.sum(allowed.to(tl.int32), 1)
        undropped_kept += tl.sum(keep.to(tl.int32), 1)
        if DROP:
            columns = tl.load(table_ptr + keys, mask=keys < nk, other=1)
            stays = words[:, None] * columns[None, :] >= limit
            found += tl.sum((allowed & stays).to(tl.int32), 1)
            kept += tl.sum((keep & stays).to(tl.int32), 1)
    if DROP:
        spared = (found == 0).to(tl.int32)
        return spared, tl.where(spared > 0, undropped, found), tl.where(spared > 0, undropped_kept, kept)
    return found, undropped, undropped_kept


@triton.jit
def whole_row(x, k_largest):
    """(k-th largest value, the next smaller one) of rows that are on chip as a whole."""
    value = tl.max(x, 1)
    need = tl.zeros((x.shape[0],), tl.int32) + k_largest
    for _ in range(1, k_largest):
        need -= tl.sum((x == value[:, None]).to(tl.int32), 1)
        smaller = tl.max(tl.where(x < value[:, None], x, -float("inf")), 1)
        value = tl.where(need > 0, smaller, value)
        need = tl.where(need > 0, need, -x.shape[1] * k_largest)  # found: it stays as it is
    return value, tl.max(tl.where(x < value[:, None], x, -float("inf")), 1)


@triton.jit
def fill_slots(x, slots, columns):
    """The largest values of `slots` and `x` together; as many as there were slots."""
    at = tl.arange(0, slots.shape[1])
    top = tl.max(x, 1)
    low = tl.min(slots, 1)
    while tl.max((top > low).to(tl.int32), 0) > 0:
        better = (top > low)[:, None]
        slots = tl.where(better & (at[None, :] == tl.argmin(slots, 1)[:, None]), top[:, None], slots)
        x = tl.where(better & (columns[None, :] == tl.argmax(x, 1)[:, None]), -float("inf"), x)
        top = tl.max(x, 1)
        low = tl.min(slots, 1)
    return slots


@triton.jit
def read_slots(slots):
    """(k-th largest value, the next smaller or equal one) of k + 1 slots; those beyond hold +inf."""
    at = tl.arange(0, slots.shape[1])
    below = tl.min(slots, 1)
    others = tl.where(at[None, :] == tl.argmin(slots, 1)[:, None], float("inf"), slots)
    return tl.min(others, 1), below


@triton.jit
def ordered(x):
    """Unsigned words that compare as the floats do."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)  # −0 is 0
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def unordered(word):
    """The floats that `ordered` was given."""
    bits = tl.where(word >= 0x80000000, word ^ 0x80000000, word ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def count_digits(x, counts, base, shift):
    """Add up, for d = 1 … 15, how many entries of a row are at least base + (d << shift)."""
    digits = tl.arange(0, 16)
    words = ordered(x)
    for d in tl.static_range(1, 16):
        step = (base * 0 + d) << shift
        reached = tl.sum((words >= (base + step)[:, None]).to(tl.int32), 1)
        counts += tl.where(digits[None, :] == d, reached[:, None], 0)
    return counts


@triton.jit
def read_digits(counts, base, shift, k_largest):
    """The k-th largest value as far as it is known with its next four bits."""
    digits = tl.arange(0, 16)
    digit = tl.sum(((counts >= k_largest) & (digits[None, :] > 0)).to(tl.int32), 1)
    return base + (digit.to(tl.uint32) << shift)


@triton.jit
def store_cuts(cuts_ptr, queries, nq, value, below, word, none):
    """Write where the largest begin, with the row word in one 64-bit word; where `none`, nothing is among the largest.

    `load_rule` reads no row beyond nq; they are written so that what is stored does not depend on chance.
    """
    middle = value * 0.5 + below * 0.5
    low = tl.where(middle < value, middle, below)
    low = tl.where(value == -float("inf"), -float("inf"), low)  # fewer keys than k
    low = tl.where(none, float("inf"), low).to(tl.int32, bitcast=True)
    pairs = (word.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    tl.store(cuts_ptr + queries, pairs, mask=queries < groups_of(nq) * FLAG_ROWS)


@triton.jit
def cuts_rows(
    first, head, q_ptr, k_ptr, cuts_ptr, table_ptr, hard_ptr, tops_ptr, mask_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_q, mask_k, tops_b, tops_h, tops_q,
    heads, group, nq, nk, scale, k_largest,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr,
    SECOND: tl.constexpr,
    SPARE: tl.constexpr, DROP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything of one query tile."""
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + (h // group) * k_h
    mask_ptr += b * mask_b + h * mask_h
    tops_ptr += b * tops_b + h * tops_h
    cuts_ptr += head.to(tl.int64) * groups_of(nq) * FLAG_ROWS
    queries = first + tl.arange(0, BM)
    q = load_tile(q_ptr, queries, q_n, nq, E, BE, True)
    rule = load_rule(queries, nq, nk, tops_ptr, tops_q, cuts_ptr, hard_ptr, MASK, "none")
    rule = expand_rule(rule, 1)
    hard_words = row_words(tl.load(hard_ptr + nk), head, queries)
    hard_limit = tl.load(hard_ptr + nk + 1)
    words = queries
    limit = 0
    if DROP:
        words = row_words(tl.load(table_ptr + nk), head, queries)
        limit = tl.load(table_ptr + nk + 1)
    end = tl.minimum(nk, first + BM) if CAUSAL else nk
    spared = queries * 0
    none = queries < 0
    if SPARE or DROP:
        spared, found, kept = census(
            end, rule, words, limit, hard_words, hard_limit, queries, nq, nk, table_ptr, hard_ptr, mask_ptr, mask_q,
            mask_k, BN, BM, DROP, CAUSAL, MASK,
        )  # fmt: skip
        if SPARE:
            none = (found <= k_largest) & (kept == 0)

    columns = tl.arange(0, BN)
    if WAY == "whole":
        x = allowed_logits(
            0, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q, mask_k, scale,
            E, BE, BN, True, DROP, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
        value, below = whole_row(x, k_largest)
    else:
        if WAY == "slots":
            if SECOND:
                reached = tl.load(cuts_ptr + queries, mask=queries < nq, other=INFINITY_BITS).to(tl.int32)
                reached = reached.to(tl.float32, bitcast=True)
            at = tl.arange(0, SLOTS)
            slots = tl.zeros((BM, SLOTS), tl.float32) + tl.where(at <= k_largest, -float("inf"), float("inf"))[None, :]
            for start in tl.range(0, end, BN):
                x = allowed_logits(
                    start, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q,
                    mask_k, scale, E, BE, BN, True, DROP, CAUSAL, MASK, PRECISION,
                )  # fmt: skip
                if SECOND:
                    x = tl.where(x >= reached[:, None], x, -float("inf"))
                slots = fill_slots(x, slots, columns)
            value, below = read_slots(slots)
            unknown = (value == below) & (value > -float("inf"))
        else:
            base = tl.zeros((BM,), tl.uint32)
            for level in range(8):
                counts = tl.zeros((BM, 16), tl.int32)
                shift = (tl.zeros((BM,), tl.int32) + (28 - 4 * level)).to(tl.uint32)
                for start in tl.range(0, end, BN):
                    x = allowed_logits(
                        start, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q,
                        mask_k, scale, E, BE, BN, True, DROP, CAUSAL, MASK, PRECISION,
                    )  # fmt: skip
                    counts = count_digits(x, counts, base, shift)
                base = read_digits(counts, base, shift, k_largest)
            value = unordered(base)
            below = tl.full((BM,), -float("inf"), tl.float32)
            unknown = value > -float("inf")
        if tl.max(unknown.to(tl.int32), 0) > 0:  # one more sweep for what comes next
            below = tl.where(unknown, -float("inf"), below)
            for start in tl.range(0, end, BN):
                x = allowed_logits(
                    start, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q,
                    mask_k, scale, E, BE, BN, True, DROP, CAUSAL, MASK, PRECISION,
                )  # fmt: skip
                below = tl.maximum(below, tl.max(tl.where(x < value[:, None], x, -float("inf")), 1))
    store_cuts(cuts_ptr, queries, nq, value, below, hard_words, none)


@triton.jit
def cuts_kernel(
    q_ptr, k_ptr, cuts_ptr, unsure_ptr, table_ptr, hard_ptr, tops_ptr, mask_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_q, mask_k, tops_b, tops_h, tops_q,
    heads, group, nq, nk, scale, k_largest, flags, unsure_rows,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr,
    SECOND: tl.constexpr, SPAN: tl.constexpr,
    SPARE: tl.constexpr, DROP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: sample × head × query tile, tiles fastest; or, where SPAN is not 0, spans of so many flags.

    SPARE: a row of which hard masking would drop every key is left alone. DROP: keys were dropped before.
    SECOND: `maxima.maxima_kernel` has been here, with tiles of `unsure_rows`, and only those that it flagged are looked
    at. It has left a number for each of their rows that the k + 1 largest reach; "slots" passes over what does not.
    """
    if SPAN == 0:
        tiles = (nq + BM - 1) // BM
        pid = tl.program_id(0)
        head = pid // tiles
        first = (pid % tiles) * BM
        if SECOND:
            unsure_tiles = (nq + unsure_rows - 1) // unsure_rows
            if tl.load(unsure_ptr + head * unsure_tiles + first // unsure_rows) == 0:
                return
        cuts_rows(
            first, head, q_ptr, k_ptr, cuts_ptr, table_ptr, hard_ptr, tops_ptr, mask_ptr,
            q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_q, mask_k, tops_b, tops_h, tops_q,
            heads, group, nq, nk, scale, k_largest,
            E, BE, BM, BN, WAY, SLOTS, SECOND, SPARE, DROP, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    else:
        tiles = (nq + unsure_rows - 1) // unsure_rows
        begin = tl.program_id(0) * SPAN
        at = begin + tl.arange(0, SPAN)
        if tl.max(tl.load(unsure_ptr + at, mask=at < flags, other=0), 0) > 0:
            for spot in range(begin, tl.minimum(begin + SPAN, flags)):
                if tl.load(unsure_ptr + spot) > 0:
                    first = (spot % tiles) * unsure_rows
                    for row in range(first, tl.minimum(first + unsure_rows, nq), BM):
                        cuts_rows(
                            row, spot // tiles, q_ptr, k_ptr, cuts_ptr, table_ptr, hard_ptr, tops_ptr, mask_ptr,
                            q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_q, mask_k, tops_b, tops_h, tops_q,
                            heads, group, nq, nk, scale, k_largest,
                            E, BE, BM, BN, WAY, SLOTS, SECOND, SPARE, DROP, CAUSAL, MASK, PRECISION,
                        )  # fmt: skip
