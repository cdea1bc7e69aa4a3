"""Keys that seeds drop on an image grid, inside the kernels: structured DropKey, with the masks of the reference.

Every row of logits has seeds of its own, and each drops a window or two stripes of keys (`perturbation.SeedDrop`). A
mask of N × N bits would be an N × N tensor still, so none is stored; each of the two has a form in which an element
costs little and memory stays linear.

Windows: a key is dropped if one of the w × w places at which a window over it begins is a seed. An element asks them
all, by the least of w × w products: some 20 instructions at w = 3, where independent keys take 3. In the order of keys
those places are the same distances before every key, so the words of places stand in a table like those of keys. A
place at which no window fits has NEVER in place of its word, and the words of all places lie behind so many of NEVER
that nobody looks before the table.

Stripes: a key is dropped if its line or its column of the image is. So a row of logits has a bit for every line and for
every column, made once by `stripes_kernel`: two words on grids of up to 32 × 32 keys, some N^½ / 16 on larger ones.
An element takes two shifts.

Both give numbers of which those below a limit are dropped, so a limit below all numbers spares a row, as elsewhere.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.common.groups import Dropping, Tables
from attemper.kernels.common.stream import column_words, row_words, starts_of, table_row_words, table_words
from attemper.kernels.common.tiles import by_key, by_sample, drop, load_words

NEVER = tl.constexpr(-(2**31))  # times an odd word it is itself, and one less is the largest number there is
TABLE_TAIL = tl.constexpr(7)  # words of a table behind those of its keys
UNROLLED = tl.constexpr(5)  # wider windows are gone through in a loop, which is compiled sooner and runs slower
HELD = tl.constexpr(4)  # an element chooses among so many words of a row; of more it loads its own
UNSPECIALISED = [
    "limit", "keys", "prefix", "lines", "columns", "lead", "rows", "heads", "queries", "half",
    "site", "path", "sample", "head", "query",
]  # fmt: skip
"""A new seed, site, rate, call, place or size compiles nothing."""


# -------------------------------------------------------------------------------------------- numbers of `dropping.py`
@triton.constexpr_function
def window(drop):
    """How wide the windows are that seeds drop; 0: they drop none."""
    number = int(drop) // 16
    return number if number % 2 else 0


@triton.constexpr_function
def stripe_words(drop):
    """How many words a row has for the lines of the image, and for its columns, where seeds drop stripes; else 0."""
    number = int(drop) // 16
    return 0 if number % 2 else number // 2


# ----------------------------------------------------------------------------------------------- what rows have of them
@triton.jit
def words_of_keys(table, DROP: tl.constexpr):
    """Where the words of keys begin in a table."""
    if window(DROP) > 0:
        table += tl.load(table)
    return table


@triton.jit
def head_tables(tables, row, b, h, heads, nq, nk, DROP: tl.constexpr):
    """`Tables` of a head. tables: of dropping, of hard masking, cuts; row: how far its cuts are from the first ones."""
    stripes = tables[0]
    if stripe_words(DROP) > 0:
        head = b if by_sample(DROP) else b * heads + h
        stripes += nk + TABLE_TAIL + head * stripes_step(nq, DROP)
    return Tables(words_of_keys(tables[0], DROP), tables[1], tables[2] + row, stripes)


@triton.jit
def stripes_step(nq, DROP: tl.constexpr):
    """How far the stripes of a head are from those of the next."""
    return (1 if by_key(DROP) else nq) * (2 * stripe_words(DROP))


@triton.jit
def dropping_words(b, h, queries, nk, tables, DROP: tl.constexpr):
    """The word of each query; numbers that nobody reads where seeds drop stripes."""
    if stripe_words(DROP) > 0:
        return queries
    head = h * 0 if by_sample(DROP) else h
    return table_row_words(tables.drop, nk, b, head, queries * 0 if by_key(DROP) else queries)


@triton.jit
def load_dropping(b, h, queries, nk, tables, DROP: tl.constexpr):
    """`Dropping` of a query tile of sample b and head h; numbers that nobody reads where nothing is dropped."""
    if DROP:
        limit = tl.load(tables.drop + nk + 1)
        extra = tl.load(tables.drop + nk + 2)
        words = dropping_words(b, h, queries, nk, tables, DROP)
    else:
        limit = 0
        extra = 0
        words = queries
    return Dropping(words, limit, extra)


@triton.jit
def down(dropping):
    """The same of rows that run down a tile."""
    return Dropping(dropping.words[:, None], dropping.limit, dropping.extra)


# --------------------------------------------------------------------------------------------------------- of elements
@triton.jit
def draws(dropping, columns, queries, keys, tables, mask, options, EDGE: tl.constexpr):
    """A number for every element of a tile; the element is dropped if that is below its row's limit.

    queries, keys, the words of dropping and the words of keys (columns): index tensors that broadcast to the tile.
    """
    if window(options.DROP) > 0:
        numbers = least_in_windows(dropping, columns, keys, tables, mask, window(options.DROP), EDGE)
    elif stripe_words(options.DROP) > 0:
        rows = queries * 0 if by_key(options.DROP) else queries
        numbers = -in_stripes(columns, rows, queries < mask.nq, tables, stripe_words(options.DROP))
    else:
        numbers = dropping.words * columns
    return numbers


@triton.jit
def least_in_windows(dropping, columns, keys, tables, mask, W: tl.constexpr, EDGE: tl.constexpr):
    """The least product of a row's word and those of the places of all windows over a key, less one."""
    least = dropping.words * columns - 1
    if W <= UNROLLED:
        for place in tl.static_range(1, W * W):
            before = keys - (place // W * dropping.extra + place % W)
            least = tl.minimum(least, dropping.words * load_words(tables.drop, before, mask.nk, NEVER, EDGE) - 1)
    else:
        for place in range(1, W * W):
            before = keys - (place // W * dropping.extra + place % W)
            least = tl.minimum(least, dropping.words * load_words(tables.drop, before, mask.nk, NEVER, EDGE) - 1)
    return least


@triton.jit
def in_stripes(places, rows, there, tables, WORDS: tl.constexpr):
    """1 where a row drops the line or the column of a key, else 0. places: line · 2¹⁶ + column, −1 before the image."""
    lines = chosen_word((places >> 16) & 0x7FFF, tables.stripes + rows * (2 * WORDS), there, WORDS)
    columns = chosen_word(places & 0xFFFF, tables.stripes + rows * (2 * WORDS) + WORDS, there, WORDS)
    return ((lines >> ((places >> 16) & 31)) | (columns >> (places & 31))) & (places >= 0).to(tl.int32)


@triton.jit
def chosen_word(bits, words_ptr, there, WORDS: tl.constexpr):
    """The word of a row that has the bit of a key; the words of a row lie side by side."""
    if WORDS <= HELD:
        chosen = tl.load(words_ptr, mask=there, other=0)
        for i in tl.static_range(1, WORDS):
            chosen = tl.where(bits // 32 == i, tl.load(words_ptr + i, mask=there, other=0), chosen)
    else:
        chosen = tl.load(words_ptr + tl.minimum(bits // 32, WORDS - 1), mask=there, other=0)
    return chosen


@triton.jit
def drop_keys(p, dropping, columns, queries, keys, tables, mask, options, EDGE: tl.constexpr):
    """`p` where the element is kept, 0 elsewhere; the arguments are those of `draws`."""
    if window(options.DROP) > 0 or stripe_words(options.DROP) > 0:
        numbers = draws(dropping, columns, queries, keys, tables, mask, options, EDGE)
        p = tl.where(numbers >= dropping.limit, p, 0.0)
    else:
        p = drop(p, dropping.words, columns, dropping.limit, dropping.extra, not EDGE)
    return p


# -------------------------------------------------------------------------------------------------------------- tables
@triton.jit(do_not_specialize=UNSPECIALISED)
def windows_kernel(
    seed_ptr, limit_ptr, table_ptr, limit, keys,
    prefix, lines, columns,  # keys before the image, its size
    lead,  # words before those of the keys, the first of them this number
    site, path,  # where the stream starts
    sample, head, query,  # numbers of the first of each
    HAS_LIMIT: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the table of windows: `lead` and words of NEVER; a word for every key; what rows need (`table_words`).

    The word of a key is that of the place at which it is the first corner of a window. All products are odd, so that
    less one they lie below the even number next to the limit just where they lie below the limit.
    One program owns BLOCK words. Grid: blocks of the table.
    """
    if HAS_LIMIT:
        limit = tl.load(limit_ptr)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = at - lead
    place = tl.maximum(key - prefix, 0)
    line = place // columns
    column = place % columns
    fits = (key >= prefix) & (line <= lines - W) & (column <= columns - W)
    starts = starts_of(seed_ptr, site, path)
    word = column_words(starts.columns, starts.other_columns, line * (columns - W + 1) + column)
    word = tl.where(fits, word.to(tl.int32, bitcast=True), NEVER)
    of_rows = table_words(starts, key, keys, limit & -2, sample, head, query, 0)
    word = tl.where(key < keys, word, tl.where(key == keys + 2, columns, of_rows))
    tl.store(table_ptr + at, tl.where(at == 0, lead, word), mask=key < keys + TABLE_TAIL)


@triton.jit
def bits_near(at, half, words):
    """The bits from at − half to at + half, of words that have 32 each. words: their numbers."""
    first = tl.minimum(tl.maximum(at - half - 32 * words, 0), 31)
    last = tl.maximum(tl.minimum(at + half - 32 * words, 31), 0)
    some = (at - half <= 32 * words + 31) & (at + half >= 32 * words)
    ones = tl.full(words.shape, 0xFFFFFFFF, tl.uint32)
    bits = (ones << first.to(tl.uint32)) & (ones >> (31 - last).to(tl.uint32))
    return tl.where(some, bits.to(tl.int32, bitcast=True), 0)


@triton.jit(do_not_specialize=UNSPECIALISED)
def stripes_kernel(
    seed_ptr, limit_ptr, table_ptr, limit, keys,
    prefix, lines, columns,  # keys before the image, its size
    rows, heads, queries, half,  # rows that have seeds, heads and queries of a sample; how far a stripe reaches
    site, path,  # where the stream starts
    sample, head, query,  # numbers of the first of each
    HAS_LIMIT: tl.constexpr, WORDS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the table of stripes: where in the image every key lies; 7 words, 0; the bits of every row.

    One program owns the bits of BM rows: WORDS words for the lines that they drop, and WORDS for the columns. Grid:
    blocks of rows. What is the same for all rows all programs write together.
    """
    if HAS_LIMIT:
        limit = tl.load(limit_ptr)
    for first in range(tl.program_id(0) * BLOCK, keys + TABLE_TAIL, tl.num_programs(0) * BLOCK):
        key = first + tl.arange(0, BLOCK)
        place = tl.maximum(key - prefix, 0)
        where = tl.where(key < prefix, -1, (place // columns << 16) | place % columns)
        tl.store(table_ptr + key, tl.where(key < keys, where, 0), mask=key < keys + TABLE_TAIL)

    starts = starts_of(seed_ptr, site, path)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    of_sample = row // (heads * queries) + sample
    of_head = row // queries % heads + head
    words = row_words(starts.rows, starts.other_rows, of_sample, of_head, row % queries + query)
    across = tl.arange(0, 32 * WORDS)
    number = tl.arange(0, WORDS)
    of_lines = tl.zeros((BM, WORDS), tl.int32)
    of_columns = tl.zeros((BM, WORDS), tl.int32)
    columns_hit = tl.zeros((BM, 32 * WORDS), tl.int32)
    for line in range(lines):
        seeds = column_words(starts.columns, starts.other_columns, line * columns + across)
        product = (words[:, None] * seeds[None, :]).to(tl.int32, bitcast=True)
        hit = ((product < limit) & (across < columns)[None, :]).to(tl.int32)
        columns_hit = columns_hit | hit
        of_lines = of_lines | tl.where(tl.max(hit, 1)[:, None] > 0, bits_near(line, half, number)[None, :], 0)
    for column in range(columns):
        hit = tl.max(tl.where((across == column)[None, :], columns_hit, 0), 1)
        of_columns = of_columns | tl.where(hit[:, None] > 0, bits_near(column, half, number)[None, :], 0)
    at = table_ptr + keys + TABLE_TAIL + row.to(tl.int64)[:, None] * (2 * WORDS) + number[None, :]
    tl.store(at, of_lines, mask=(row < rows)[:, None])
    tl.store(at + WORDS, of_columns, mask=(row < rows)[:, None])
