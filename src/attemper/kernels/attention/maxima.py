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

from attemper.kernels.attention.largest import allowed_logits, census, store_cuts
from attemper.kernels.common.stream import row_words
from attemper.kernels.common.tiles import FLAG_ROWS, expand_rule, groups_of, load_rule, load_tile


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
    first_row, head, q_ptr, q_n, k_ptr, k_n, cuts_ptr, unsure_ptr, table_ptr, hard_ptr, tops_ptr, tops_q, mask_ptr,
    mask_q, mask_k, nq, nk, scale, k_largest,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, REST_N: tl.constexpr, LISTS: tl.constexpr,
    SUMS: tl.constexpr, DEPTH: tl.constexpr, EDGE: tl.constexpr, SPARE: tl.constexpr, DROP: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything of one query tile. The pointers stand at the tile's sample and head, `unsure_ptr` at its flag."""
    queries = first_row + tl.arange(0, BM)
    q = load_tile(q_ptr, queries, q_n, nq, E, BE, EDGE)
    rule = load_rule(queries, nq, nk, tops_ptr, tops_q, cuts_ptr, hard_ptr, MASK, "none")
    rule = expand_rule(rule, 1)
    zero = tl.load(hard_ptr + nk + 2)
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
        counted = end
        if MASK == "none" and not DROP:
            fewest = tl.minimum(nk, first_row + 1) if CAUSAL else nk
            counted = 0 if fewest > k_largest else end  # no row has so few keys that all of them are among the largest
        spared, found, kept = census(
            counted, rule, words, limit, hard_words, tl.load(hard_ptr + nk + 1), queries, nq, nk, table_ptr, hard_ptr,
            mask_ptr, mask_q, mask_k, BN, BM, DROP, CAUSAL, MASK,
        )  # fmt: skip
        if SPARE:
            none = (found <= k_largest) & (kept == 0) & (counted > 0)

    # A factor above 0 changes no order, so the k + 1 largest are found first, and become logits then.
    factor = 1.0 if MASK != "bias" else scale
    lists = no_entries(tl.full((BM, LISTS), -float("inf"), tl.float32), DEPTH, BN // LISTS)
    whole = (tl.minimum(first_row, nk) if CAUSAL else nk) // BN * BN  # keys of these tiles are no row's future
    for start in tl.range(0, whole, BN):
        x = allowed_logits(
            start, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q, mask_k,
            factor, E, BE, BN, False, DROP, False, MASK, PRECISION,
        )  # fmt: skip
        lists = play(x, lists, zero + 1, zero - 1, LISTS, False, SUMS, DEPTH, BN // LISTS)
    for start in tl.range(whole, end, REST_N, num_stages=1):
        x = allowed_logits(
            start, q, rule, spared, words, limit, queries, nq, nk, k_ptr, k_n, table_ptr, mask_ptr, mask_q, mask_k,
            factor, E, BE, REST_N, True, DROP, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
        lists = play(x, lists, zero + 1, zero - 1, LISTS, False, SUMS, DEPTH, BN // LISTS)

    value, below, together = draw(gather(lists, (), 0, DEPTH, DEPTH, BN // LISTS), DEPTH)
    if MASK != "bias":
        value = value * scale
        below = tl.where(scale > 0, below * scale, -float("inf"))
    unsure = together | ((value == below) & (value > -float("inf"))) | (scale <= 0)
    again = tl.max((unsure & (queries < nq)).to(tl.int32), 0)
    tl.store(unsure_ptr, again)
    store_cuts(cuts_ptr, queries, nq, tl.where(again > 0, below, value), below, hard_words, none)


@triton.jit
def maxima_kernel(
    q_ptr, k_ptr, cuts_ptr, unsure_ptr, table_ptr, hard_ptr, tops_ptr, mask_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_q, mask_k, tops_b, tops_h, tops_q,
    heads, group, nq, nk, scale, k_largest: tl.constexpr,
    NQ: tl.constexpr, NK: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, REST_N: tl.constexpr, LISTS: tl.constexpr,
    TAIL_M: tl.constexpr, TAIL_BN: tl.constexpr, TAIL_REST_N: tl.constexpr, TAIL_LISTS: tl.constexpr,
    SUMS: tl.constexpr, SPARE: tl.constexpr, DROP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid, arguments and answer of `largest.cuts_kernel`; unsure: a flag per program, whether to ask that one."""
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
            E, BE, BM, BN, REST_N, LISTS, SUMS, k_largest + 1, False, SPARE, DROP, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    else:
        maxima_tile(
            first_row, head, q_ptr, q_n, k_ptr, k_n, cuts_ptr, unsure_ptr, table_ptr, hard_ptr, tops_ptr, tops_q,
            mask_ptr, mask_q, mask_k, nq, nk, scale, k_largest,
            E, BE, TAIL_M, TAIL_BN, TAIL_REST_N, TAIL_LISTS, SUMS, k_largest + 1, True,
            SPARE, DROP, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
