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

from attemper.kernels.attention.seeds import down, draws, dropping_words, head_tables
from attemper.kernels.common.groups import Dropping, Options
from attemper.kernels.common.stream import table_row_words
from attemper.kernels.common.tiles import (
    FLAG_ROWS,
    INFINITY_BITS,
    expand_row_masks,
    groups_of,
    load_bias,
    load_row_masks,
    load_tile,
    mask_of,
    restrict,
    rows_of,
    to_logits,
)


@triton.jit
def allowed_logits(
    start, q_tile, row_masks, spared, dropping, queries, k, tables, mask, scale, options,
    BN: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Logits of one key tile, −inf where a key is not allowed, or (DROP) was dropped before."""
    keys = start + tl.arange(0, BN)
    k_tile = load_tile(k, keys, mask.nk, options.E, options.BE, EDGE)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=options.PRECISION)
    x = to_logits(scores, scale, row_masks, queries[:, None], keys[None, :], mask, options)
    if EDGE or options.CAUSAL or options.DROP or options.MASK != "none":
        allowed = is_allowed(row_masks, queries, keys, mask, options, EDGE)
        if options.DROP:
            columns = tl.load(tables.drop + keys, mask=keys < mask.nk, other=1)
            numbers = draws(
                down(dropping), columns[None, :], queries[:, None], keys[None, :], tables, mask, options, True
            )
            kept = numbers >= dropping.limit
            allowed = allowed & (kept | (spared[:, None] > 0))
        x = tl.where(allowed, x, -float("inf"))
    return x


@triton.jit
def is_allowed(row_masks, queries, keys, mask, options, EDGE: tl.constexpr):
    """Boolean (rows, keys): what masks leave in reach."""
    one = tl.full((queries.shape[0], keys.shape[0]), 1, tl.int32)
    one = restrict(one, 0, queries[:, None], keys[None, :], mask, options, EDGE)
    if options.MASK == "bias":
        bias = load_bias(queries[:, None], keys[None, :], mask)
        return (one > 0) & (bias > row_masks.floor)
    return one > 0


@triton.jit
def count_keys(
    end, row_masks, dropping, hard_dropping, queries, tables, mask, options, BN: tl.constexpr, BM: tl.constexpr
):
    """How many keys are left in every row, without a look at logits.

    Returns whether dropping came first and would have emptied the row, so that it spared it; how many keys hard masking
    then finds; and how many of them it would keep, whatever their logits.
    """
    found = tl.zeros((BM,), tl.int32)
    kept = tl.zeros((BM,), tl.int32)
    undropped = tl.zeros((BM,), tl.int32)
    undropped_kept = tl.zeros((BM,), tl.int32)
    for start in tl.range(0, end, BN):
        keys = start + tl.arange(0, BN)
        allowed = is_allowed(row_masks, queries, keys, mask, options, True)
        columns = tl.load(tables.hard + keys, mask=keys < mask.nk, other=1)
        keep = allowed & (hard_dropping.words[:, None] * columns[None, :] >= hard_dropping.limit)
        undropped += tl.sum(allowed.to(tl.int32), 1)
        undropped_kept += tl.sum(keep.to(tl.int32), 1)
        if options.DROP:
            columns = tl.load(tables.drop + keys, mask=keys < mask.nk, other=1)
            numbers = draws(
                down(dropping), columns[None, :], queries[:, None], keys[None, :], tables, mask, options, True
            )
            stays = numbers >= dropping.limit
            found += tl.sum((allowed & stays).to(tl.int32), 1)
            kept += tl.sum((keep & stays).to(tl.int32), 1)
    if options.DROP:
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
    first, head, q, k, cuts_ptr, tables, mask, sizes, scale, k_largest, options,
    BM: tl.constexpr, BN: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr, SECOND: tl.constexpr,
    SPARE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Everything of BM queries from `first` on; the arguments are those of the kernel."""
    heads, group, nq, nk = sizes
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    q = rows_of(q, b, h)
    k = rows_of(k, b, h // group)
    mask = mask_of(mask, b, h, nq, nk)
    cuts_ptr += head.to(tl.int64) * groups_of(nq) * FLAG_ROWS
    tables = head_tables((tables[0], tables[1], cuts_ptr), 0, b, h, heads, nq, nk, options.DROP)
    queries = first + tl.arange(0, BM)
    q_tile = load_tile(q, queries, nq, options.E, options.BE, True)
    row_masks = expand_row_masks(load_row_masks(queries, mask, tables, options), 1)
    hard_words = table_row_words(tables.hard, nk, b, h * 0 if SHARED else h, queries)
    hard_dropping = Dropping(hard_words, tl.load(tables.hard + nk + 1), 0)
    words = queries
    limit = 0
    extra = 0
    if options.DROP:
        words = dropping_words(b, h, queries, nk, tables, options.DROP)
        limit = tl.load(tables.drop + nk + 1)
        extra = tl.load(tables.drop + nk + 2)
    dropping = Dropping(words, limit, extra)
    end = tl.minimum(nk, first + BM) if options.CAUSAL else nk
    spared = queries * 0
    none = queries < 0
    if SPARE or options.DROP:
        spared, found, kept = count_keys(
            end, row_masks, dropping, hard_dropping, queries, tables, mask, options, BN, BM
        )
        if SPARE:
            none = (found <= k_largest) & (kept == 0)

    columns = tl.arange(0, BN)
    if WAY == "whole":
        x = allowed_logits(
            0, q_tile, row_masks, spared, dropping, queries, k, tables, mask, scale, options, BN, True
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
                    start, q_tile, row_masks, spared, dropping, queries, k, tables, mask, scale, options, BN, True
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
                        start, q_tile, row_masks, spared, dropping, queries, k, tables, mask, scale, options, BN, True
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
                    start, q_tile, row_masks, spared, dropping, queries, k, tables, mask, scale, options, BN, True
                )  # fmt: skip
                below = tl.maximum(below, tl.max(tl.where(x < value[:, None], x, -float("inf")), 1))
    store_cuts(cuts_ptr, queries, nq, value, below, hard_words, none)


@triton.jit
def cuts_kernel(
    q, k,  # a tensor, its strides along samples, heads and tokens
    cuts_ptr, unsure_ptr,  # what it writes, and the flags of `maxima_kernel`
    tables,  # of dropping, of hard masking
    mask,  # elements, four strides, row tops, their three strides
    sizes,  # query heads, how many of them share a key head, queries, keys
    scale,  # of logits to the base of two
    k_largest, flags, unsure_rows,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WAY: tl.constexpr, SLOTS: tl.constexpr,
    SECOND: tl.constexpr, SPAN: tl.constexpr,
    SPARE: tl.constexpr, SHARED: tl.constexpr, DROP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns the cuts of BM rows. Grid: sample × head × query tile, tiles fastest.

    Where SPAN is not 0, it owns SPAN flags, and the rows of those that are set. Grid: spans of flags.
    SPARE: a row of which hard masking would drop every key is left alone. DROP: keys were dropped before.
    SHARED: the heads of a sample share one draw of hard masking.
    SECOND: `maxima.maxima_kernel` has been here, with tiles of `unsure_rows`, and only those that it flagged are looked
    at. It has left a number for each of their rows that the k + 1 largest reach; "slots" passes over what does not.
    """
    _, _, nq, _ = sizes
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
            first, head, q, k, cuts_ptr, tables, mask, sizes, scale, k_largest,
            Options(E, BE, E, BE, DROP, "none", CAUSAL, MASK, PRECISION), BM, BN, WAY, SLOTS, SECOND, SPARE,
            SHARED,
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
                            row, spot // tiles, q, k, cuts_ptr, tables, mask, sizes, scale, k_largest,
                            Options(E, BE, E, BE, DROP, "none", CAUSAL, MASK, PRECISION),
                            BM, BN, WAY, SLOTS, SECOND, SPARE, SHARED,
                        )  # fmt: skip
