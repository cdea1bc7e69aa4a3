"""What rows must know of an additive mask before attention runs, their largest entry of it, and the mask's gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.attention.backward import score_gradients
from attemper.kernels.attention.seeds import head_tables, words_of_keys
from attemper.kernels.attention.whole import load_keys, load_queries
from attemper.kernels.common.groups import Dropping, Options, Stats
from attemper.kernels.common.tiles import FLAG_ROWS, INFINITY_BITS, groups_of, mask_of, rows_of


@triton.jit
def tops_kernel(
    mask,  # elements, and strides along samples, heads, queries and keys
    tops_ptr, heads, rows, nk,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program owns the tops of BM rows; −inf where a row is hidden altogether.

    Grid: sample × head × row tile of the mask itself, which may have fewer than attention has; tiles fastest.
    """
    mask_ptr, mask_b, mask_h, mask_q, mask_k = mask
    tiles = (rows + BM - 1) // BM
    pid = tl.program_id(0)
    head = pid // tiles
    first = (pid % tiles) * BM
    mask_ptr += (head // heads).to(tl.int64) * mask_b + (head % heads).to(tl.int64) * mask_h
    queries = first + tl.arange(0, BM)
    end = tl.minimum(nk, first + BM) if CAUSAL else nk
    top = tl.full((BM,), -float("inf"), tl.float32)
    for start in tl.range(0, end, BN):
        keys = start + tl.arange(0, BN)
        inside = (queries[:, None] < rows) & (keys[None, :] < nk)
        if CAUSAL:
            inside = inside & (keys[None, :] <= queries[:, None])
        at = mask_ptr + queries[:, None].to(tl.int64) * mask_q + keys[None, :] * mask_k
        bias = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(bias, 1))
    tl.store(tops_ptr + head.to(tl.int64) * rows + queries, top, mask=queries < rows)


@triton.jit
def gradient_kernel(
    q, k, v, out, dout,  # a tensor, its strides along samples, heads and tokens
    stats,  # log-sum-exps, row words, flags, shares
    tables,  # of dropping, of hard masking, cuts of its rows
    mask,  # elements, four strides, row tops, their three strides
    sums_ptr,  # (parts, samples and heads of the mask, queries, keys)
    sizes,  # query heads, how many of them share a key head, queries, keys
    spread,  # samples and heads of the mask, over how many samples and heads of attention each extends, parts
    scale,  # of logits to the base of two
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DROP: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns a tile of the mask, and adds up the gradients of logits over a part of the heads that share it.

    Its sums stay on chip until the end, so what is written is as large as the mask, times parts: as many as keep the
    GPU busy. There are no atomics: the same inputs give the same bits. Grid: sample and head of the mask × part × tile.
    """
    heads, group, nq, nk = sizes
    mask_samples, mask_heads, over_samples, over_heads, parts = spread
    across = (nk + BN - 1) // BN
    tiles = (nq + BM - 1) // BM * across
    tile = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles % parts
    place = tl.program_id(0) // tiles // parts
    first_query = tile // across * BM
    first_key = tile % across * BN
    groups = groups_of(nq)
    limit = 0
    extra = 0
    if DROP > 0:
        limit = tl.load(words_of_keys(tables[0], DROP) + nk + 1)
        extra = tl.load(words_of_keys(tables[0], DROP) + nk + 2)
    total = tl.zeros((BN, BM), tl.float32)
    members = over_samples * over_heads
    if CAUSAL:
        members = tl.where(first_key < first_query + BM, members, 0)  # no query of the tile sees a key of it
    for member in range(part, members, parts):
        b = (place // mask_heads + member // over_heads).to(tl.int64)
        h = (place % mask_heads + member % over_heads).to(tl.int64)
        head = b * heads + h
        row = head * groups * FLAG_ROWS
        at = mask_of(mask, b, h, nq, nk)
        known = head_tables(tables, row, b, h, heads, nq, nk, DROP)
        queries = load_queries(
            first_query, rows_of(q, b, h), rows_of(dout, b, h), rows_of(out, b, h),
            Stats(stats[0] + row, stats[1] + row, stats[2] + head * groups, stats[3] + row), known, at,
            Options(E, BE, EV, BEV, DROP, HARD, CAUSAL, "bias", PRECISION), BM, True,
        )  # fmt: skip
        keys = load_keys(
            first_key, rows_of(k, b, h // group), rows_of(v, b, h // group), known, nk,
            Options(E, BE, EV, BEV, DROP, HARD, CAUSAL, "bias", PRECISION), BN, True,
        )  # fmt: skip
        lse = queries.lse
        limits = queries.words
        if DROP > 0:  # a row that was left undropped has its log-sum-exp in place of its word
            spared = lse == INFINITY_BITS
            lse = tl.where(spared, queries.words, lse)
            limits = tl.where(spared, -2147483648, limit)
        _, ds = score_gradients(
            tl.zeros((BN, BEV), tl.float32), queries.q, queries.dout, lse[None, :], queries.delta[None, :],
            Dropping(queries.words[None, :], limits[None, :], extra), queries.row_masks, queries.queries,
            keys.k, keys.v, keys.columns, keys.hard_columns, keys.keys, known, at, scale,
            Options(E, BE, EV, BEV, DROP, HARD, CAUSAL, "bias", PRECISION), True, True,
        )  # fmt: skip
        total += ds
    queries = first_query + tl.arange(0, BM)
    keys = first_key + tl.arange(0, BN)
    to = (part.to(tl.int64) * mask_samples * mask_heads + place) * nq * nk
    inside = (queries[None, :] < nq) & (keys[:, None] < nk)
    tl.store(
        sums_ptr + to + queries[None, :].to(tl.int64) * nk + keys[:, None], total.to(sums_ptr.dtype.element_ty),
        mask=inside,
    )  # fmt: skip
