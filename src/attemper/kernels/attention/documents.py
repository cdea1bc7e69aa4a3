"""Kernels for packed documents: a program finds its document, and does there what others do in a sample of a batch.

The host does not know how long documents are. So there is room for the tiles of any: those of document d have the
numbers from offsets[d] // TILE + d on, and a program whose tile lies beyond the end of its document does nothing. What
is stored of rows (log-sum-exps, words, flags) has room in the same way, in groups of FLAG_ROWS rows, the heads of a
document one after the other. Every document has a table of its own, behind those of the documents before it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attemper.kernels.attention.backward import delta_rows, key_tile, query_tile
from attemper.kernels.attention.forward import forward_tile
from attemper.kernels.attention.repair import repair_rows, spared_rows
from attemper.kernels.common.groups import Mask, Options, Rows, SavedRows, Stats, Tables
from attemper.kernels.common.stream import starts_of, table_words
from attemper.kernels.common.tiles import FLAG_ROWS, groups_of

TABLE_TAIL = tl.constexpr(7)  # words of a table behind those of its keys


class Document(NamedTuple):
    """One document: its number, its first query and first key among all tokens, how many of each it has."""

    number: Any
    query: Any
    key: Any
    nq: Any
    nk: Any


@triton.jit
def number_of(offsets_ptr, documents, at, TILE: tl.constexpr, ROOM: tl.constexpr):
    """The document to which the tile, or each of the tiles `at` belongs, where ROOM are added for every document."""
    found = at * 0
    left = documents
    while left > 1:  # documents from `found` on are in question
        half = left // 2
        begins = tl.load(offsets_ptr + found + half).to(tl.int32) // TILE + (found + half) * ROOM
        found = tl.where(begins <= at, found + half, found)
        left -= half
    return found


@triton.jit
def document_at(offsets, number):
    """`Document` by its number. offsets: of the queries and of the keys."""
    query = tl.load(offsets[0] + number).to(tl.int32)
    key = tl.load(offsets[1] + number).to(tl.int32)
    nq = tl.load(offsets[0] + number + 1).to(tl.int32) - query
    nk = tl.load(offsets[1] + number + 1).to(tl.int32) - key
    return Document(number, query, key, nq, nk)


@triton.jit
def rows_from(x, h, first):
    """`Rows` of a head from a token on. x: a tensor (1, H, T, e), and its strides along samples, heads and tokens."""
    return Rows(x[0] + (h * x[2] + first.to(tl.int64) * x[3]), x[3])


@triton.jit
def groups_before(document, h, heads):
    """How many groups of rows have room before those of a document and head."""
    return (document.query // FLAG_ROWS + document.number).to(tl.int64) * heads + h * groups_of(document.nq)


@triton.jit
def tables_of(table_ptr, document):
    """`Tables` of a document; there is no hard masking here."""
    return Tables(table_ptr + document.key + document.number * TABLE_TAIL, table_ptr, table_ptr, table_ptr)


@triton.jit
def no_mask(ptr, document):
    """`Mask` without any. ptr: what to point at."""
    return Mask(ptr, 0, 0, ptr, 0, document.nq, document.nk)


@triton.jit(do_not_specialize=["limit", "documents", "size", "site", "path", "sample", "head"])
def document_tables_kernel(
    seed_ptr, limit_ptr, offsets_ptr, tables_ptr, limit, documents, size,
    site, path,  # where the stream starts
    sample, head,  # numbers of the first of each
    HAS_LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the table of every document (`stream.table_words`), `size` words in all.

    One program owns BLOCK words. Grid: blocks of the tables.
    """
    if HAS_LIMIT:
        limit = tl.load(limit_ptr)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = number_of(offsets_ptr, documents, at, 1, TABLE_TAIL)
    first = tl.load(offsets_ptr + number).to(tl.int32)
    keys = tl.load(offsets_ptr + number + 1).to(tl.int32) - first
    inside = at - first - number * TABLE_TAIL
    word = table_words(starts_of(seed_ptr, site, path), inside, keys, limit, sample, head, 0, 0)
    tl.store(tables_ptr + at, word, mask=at < size)


