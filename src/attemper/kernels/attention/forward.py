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
from attemper.kernels.attention.seeds import down, draws, drop_keys, head_tables, load_dropping
from attemper.kernels.common.groups import Options, Stats
from attemper.kernels.common.tiles import (
    FLAG_ROWS,
    INFINITY_BITS,
    add_product,
    behind,
    detached,
    expand_row_masks,
    groups_of,
    load_bias,
    load_row_masks,
    load_tile,
    load_words,
    mask_of,
    restrict,
    rows_of,
    share_kept,
    store_tile,
    to_logits,
    without_last,
)

PROBE = tl.constexpr(16)  # keys that set a row's offset
LOWEST = tl.constexpr(2.0**-60)
HIGHEST = tl.constexpr(2.0**60)
# A row of which less than this is left, in bits, counts as lost where weights are divided by what is left.
LEAST_LEFT = tl.constexpr(-96.0)
LOWEST_LEFT = tl.constexpr(2.0**-36)


@triton.jit
def in_reach(logits, columns, dropping, row_masks, queries, keys, tables, mask, options, EDGE: tl.constexpr):
    """Which elements of a tile are kept and not pushed out of reach by an additive mask; a row without any is lost."""
    bias = load_bias(queries[:, None], keys[None, :], mask)
    logits = restrict(logits, -float("inf"), queries[:, None], keys[None, :], mask, options, EDGE)
    numbers = draws(down(dropping), columns[None, :], queries[:, None], keys[None, :], tables, mask, options, EDGE)
    kept = numbers >= dropping.limit
    return (logits > -float("inf")) & (bias > row_masks.floor) & kept


