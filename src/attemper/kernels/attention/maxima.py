"""Where the k largest logits of every row begin, for a small k: one look at every logit, about six instructions each.

Keys are swept in tiles, of which a thread holds many columns of a row. Of these it plays a tournament: two and two they
are compared, then the winners among themselves and the losers among themselves, and so on. Every end of it keeps a
sorted list of the largest that came there, row by row. A logit that lost c times has 2^c − 1 others above it that no
other logit of its list has. So of the k + 1 largest of the row at most (k + 1) / 2^c are in that list, and it need not
be longer: nothing is missed, wherever the largest stand.

In the end the lists of a thread become one, and the k + 1 largest are drawn from those of all threads that share the
row. Only where the k-th and the next are equal, or were drawn together, more must be known. Such a tile of rows is left
to `largest.cuts_kernel`, with the smallest that was drawn of each row: the k + 1 largest are not smaller.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code=assignment
# ruff: noqa: RUF005  (Triton joins tuples, but takes none apart)
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.attention.largest import allowed_logits, count_keys, store_cuts
from attemper.kernels.attention.seeds import dropping_words, head_tables
from attemper.kernels.common.groups import Dropping, Options
from attemper.kernels.common.stream import table_row_words
from attemper.kernels.common.tiles import (
    FLAG_ROWS,
    expand_row_masks,
    groups_of,
    load_row_masks,
    load_tile,
    mask_of,
    rows_of,
)


@triton.jit
def insert(x, entries, START: tl.constexpr, DEPTH: tl.constexpr):
    """The DEPTH sorted entries with x among them, element by element; what is smallest falls out.

    x is known to be no larger than the first START entries.
    """
    kept = ()
    for i in tl.static_range(DEPTH):
        if i < START:
            kept = kept + (entries[i],)
        else:
            kept = kept + (tl.maximum(entries[i], x),)
            x = tl.minimum(entries[i], x)
    return kept


@triton.jit
def halves(x, LAST: tl.constexpr):
    """Two tensors of half the columns: the even and the odd ones, or (LAST) the first and the second half.

    In tiles that a matrix product leaves behind, a thread owns two neighbours, and the same again further on.
    """
    if LAST:
        return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def no_entries(x, DEPTH: tl.constexpr, PLAYERS: tl.constexpr):
    """Empty lists of every end of a tournament: two trees, of winners and of losers, or the entries of one list."""
    if PLAYERS == 1:
        entries = ()
        for _ in tl.static_range(DEPTH):
            entries = entries + (x,)
    else:
        entries = (no_entries(x, DEPTH, PLAYERS // 2), no_entries(x, DEPTH // 2, PLAYERS // 2))
    return entries


@triton.jit
def other(a, b, winner, plus, minus):
    """The one of a and b that is not the winner, exactly; plus is 1 and minus −1, which the compiler is not to know.

    Maxima and minima share a unit that never rests. Products, and what is added to them, go to another one.
    """
    bits = a.to(tl.int32, bitcast=True) * plus + b.to(tl.int32, bitcast=True)
    return (winner.to(tl.int32, bitcast=True) * minus + bits).to(tl.float32, bitcast=True)


@triton.jit
def play(
    x, lists, plus, minus, LISTS: tl.constexpr, LAST: tl.constexpr, SUMS: tl.constexpr, DEPTH: tl.constexpr,
    PLAYERS: tl.constexpr,
):  # fmt: skip
    """The lists after a tournament among the columns of x, until LISTS columns are left at every end.

    SUMS: rounds in which `other` finds the losers.
    """
    if DEPTH == 0:
        kept = lists
    elif PLAYERS == 1:
        kept = insert(x, lists, 0, DEPTH)
    elif x.shape[1] == LISTS:  # a narrow tile: the rounds that are left are won without an opponent
        kept = (play(x, lists[0], plus, minus, LISTS, LAST, SUMS, DEPTH, PLAYERS // 2), lists[1])
    else:
        a, b = halves(x, LAST)
        winner = tl.maximum(a, b)
        loser = other(a, b, winner, plus, minus) if SUMS > 0 else tl.minimum(a, b)
        winners = play(winner, lists[0], plus, minus, LISTS, True, SUMS - 1, DEPTH, PLAYERS // 2)
        losers = play(loser, lists[1], plus, minus, LISTS, True, SUMS - 1, DEPTH // 2, PLAYERS // 2)
        kept = (winners, losers)
    return kept


@triton.jit
def gather(lists, best, LOSSES: tl.constexpr, MOST: tl.constexpr, DEPTH: tl.constexpr, PLAYERS: tl.constexpr):
    """The MOST best entries of all lists, sorted; `best` are those of the lists of fewer losses, which are there."""
    if PLAYERS > 1:
        best = gather(lists[0], best, LOSSES, MOST, DEPTH, PLAYERS // 2)
        best = gather(lists[1], best, LOSSES + 1, MOST, DEPTH // 2, PLAYERS // 2)
    elif LOSSES == 0:
        best = lists
    else:
        for i in tl.static_range(DEPTH):
            best = insert(lists[i], best, ((i + 1) << LOSSES) - 1, MOST)
    return best


@triton.jit
def draw(best, DEPTH: tl.constexpr):
    """Of the DEPTH largest of every row: the last but one, the last, and whether equal ones were drawn as one."""
    below = tl.max(best[0], 1)
    value = below
    drawn = tl.zeros(best[0].shape, tl.int32)
    wanted = tl.zeros(below.shape, tl.int32)
    for i in tl.static_range(1, DEPTH):
        exists = below > -float("inf")
        hit = (best[0] == below[:, None]) & exists[:, None]
        drawn += hit.to(tl.int32)
        wanted += exists.to(tl.int32)
        rest = ()
        for j in tl.static_range(DEPTH - i):
            rest = rest + (tl.where(hit, best[j + 1], best[j]),)
        best = rest
        value = below
        below = tl.max(best[0], 1)
    return value, below, tl.sum(drawn, 1) != wanted


@triton.jit
def maxima_tile(
    first_row, b, h, hard_h, q, k, cuts_ptr, unsure_ptr, tables, mask, scale, k_largest, options,
    BM: tl.constexpr, BN: tl.constexpr, REST_N: tl.constexpr, LISTS: tl.constexpr, SUMS: tl.constexpr,
    DEPTH: tl.constexpr, EDGE: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """Everything of BM queries from `first_row` on; `unsure_ptr` stands at their flag.

    b, h: sample and head; hard_h is the head for hard masking, 0 where the heads of a sample share a draw.
    Keys come in tiles of BN, what is left in tiles of REST_N. The lists of all rows have LISTS columns: a list for
    every thread that shares the row. They hold the DEPTH = k + 1 largest.
    """
    nq = mask.nq
    nk = mask.nk
    queries = first_row + tl.arange(0, BM)
    q_tile = load_tile(q, queries, nq, options.E, options.BE, EDGE)
    row_masks = expand_row_masks(load_row_masks(queries, mask, tables, options), 1)
    zero = tl.load(tables.hard + nk + 2)
    hard_words = table_row_words(tables.hard, nk, b, hard_h, queries)
    words = queries
    limit = 0
    extra = 0
    if options.DROP:
        words = dropping_words(b, h, queries, nk, tables, options.DROP)
        limit = tl.load(tables.drop + nk + 1)
        extra = tl.load(tables.drop + nk + 2)
    dropping = Dropping(words, limit, extra)
    end = tl.minimum(nk, first_row + BM) if options.CAUSAL else nk
    spared = queries * 0
    none = queries < 0
    if SPARE or options.DROP:
        counted = end
        if options.MASK == "none" and not options.DROP:
            fewest = tl.minimum(nk, first_row + 1) if options.CAUSAL else nk
            counted = 0 if fewest > k_largest else end  # no row has so few keys that all of them are among the largest
        hard_dropping = Dropping(hard_words, tl.load(tables.hard + nk + 1), 0)
        spared, found, kept = count_keys(
            counted, row_masks, dropping, hard_dropping, queries, tables, mask, options, BN, BM
        )
        if SPARE:
            none = (found <= k_largest) & (kept == 0) & (counted > 0)

    # A factor above 0 changes no order, so the k + 1 largest are found first, and become logits then.
    factor = 1.0 if options.MASK != "bias" else scale
    lists = no_entries(tl.full((BM, LISTS), -float("inf"), tl.float32), DEPTH, BN // LISTS)
    whole = (tl.minimum(first_row, nk) if options.CAUSAL else nk) // BN * BN  # keys of these tiles are no row's future
    for start in tl.range(0, whole, BN):
        x = allowed_logits(
            start, q_tile, row_masks, spared, dropping, queries, k, tables, mask, factor,
            Options(  # not causal
                options.E, options.BE, options.EV, options.BEV, options.DROP, options.HARD, False, options.MASK,
                options.PRECISION,
            ),
            BN, False,
        )  # fmt: skip
        lists = play(x, lists, zero + 1, zero - 1, LISTS, False, SUMS, DEPTH, BN // LISTS)
    for start in tl.range(whole, end, REST_N, num_stages=1):
        x = allowed_logits(
            start, q_tile, row_masks, spared, dropping, queries, k, tables, mask, factor, options, REST_N, True
        )
        lists = play(x, lists, zero + 1, zero - 1, LISTS, False, SUMS, DEPTH, BN // LISTS)

    value, below, together = draw(gather(lists, (), 0, DEPTH, DEPTH, BN // LISTS), DEPTH)
    if options.MASK != "bias":
        value = value * scale
        below = tl.where(scale > 0, below * scale, -float("inf"))
    unsure = together | ((value == below) & (value > -float("inf"))) | (scale <= 0)
    again = tl.max((unsure & (queries < nq)).to(tl.int32), 0)
    tl.store(unsure_ptr, again)
    store_cuts(cuts_ptr, queries, nq, tl.where(again > 0, below, value), below, hard_words, none)


@triton.jit
def maxima_kernel(
    q, k, cuts_ptr, unsure_ptr, tables, mask, sizes, scale,  # as in `largest.cuts_kernel`
    k_largest: tl.constexpr,
    NQ: tl.constexpr, NK: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, REST_N: tl.constexpr, LISTS: tl.constexpr,
    TAIL_M: tl.constexpr, TAIL_BN: tl.constexpr, TAIL_REST_N: tl.constexpr, TAIL_LISTS: tl.constexpr,
    SUMS: tl.constexpr, SPARE: tl.constexpr, SHARED: tl.constexpr, DROP: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns BM rows: their cuts, and a flag that says whether `largest.cuts_kernel` must look again.

    Grid: sample × head × query tile, tiles fastest. NQ and NK are 0 where sizes are no compile-time constants.
    """
    heads, group, nq, nk = sizes
    if NQ > 0:
        nq = NQ
    if NK > 0:
        nk = NK
    tiles = (nq + BM - 1) // BM
    pid = tl.program_id(0)
    head = pid // tiles
    first_row = (pid % tiles) * BM
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    q = rows_of(q, b, h)
    k = rows_of(k, b, h // group)
    mask = mask_of(mask, b, h, nq, nk)
    cuts_ptr += head.to(tl.int64) * groups_of(nq) * FLAG_ROWS
    tables = head_tables((tables[0], tables[1], cuts_ptr), 0, b, h, heads, nq, nk, DROP)
    unsure_ptr += pid
    hard_h = h * 0 if SHARED else h
    if (nq % BM == 0) | (first_row + BM <= nq):
        maxima_tile(
            first_row, b, h, hard_h, q, k, cuts_ptr, unsure_ptr, tables, mask, scale, k_largest,
            Options(E, BE, E, BE, DROP, "none", CAUSAL, MASK, PRECISION),
            BM, BN, REST_N, LISTS, SUMS, k_largest + 1, False, SPARE,
        )  # fmt: skip
    else:
        maxima_tile(
            first_row, b, h, hard_h, q, k, cuts_ptr, unsure_ptr, tables, mask, scale, k_largest,
            Options(E, BE, E, BE, DROP, "none", CAUSAL, MASK, PRECISION),
            TAIL_M, TAIL_BN, TAIL_REST_N, TAIL_LISTS, SUMS, k_largest + 1, True, SPARE,
        )  # fmt: skip