@triton.jit(do_not_specialize=["documents", "tiles"])
def document_forward_kernel(
    q, k, v, out,  # a tensor, its strides along samples, heads and tokens
    stats,  # for the log-sum-exp, the row words, the flags
    table_ptr, offsets, documents, tiles,  # tables, offsets of queries and keys, how many documents, tiles of a head
    heads, group, scale,  # query heads, how many of them share a key head, of logits to the base of two
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FIXED: tl.constexpr, AT_ONCE: tl.constexpr, DROP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns a query tile, as in `forward_kernel`. Grid: head × query tile of any document, tiles fastest."""
    tile = tl.program_id(0) % tiles
    h = (tl.program_id(0) // tiles).to(tl.int64)
    document = document_at(offsets, number_of(offsets[0], documents, tile, BM, 1))
    first = (tile - document.query // BM - document.number) * BM
    if first < document.nq:
        q_rows = rows_from(q, h, document.query)
        k_rows = rows_from(k, h // group, document.key)
        v_rows = rows_from(v, h // group, document.key)
        out_rows = rows_from(out, h, document.query)
        groups = groups_before(document, h, heads)
        stored = Stats(stats[0] + groups * FLAG_ROWS, stats[1] + groups * FLAG_ROWS, stats[2] + groups, stats[0])
        tables = tables_of(table_ptr, document)
        mask = no_mask(table_ptr, document)
        if first + BM <= document.nq:
            forward_tile(
                first, document.number, h, q_rows, k_rows, v_rows, out_rows, stored, tables, mask, scale,
                Options(E, BE, EV, BEV, DROP, "none", CAUSAL, "none", PRECISION), BM, BN, BN, False, FIXED, AT_ONCE,
            )  # fmt: skip
        else:
            forward_tile(
                first, document.number, h, q_rows, k_rows, v_rows, out_rows, stored, tables, mask, scale,
                Options(E, BE, EV, BEV, DROP, "none", CAUSAL, "none", PRECISION), BM, BN, BN, True, FIXED, AT_ONCE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["documents", "flags"])
def document_repair_kernel(
    q, k, v, out, stats, table_ptr, offsets, documents, flags,  # as above; how many flags there are
    heads, group, scale,
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr,
    DROP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns SPAN flags, and the rows of those that are set. Grid: spans of flags."""
    begin = tl.program_id(0) * SPAN
    at = begin + tl.arange(0, SPAN)
    if tl.max(tl.load(stats[2] + at, mask=at < flags, other=0), 0) > 0:
        for spot in range(begin, tl.minimum(begin + SPAN, flags)):
            if tl.load(stats[2] + spot) > 0:
                document = document_at(offsets, number_of(offsets[0], documents, spot // heads, FLAG_ROWS, 1))
                inside = spot - (document.query // FLAG_ROWS + document.number) * heads
                groups = groups_of(document.nq)
                h = (inside // groups).to(tl.int64)
                row = groups_before(document, h, heads) * FLAG_ROWS
                repair_rows(
                    (inside % groups) * FLAG_ROWS, document.number, h,
                    rows_from(q, h, document.query), rows_from(k, h // group, document.key),
                    rows_from(v, h // group, document.key), rows_from(out, h, document.query),
                    Stats(stats[0] + row, stats[1] + row, stats[2] + spot, stats[0]), tables_of(table_ptr, document),
                    no_mask(table_ptr, document), scale,
                    Options(E, BE, EV, BEV, DROP, "none", CAUSAL, "none", PRECISION), BN,
                )  # fmt: skip


@triton.jit(do_not_specialize=["documents", "tiles"])
def document_delta_kernel(
    out, dout, lse_ptr, pairs_ptr, offsets, documents, tiles, heads,
    EV: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One program owns BM rows, as in `delta_kernel`. Grid: head × row tile of any document, tiles fastest."""
    tile = tl.program_id(0) % tiles
    h = (tl.program_id(0) // tiles).to(tl.int64)
    document = document_at(offsets, number_of(offsets[0], documents, tile, BM, 1))
    first = (tile - document.query // BM - document.number) * BM
    if first < document.nq:
        row = groups_before(document, h, heads) * FLAG_ROWS
        delta_rows(
            first, rows_from(out, h, document.query), rows_from(dout, h, document.query), lse_ptr + row,
            lse_ptr, pairs_ptr + row, document.nq, EV, BEV, BM, False,
        )  # fmt: skip


@triton.jit
def keys_of_document(
    document, tile, h, q, k, v, dout, dk, dv, saved, table_ptr, heads, group, scales, options,
    BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile of a document and key head h; nothing beyond the end of the document."""
    first = (tile - document.key // BN - document.number) * BN
    if first < document.nk:
        row = groups_before(document, h * group, heads) * FLAG_ROWS
        q_rows = rows_from(q, h * group, document.query)
        dout_rows = rows_from(dout, h * group, document.query)
        k_rows = rows_from(k, h, document.key)
        v_rows = rows_from(v, h, document.key)
        dk_rows = rows_from(dk, h, document.key)
        dv_rows = rows_from(dv, h, document.key)
        stored = SavedRows(saved[0] + row, saved[1] + row)
        tables = tables_of(table_ptr, document)
        mask = no_mask(table_ptr, document)
        if first + BN <= document.nk:
            key_tile(
                first, group, (q[2], dout[2], 0, 0), q_rows, k_rows, v_rows, dout_rows, dk_rows, dv_rows, stored,
                tables, mask, scales, 0, options, "none", False, BN, BM, BM, False,
            )  # fmt: skip
        else:
            key_tile(
                first, group, (q[2], dout[2], 0, 0), q_rows, k_rows, v_rows, dout_rows, dk_rows, dv_rows, stored,
                tables, mask, scales, 0, options, "none", False, BN, BM, BM, True,
            )  # fmt: skip


@triton.jit
def queries_of_document(
    document, tile, h, q, k, v, dout, dq, saved, table_ptr, heads, group, scales, options,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile of a document and query head h; nothing beyond the end of the document."""
    first = (tile - document.query // BM - document.number) * BM
    if first < document.nq:
        row = groups_before(document, h, heads) * FLAG_ROWS
        q_rows = rows_from(q, h, document.query)
        dout_rows = rows_from(dout, h, document.query)
        dq_rows = rows_from(dq, h, document.query)
        k_rows = rows_from(k, h // group, document.key)
        v_rows = rows_from(v, h // group, document.key)
        stored = SavedRows(saved[0] + row, saved[1] + row)
        tables = tables_of(table_ptr, document)
        mask = no_mask(table_ptr, document)
        if first + BM <= document.nq:
            query_tile(
                first, q_rows, k_rows, v_rows, dout_rows, dq_rows, stored, tables, mask, scales, 0, options,
                "none", False, BM, BN, BN, False,
            )  # fmt: skip
        else:
            query_tile(
                first, q_rows, k_rows, v_rows, dout_rows, dq_rows, stored, tables, mask, scales, 0, options,
                "none", False, BM, BN, BN, True,
            )  # fmt: skip


@triton.jit(do_not_specialize=["documents", "key_tiles", "query_tiles"])
def document_backward_kernel(
    q, k, v, dout, dq, dk, dv,  # a tensor, its strides along samples, heads and tokens
    saved,  # row words; deltas paired with log-sum-exps
    table_ptr, offsets, documents, key_tiles, query_tiles,  # as above; tiles of a head
    heads, group, scales,  # as above; of scores, and of logits to the base of two
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr,
    KEY_N: tl.constexpr, KEY_M: tl.constexpr, QUERY_M: tl.constexpr, QUERY_N: tl.constexpr,
    DROP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns KEY_N keys, and writes their dK and dV, or QUERY_M queries of a head, and writes their dQ.

    Grid: key head × (key tiles of any document, then the query tiles of the group's heads), tiles fastest.
    """
    tiles = key_tiles + group * query_tiles
    tile = tl.program_id(0) % tiles
    h = (tl.program_id(0) // tiles).to(tl.int64)
    if tile < key_tiles:
        keys_of_document(
            document_at(offsets, number_of(offsets[1], documents, tile, KEY_N, 1)), tile, h,
            q, k, v, dout, dk, dv, saved, table_ptr, heads, group, scales,
            Options(E, BE, EV, BEV, DROP, "none", CAUSAL, "none", PRECISION), KEY_N, KEY_M,
        )  # fmt: skip
    else:
        tile -= key_tiles
        query_head = h * group + tile // query_tiles
        tile = tile % query_tiles
        queries_of_document(
            document_at(offsets, number_of(offsets[0], documents, tile, QUERY_M, 1)), tile, query_head,
            q, k, v, dout, dq, saved, table_ptr, heads, group, scales,
            Options(E, BE, EV, BEV, DROP, "none", CAUSAL, "none", PRECISION), QUERY_M, QUERY_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["documents"])
def document_spared_kernel(
    q, k, v, dout, dk, dv, saved, flags_ptr, table_ptr, offsets, documents, heads, group, scales,  # as above
    E: tl.constexpr, BE: tl.constexpr, EV: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dK and dV what the rows that were left undropped contribute.

    One program owns a key head of a document. Grid: key head × document, documents fastest.
    """
    document = document_at(offsets, tl.program_id(0) % documents)
    h = (tl.program_id(0) // documents).to(tl.int64)
    groups = groups_of(document.nq)
    begin = groups_before(document, h * group, heads)
    for chunk in range(0, group * groups, SPAN):
        at = chunk + tl.arange(0, SPAN)
        if tl.max(tl.load(flags_ptr + begin + at, mask=at < group * groups, other=0), 0) > 0:
            for spot in range(chunk, tl.minimum(chunk + SPAN, group * groups)):
                if tl.load(flags_ptr + begin + spot) > 0:
                    query_head = h * group + spot // groups
                    row = (begin + spot // groups * groups) * FLAG_ROWS
                    spared_rows(
                        (spot % groups) * FLAG_ROWS, rows_from(q, query_head, document.query),
                        rows_from(k, h, document.key), rows_from(v, h, document.key),
                        rows_from(dout, query_head, document.query),
                        rows_from(dk, h, document.key), rows_from(dv, h, document.key),
                        SavedRows(saved[0] + row, saved[1] + row), tables_of(table_ptr, document),
                        no_mask(table_ptr, document), scales,
                        Options(E, BE, EV, BEV, False, "none", CAUSAL, "none", PRECISION), BN,
                    )  # fmt: skip