@triton.jit
def fixed_step(
    start, ahead, acc, total, left, seen, columns, hard_columns,  # where it is, and what it changes
    q_tile, offset, dropping, row_masks, queries,  # of the program's rows
    k, v, tables, mask, scale, options,
    BN: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One key tile under a fixed offset; also loads the column words of the tile at `ahead`, which comes next.

    acc, total: Σ weights · V and Σ weights of each row so far; left: Σ of those that stay, where it is asked for; seen:
    how many keys it was allowed to see, where a mask may leave none. columns, hard_columns: the words of the tile's
    keys, of dropping and of hard masking.
    """
    keys = start + tl.arange(0, BN)
    k_tile = load_tile(k, keys, mask.nk, options.E, options.BE, EDGE)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=options.PRECISION)
    logits = to_logits(scores, scale, row_masks, queries[:, None], keys[None, :], mask, options)
    if options.HARD != "none":
        logits = hit_logits(
            logits,
            row_masks,
            hard_columns[None, :],
            queries[:, None],
            keys[None, :],
            mask,
            options,
            options.HARD,
            not EDGE,
        )
        hard_columns = load_words(tables.hard, ahead + tl.arange(0, BN), mask.nk, 1, EDGE)
    p = tl.exp2(logits - offset[:, None])
    p = restrict(p, 0.0, queries[:, None], keys[None, :], mask, options, EDGE)
    if options.MASK == "keys" or options.MASK == "full":
        one = scores * 0.0 + 1.0
        one = restrict(one, 0.0, queries[:, None], keys[None, :], mask, options, EDGE)
        seen += tl.sum(one, 1)
    if options.DROP and options.MASK == "bias":
        reached = in_reach(logits, columns, dropping, row_masks, queries, keys, tables, mask, options, EDGE)
        seen += tl.sum(reached.to(tl.float32), 1)
    if behind(options.DROP):
        total += tl.sum(p, 1)
    if options.DROP:
        p = drop_keys(p, down(dropping), columns[None, :], queries[:, None], keys[None, :], tables, mask, options, EDGE)
        columns = load_words(tables.drop, ahead + tl.arange(0, BN), mask.nk, 1, EDGE)
    if detached(options.DROP):
        left += tl.sum(p, 1)
    if not behind(options.DROP):
        total += tl.sum(p, 1)
    v_tile = load_tile(v, keys, mask.nk, options.EV, options.BEV, EDGE)
    acc = add_product(acc, p.to(v_tile.dtype), v_tile, options.PRECISION)
    return acc, total, left, seen, columns, hard_columns


@triton.jit
def online_step(
    start, acc, total, left, seen, top, left_top,  # where it is, and what it changes
    q_tile, spared, dropping, row_masks, queries,  # of the program's rows
    k, v, tables, mask, scale, options,
    BN: tl.constexpr, EDGE: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """One key tile with a running maximum, `top`. Where SPARE, rows with `spared` = 1 drop nothing.

    Where weights are dropped, `total` and `top` are those of all keys; `left` is how many keys are kept, or (detached)
    Σ weights of those, by a running maximum of their own, `left_top`, which `acc` then has, too.
    """
    keys = start + tl.arange(0, BN)
    k_tile = load_tile(k, keys, mask.nk, options.E, options.BE, EDGE)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=options.PRECISION)
    scores = to_logits(scores, scale, row_masks, queries[:, None], keys[None, :], mask, options)
    if options.HARD != "none":
        hard_columns = load_words(tables.hard, keys, mask.nk, 1, EDGE)
        hit = hit_logits(
            scores,
            row_masks,
            hard_columns[None, :],
            queries[:, None],
            keys[None, :],
            mask,
            options,
            options.HARD,
            not EDGE,
        )
    scores = restrict(scores, -float("inf"), queries[:, None], keys[None, :], mask, options, EDGE)
    if options.MASK == "keys" or options.MASK == "full":
        seen += tl.sum((scores > -float("inf")).to(tl.float32), 1)
    if options.HARD != "none":
        scores = restrict(hit, -float("inf"), queries[:, None], keys[None, :], mask, options, EDGE)
    if options.DROP:
        columns = load_words(tables.drop, keys, mask.nk, 1, EDGE)
        numbers = draws(down(dropping), columns[None, :], queries[:, None], keys[None, :], tables, mask, options, EDGE)
        keep = numbers >= dropping.limit
        if SPARE:
            keep = keep | (spared[:, None] > 0)
        every = scores
        scores = tl.where(keep, scores, -float("inf"))
        if options.MASK == "bias":
            bias = load_bias(queries[:, None], keys[None, :], mask)
            seen += tl.sum(((scores > -float("inf")) & (bias > row_masks.floor)).to(tl.float32), 1)
        if behind(options.DROP):
            higher = tl.maximum(top, tl.max(every, 1))
            offset = tl.where(higher == -float("inf"), 0.0, higher)
            p = tl.exp2(every - offset[:, None])
            shrink = tl.exp2(top - offset)
            total = total * shrink + tl.sum(p, 1)
            top = higher
            if detached(options.DROP):
                higher = tl.maximum(left_top, tl.max(scores, 1))
                offset = tl.where(higher == -float("inf"), 0.0, higher)
                p = tl.exp2(scores - offset[:, None])
                shrink = tl.exp2(left_top - offset)
                left = left * shrink + tl.sum(p, 1)
                left_top = higher
            else:
                p = tl.where(keep, p, 0.0)
                left += tl.sum((scores > -float("inf")).to(tl.float32), 1)
    if not behind(options.DROP):
        higher = tl.maximum(top, tl.max(scores, 1))
        offset = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(scores - offset[:, None])
        shrink = tl.exp2(top - offset)
        total = total * shrink + tl.sum(p, 1)
        top = higher
    v_tile = load_tile(v, keys, mask.nk, options.EV, options.BEV, EDGE)
    acc = add_product(acc * shrink[:, None], p.to(v_tile.dtype), v_tile, options.PRECISION)
    return acc, total, left, seen, top, left_top


@triton.jit
def finished(acc, total, left, top, left_top, limit, spared, options):
    """The output of rows, their log-sum-exp as int32 bits, and what is left of their weights (`dropping.py`).

    spared: 1 where a row was left undropped, so that all of it is left. top, left_top: offsets of total and of left.
    """
    empty = total == 0.0
    share = tl.full(total.shape, 1.0, tl.float32)
    lse = top + tl.log2(total)
    if detached(options.DROP):
        result = acc / tl.where(left == 0.0, 1.0, left)[:, None]
        all_left = (spared > 0) | empty | (left == 0.0)
        share = tl.where(all_left, 1.0, tl.exp2(left_top + tl.log2(left) - lse))
        lse = tl.where(all_left, lse, left_top + tl.log2(left))
    else:
        result = acc / tl.where(empty, 1.0, total)[:, None]
        if behind(options.DROP):
            share = tl.where((spared > 0) | empty, 1.0, share_kept(limit))
            result = result / share[:, None]
            lse = lse + tl.log2(share)
    return result, tl.where(empty, float("inf"), lse).to(tl.int32, bitcast=True), share.to(tl.int32, bitcast=True)


@triton.jit
def forward_tile(
    first, b, h, q, k, v, out, stats, tables, mask, scale, options,
    BM: tl.constexpr, BN: tl.constexpr, TAIL_N: tl.constexpr, EDGE_M: tl.constexpr,
    FIXED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Everything of BM queries of a sample and head, from `first` on.

    Keys come in tiles of BN, what is left in one of TAIL_N.
    """
    queries = first + tl.arange(0, BM)
    q_tile = load_tile(q, queries, mask.nq, options.E, options.BE, EDGE_M)
    dropping = load_dropping(b, h, queries, mask.nk, tables, options.DROP)
    row_masks = expand_row_masks(load_row_masks(queries, mask, tables, options, EDGE_M), 1)
    end = tl.minimum(mask.nk, first + BM) if options.CAUSAL else mask.nk
    whole = end // BN * BN
    if options.MASK == "last":
        whole = (end - 1) // BN * BN
        mask = without_last(mask)
    acc = tl.zeros((BM, options.BEV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    left = tl.zeros((BM,), tl.float32)
    seen = tl.zeros((BM,), tl.float32)
    if FIXED:
        probed = tl.arange(0, PROBE)
        probe = load_tile(k, probed, mask.nk, options.E, options.BE, True)
        scores = tl.dot(q_tile, tl.trans(probe), input_precision=options.PRECISION)
        scores = to_logits(scores, scale, row_masks, queries[:, None], probed[None, :], mask, options)
        scores = restrict(scores, -float("inf"), queries[:, None], probed[None, :], mask, options, True)
        top = tl.max(scores, 1)
        top = tl.where(top == -float("inf"), 0.0, top)
        columns = tl.arange(0, BN)
        hard_columns = columns
        if options.HARD != "none":
            hard_columns = load_words(tables.hard, columns, mask.nk, 1, True)
        if options.DROP:
            columns = load_words(tables.drop, columns, mask.nk, 1, True)
        for start in tl.range(0, whole, BN):
            acc, total, left, seen, columns, hard_columns = fixed_step(
                start, tl.minimum(start + BN, whole - BN), acc, total, left, seen, columns, hard_columns,
                q_tile, top, dropping, row_masks, queries, k, v, tables, mask, scale, options, BN, False,
            )  # fmt: skip
        if whole < end:
            tail_columns = whole + tl.arange(0, TAIL_N)
            hard_tail = tail_columns
            if options.HARD != "none":
                hard_tail = load_words(tables.hard, tail_columns, mask.nk, 1, True)
            if options.DROP:
                tail_columns = load_words(tables.drop, tail_columns, mask.nk, 1, True)
            acc, total, left, seen, tail_columns, hard_tail = fixed_step(
                whole, whole, acc, total, left, seen, tail_columns, hard_tail,
                q_tile, top, dropping, row_masks, queries, k, v, tables, mask, scale, options, TAIL_N, True,
            )  # fmt: skip
        good = (total > LOWEST) & (total < HIGHEST)  # false for NaN
        left_top = top
        if detached(options.DROP):
            good = good & (left > LOWEST_LEFT)
        elif behind(options.DROP):  # a row that lost all keys has added nothing up
            good = good & (tl.max(tl.abs(acc), 1) != 0.0)
        if AT_ONCE and tl.min(good.to(tl.int32), 0) == 0:
            acc = tl.zeros((BM, options.BEV), tl.float32)
            total = tl.zeros((BM,), tl.float32)
            top = tl.full((BM,), -float("inf"), tl.float32)
            for start in tl.range(0, mask.nk, TAIL_N, num_stages=1):
                acc, total, left, seen, top, left_top = online_step(
                    start, acc, total, left, seen, top, left_top, q_tile, queries, dropping, row_masks, queries,
                    k, v, tables, mask, scale, options, TAIL_N, True, False,
                )  # fmt: skip
    else:
        top = tl.full((BM,), -float("inf"), tl.float32)
        left_top = top
        for start in tl.range(0, whole, BN):
            acc, total, left, seen, top, left_top = online_step(
                start, acc, total, left, seen, top, left_top, q_tile, queries, dropping, row_masks, queries,
                k, v, tables, mask, scale, options, BN, False, False,
            )  # fmt: skip
        if whole < end:
            acc, total, left, seen, top, left_top = online_step(
                whole, acc, total, left, seen, top, left_top, q_tile, queries, dropping, row_masks, queries,
                k, v, tables, mask, scale, options, TAIL_N, True, False,
            )  # fmt: skip
        good = top > -float("inf")
        if detached(options.DROP):
            good = good & (left_top + tl.log2(left) - top - tl.log2(total) > LEAST_LEFT)
        elif behind(options.DROP):
            good = good & (left > 0.0)
    if options.MASK == "keys" or options.MASK == "full":
        good = good | (seen == 0.0)  # no key allowed: zeros, as they are
    if options.DROP and options.MASK == "bias":
        good = good & (seen > 0.0)
    if EDGE_M:
        good = good | (queries >= mask.nq)

    empty = total == 0.0
    result, lse, share = finished(acc, total, left, top, left_top, dropping.limit, queries * 0, options)
    store_tile(out, result, queries, mask.nq, options.EV, options.BEV, EDGE_M)
    if behind(options.DROP):
        tl.store(stats.shares + queries, share, mask=queries < groups_of(mask.nq) * FLAG_ROWS)
    words = dropping.words
    if options.DROP:
        words = tl.where(empty, lse, words)
    if EDGE_M:
        stored = queries < groups_of(mask.nq) * FLAG_ROWS
        tl.store(stats.lse + queries, tl.where(queries < mask.nq, lse, INFINITY_BITS), mask=stored)
        if options.DROP:
            tl.store(stats.words + queries, tl.where(queries < mask.nq, words, INFINITY_BITS), mask=stored)
    else:
        tl.store(stats.lse + queries, lse)
        if options.DROP:
            tl.store(stats.words + queries, words)
    bad = tl.zeros((BM // FLAG_ROWS,), tl.int32)
    if not AT_ONCE:
        bad = tl.max(tl.reshape((~good).to(tl.int32), (BM // FLAG_ROWS, FLAG_ROWS)), 1)
    groups = first // FLAG_ROWS + tl.arange(0, BM // FLAG_ROWS)
    tl.store(stats.flags + groups, bad, mask=groups * FLAG_ROWS < mask.nq)


@triton.jit
def forward_kernel(
    q, k, v, out,  # a tensor, its strides along samples, heads and tokens
    stats,  # for the log-sum-exp, the row words, the flags, the shares
    tables,  # of dropping, of hard masking, cuts of its rows
    mask,  # elements, four strides, row tops, their three strides
    sizes,  # query heads, how many of them share a key head, queries, keys
    scale,  # of logits to the base of two
    NQ: tl.constexpr, NK: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TAIL_M: tl.constexpr, TAIL_N: tl.constexpr, FIXED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns a query tile: its rows of the output, their log-sum-exp and words, their flags.

    Grid: sample × head × query tile, tiles fastest. NQ and NK are 0 where sizes are no compile-time constants.
    """
    heads, group, nq, nk = sizes
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
    q = rows_of(q, b, h)
    k = rows_of(k, b, h // group)
    v = rows_of(v, b, h // group)
    out = rows_of(out, b, h)
    mask = mask_of(mask, b, h, nq, nk)
    groups = head.to(tl.int64) * groups_of(nq)
    row = groups * FLAG_ROWS
    stats = Stats(stats[0] + row, stats[1] + row, stats[2] + groups, stats[3] + row)
    tables = head_tables(tables, row, b, h, heads, nq, nk, DROP)
    if (nq % BM == 0) | (first + BM <= nq):
        forward_tile(
            first, b, h, q, k, v, out, stats, tables, mask, scale,
            Options(E, BE, EV, BEV, DROP, hard, CAUSAL, MASK, PRECISION), BM, BN, TAIL_N, False, FIXED, AT_ONCE,
        )  # fmt: skip
    else:
        forward_tile(
            first, b, h, q, k, v, out, stats, tables, mask, scale,
            Options(E, BE, EV, BEV, DROP, hard, CAUSAL, MASK, PRECISION), TAIL_M, BN, TAIL_N, True, FIXED, AT_ONCE,
        )  # fmt: skip
