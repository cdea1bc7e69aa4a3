"""Where the k largest logits of every row begin, exactly, ties in favour of earlier keys: what hard masking asks first.

A row's answer is three numbers (see `tiles.is_hit`): the largest are those above `high`, and those above `low` at a key
up to `last`. Between `low` and `high` lies the k-th largest value alone, half-way from its neighbours. Later kernels
compute the logits again, in other tiles; a difference in the last digit then moves nothing over a border.

Three ways, by how much there is to look at:
- whole: all logits of a row are on chip; take the largest value k times.
- slots: keys are swept in tiles, and the k + 1 largest so far stay in registers.
- digits: k is large; find the k-th largest value bit by bit, four bits for each sweep.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.ops.triton_attention.tiles import (
    FLAG_ROWS,
    expand_rule,
    groups_of,
    load_bias,
    load_rule,
    load_tile,
    restrict,
    to_logits,
)
from attemper.ops.triton_attention.words import row_words


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
def whole_row(x, k_largest, keys, nk):
    """(k-th largest value, the next larger one, the next smaller one, last key) of rows that are on chip as a whole."""
    value = tl.max(x, 1)
    above = tl.full((x.shape[0],), float("inf"), tl.float32)
    need = tl.zeros((x.shape[0],), tl.int32) + k_largest
    count = tl.sum((x == value[:, None]).to(tl.int32), 1)
    for _ in range(1, k_largest):
        below = tl.max(tl.where(x < value[:, None], x, -float("inf")), 1)
        more = (count < need) & (value > -float("inf"))
        above = tl.where(more, value, above)
        need = tl.where(more, need - count, need)
        value = tl.where(more, below, value)
        count = tl.sum((x == value[:, None]).to(tl.int32), 1)
    below = tl.max(tl.where(x < value[:, None], x, -float("inf")), 1)
    tied = x == value[:, None]
    place = tl.cumsum(tied.to(tl.int32), 1)
    last = tl.max(tl.where(tied & (place <= need[:, None]), keys[None, :], -1), 1)
    return value, above, below, tl.where(count > need, last, nk)


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
def read_slots(slots, k_largest):
    """(k-th largest value, the next larger one, the next smaller or equal one, how many ties are taken)."""
    at = tl.arange(0, slots.shape[1])
    below = tl.min(slots, 1)
    others = tl.where(at[None, :] == tl.argmin(slots, 1)[:, None], float("inf"), slots)
    value = tl.min(others, 1)
    larger = (at[None, :] <= k_largest) & (slots > value[:, None])
    above = tl.min(tl.where(larger, slots, float("inf")), 1)
    return value, above, below, k_largest - tl.sum(larger.to(tl.int32), 1)


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
def read_digits(counts, base, beyond, shift, k_largest):
    """The next four bits of the k-th largest value, and how many entries lie beyond it as far as it is known."""
    digits = tl.arange(0, 16)
    digit = tl.sum(((counts >= k_largest) & (digits[None, :] > 0)).to(tl.int32), 1)
    next_count = tl.sum(tl.where(digits[None, :] == (digit + 1)[:, None], counts, 0), 1)
    return base + (digit.to(tl.uint32) << shift), tl.where(digit < 15, next_count, beyond)


@triton.jit
def meet_ties(x, value, need, keys, above, below, last, ties):
    """Look through one more tile for the neighbours of a row's k-th value, and for the last key that is taken."""
    tied = x == value[:, None]
    place = tl.cumsum(tied.to(tl.int32), 1) + ties[:, None]
    last = tl.maximum(last, tl.max(tl.where(tied & (place <= need[:, None]), keys[None, :], -1), 1))
    above = tl.minimum(above, tl.min(tl.where(x > value[:, None], x, float("inf")), 1))
    below = tl.maximum(below, tl.max(tl.where(x < value[:, None], x, -float("inf")), 1))
    return above, below, last, ties + tl.sum(tied.to(tl.int32), 1)


@triton.jit
def store_cuts(cuts_ptr, plane, queries, nq, value, above, below, last, word, none):
    """Write `low`, `high`, `last` and the row word; where `none`, nothing is among the largest.

    A fifth plane says at the first row of a head whether any of its rows needs `last`, that is, has ties at its border.

    `load_rule` reads no row beyond nq; they are written so that what is stored does not depend on chance.
    """
    middle = value * 0.5 + above * 0.5
    high = tl.where((middle < above) | (above == float("inf")), middle, value)
    middle = value * 0.5 + below * 0.5
    low = tl.where(middle < value, middle, below)
    everything = value == -float("inf")  # fewer keys than k
    high = tl.where(none, float("inf"), tl.where(everything, -float("inf"), high))
    low = tl.where(none, float("inf"), tl.where(everything, -float("inf"), low))
    inside = queries < groups_of(nq) * FLAG_ROWS
    tl.store(cuts_ptr + queries, low.to(tl.int32, bitcast=True), mask=inside)
    tl.store(cuts_ptr + plane + queries, high.to(tl.int32, bitcast=True), mask=inside)
    tl.store(cuts_ptr + 2 * plane + queries, last, mask=inside)
    tl.store(cuts_ptr + 3 * plane + queries, word, mask=inside)


@triton.jit
def cuts_kernel(
    q_ptr, k_ptr, cuts_ptr, unsure_ptr, table_ptr, hard_ptr, tops_ptr, mask_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_q, mask_k, tops_b, tops_h, tops_q, plane,
    heads, group, nq, nk, scale, k_largest, unsure_tiles, unsure_rows,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr,
    SECOND: tl.constexpr,
    SPARE: tl.constexpr, DROP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: sample × head × query tile, tiles fastest.

    SPARE: a row of which hard masking would drop every key is left alone. DROP: keys were dropped before.
    SECOND: `maxima.maxima_kernel` has been here, and only rows in tiles that it is unsure of are looked at.
    """
    tiles = (nq + BM - 1) // BM
    pid = tl.program_id(0)
    head = pid // tiles
    first = (pid % tiles) * BM
    if SECOND:
        if tl.load(unsure_ptr + head * unsure_tiles + first // unsure_rows) == 0:
            return
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + (h // group) * k_h
    mask_ptr += b * mask_b + h * mask_h
    tops_ptr += b * tops_b + h * tops_h
    cuts_ptr += head.to(tl.int64) * groups_of(nq) * FLAG_ROWS
    queries = first + tl.arange(0, BM)
    q = load_tile(q_ptr, queries, q_n, nq, E, BE, True)
    rule = load_rule(queries, nq, nk, tops_ptr, tops_q, cuts_ptr, plane, hard_ptr, MASK, "none")
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
        value, above, below, last = whole_row(x, k_largest, columns, nk)
    else:
        if WAY == "slots":
            at = tl.arange(0, SLOTS)
            slots = tl.zeros((BM, SLOTS), tl.float32) + tl.where(at <= k_largest, -float("inf"), float("inf"))[None, :]
            for start in tl.range(0, end, BN):
                x = allowed_logits(
                    start, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q,
                    mask_k, scale, E, BE, BN, True, DROP, CAUSAL, MASK, PRECISION,
                )  # fmt: skip
                slots = fill_slots(x, slots, columns)
            value, above, below, need = read_slots(slots, k_largest)
            tied = (value == below) & (value > -float("inf"))
        else:
            base = tl.zeros((BM,), tl.uint32)
            beyond = tl.zeros((BM,), tl.int32)
            for level in range(8):
                counts = tl.zeros((BM, 16), tl.int32)
                shift = (tl.zeros((BM,), tl.int32) + (28 - 4 * level)).to(tl.uint32)
                for start in tl.range(0, end, BN):
                    x = allowed_logits(
                        start, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q,
                        mask_k, scale, E, BE, BN, True, DROP, CAUSAL, MASK, PRECISION,
                    )  # fmt: skip
                    counts = count_digits(x, counts, base, shift)
                base, beyond = read_digits(counts, base, beyond, shift, k_largest)
            value = unordered(base)
            need = k_largest - beyond
            above = tl.full((BM,), float("inf"), tl.float32)
            below = tl.full((BM,), -float("inf"), tl.float32)
            tied = value > -float("inf")
        last = tl.where(tied, -1, nk + queries * 0)
        if tl.max(tied.to(tl.int32), 0) > 0:
            below = tl.where(tied, -float("inf"), below)
            ties = tl.zeros((BM,), tl.int32)
            for start in tl.range(0, end, BN):
                x = allowed_logits(
                    start, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q,
                    mask_k, scale, E, BE, BN, True, DROP, CAUSAL, MASK, PRECISION,
                )  # fmt: skip
                above, below, last, ties = meet_ties(
                    x, value, need, start + columns, above, below, last, ties
                )  # fmt: skip
    store_cuts(cuts_ptr, plane, queries, nq, value, above, below, last, hard_words, none)
    if SECOND:  # all that may be written here is 1, so it does not matter who comes first
        ties = tl.max(((last < nk) & (queries < nq)).to(tl.int32), 0)
        if ties > 0:
            tl.store(cuts_ptr + 4 * plane, 1)
