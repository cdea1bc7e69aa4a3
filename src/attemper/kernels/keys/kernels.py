"""The kernels behind `operators.py`. A program owns some tokens of one head and reads what it needs of the others."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code=assignment
from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.common.stream import column_words, mix, row_words, starts_of

NARROWEST = tl.constexpr(1e-6)  # these two as in `methods.blur`
FAINT = tl.constexpr(1e-18)


@triton.jit
def width_of(seed_ptr, site, path, sigma):
    """How wide the Gaussian is that the stream draws."""
    zero = tl.program_id(0) * 0
    starts = starts_of(seed_ptr, site, path)
    word = row_words(starts.rows, starts.other_rows, zero, zero, zero)
    return tl.maximum(word.to(tl.float32) * (2.0**-32) * sigma, NARROWEST)


@triton.jit
def inverse_of(norm):
    """1 / the sum of weights, 0 where there are none."""
    return tl.where(norm > FAINT, 1.0 / tl.maximum(norm, FAINT), 0.0)


@triton.jit(do_not_specialize=["site", "path"])
def blur_line_kernel(
    x, out,  # a tensor, its strides along samples, heads and tokens
    real,  # the same of the keys that are no padding, bytes (B, H, N); read where REAL
    inverse_ptr,  # (B, H, N), 1 / the sums of weights: written, or (TRANSPOSED) read
    seed_ptr, sigma,  # of the stream, the largest width
    runs, n,
    site, path,  # where the stream starts
    N: tl.constexpr, H: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, W: tl.constexpr, CAUSAL: tl.constexpr,
    REAL: tl.constexpr, TRANSPOSED: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mean over neighbours of every token, weighted by a Gaussian, and 1 / the sum of its weights.

    TRANSPOSED: its gradient; x is then that of the means.
    One program owns BLOCK runs, each RUN tokens in a row of one head. A tile has a run in every row, and elements of
    one of its tokens across. The tokens of a run share most of their neighbours, which are read once for all.
    Grid: blocks of BLOCK runs, counted through all heads, so that none is half empty but the last.
    N: n where it is a compile-time constant, else 0. To divide by a number that is not known takes long.
    """
    x_ptr, x_b, x_h, x_n = x
    out_ptr, out_b, out_h, out_n = out
    real_ptr, real_b, real_h, real_n = real
    if N > 0:
        n = N
    half: tl.constexpr = W // 2
    before: tl.constexpr = 0 if CAUSAL and TRANSPOSED else half
    behind: tl.constexpr = 0 if CAUSAL and not TRANSPOSED else half
    sign: tl.constexpr = -1 if TRANSPOSED else 1
    each = (n + RUN - 1) // RUN
    run = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = run // each
    first = tl.where(run < runs, (run % each) * RUN, n + half)  # so far out that no token is there
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    x_at = x_ptr + b * x_b + h * x_h + first * x_n
    out_at = out_ptr + b * out_b + h * out_h + first * out_n
    real_at = real_ptr + b * real_b + h * real_h + first * real_n
    inverse_at = inverse_ptr + head.to(tl.int64) * n + first
    columns = tl.arange(0, BE)
    inside = columns[None, :] < E

    values = ()
    present = ()
    shares = ()
    for shift in tl.static_range(-before, RUN + behind):
        there = (first + shift >= 0) & (first + shift < n)
        if REAL and not TRANSPOSED:
            there = there & (tl.load(real_at + shift * real_n, mask=there, other=0) != 0)
        at = (x_at + shift * x_n)[:, None] + columns[None, :]
        values += (tl.load(at, mask=there[:, None] & inside, other=0.0),)
        present += (there,)
        if TRANSPOSED:
            shares += (tl.load(inverse_at + shift, mask=there, other=0.0),)
    tl.debug_barrier()  # all of these are on their way before the first thing that has to wait, the seed
    width = width_of(seed_ptr, site, path, sigma)
    for own in tl.static_range(RUN):
        acc = tl.zeros((BLOCK, BE), tl.float32)
        norm = tl.zeros((BLOCK,), tl.float32)
        for offset in tl.static_range(-half, half + 1):
            if not CAUSAL or offset <= 0:
                tap = tl.exp(-0.5 * (offset * offset) / (width * width))
                weight = tl.where(present[own + before + sign * offset], tap, 0.0)
                if TRANSPOSED:
                    weight = weight * shares[own + before + sign * offset]
                acc += weight[:, None] * values[own + before + sign * offset].to(tl.float32)
                norm += weight
        there = first + own < n
        if not TRANSPOSED:
            inverse = inverse_of(norm)
            acc = acc * inverse[:, None]
            tl.store(inverse_at + own, inverse, mask=there)
        elif REAL:
            acc = tl.where(tl.load(real_at + own * real_n, mask=there, other=0)[:, None] != 0, acc, 0.0)
        at = (out_at + own * out_n)[:, None] + columns[None, :]
        tl.store(at, acc.to(at.dtype.element_ty), mask=there[:, None] & inside)


@triton.jit
def add_neighbour(
    acc, norm, tap, shift, there, x_at, x_n, real_at, real_n, inverse_at, columns, inside,
    REAL: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Add the token that lies `shift` tokens on, where there is one, with its weight; the pointers stand at one's own.

    TRANSPOSED: add what it gets from this token.
    """
    if REAL and not TRANSPOSED:
        there = there & (tl.load(real_at + shift * real_n, mask=there, other=0) != 0)
    weight = tl.where(there, tap, 0.0)
    if TRANSPOSED:
        weight = weight * tl.load(inverse_at + shift, mask=there, other=0.0)
    values = tl.load((x_at + shift * x_n)[:, None] + columns[None, :], mask=there[:, None] & inside, other=0.0)
    return acc + weight[:, None] * values.to(tl.float32), norm + weight


@triton.jit(do_not_specialize=["site", "path"])
def blur_grid_kernel(
    x, out, real, inverse_ptr, seed_ptr, sigma,  # as above
    sizes,  # tokens of all heads, heads, tokens of one
    image,  # tokens before it, its rows and columns
    site, path,  # as above
    N: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, W: tl.constexpr,
    REAL: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same where tokens behind the prefix lie on an image row by row; what stands before them stays as it is.

    One program owns BLOCK tokens. Grid: blocks of them, counted through all heads, so that none is half empty but the
    last.
    """
    x_ptr, x_b, x_h, x_n = x
    out_ptr, out_b, out_h, out_n = out
    real_ptr, real_b, real_h, real_n = real
    lines, heads, n = sizes
    prefix, rows, cols = image
    if N > 0:
        n = N
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there_at_all = line < lines
    head = line // n
    tokens = line % n
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    x_at = x_ptr + b * x_b + h * x_h + tokens * x_n
    out_at = out_ptr + b * out_b + h * out_h + tokens * out_n
    real_at = real_ptr + b * real_b + h * real_h + tokens * real_n
    inverse_at = inverse_ptr + line
    columns = tl.arange(0, BE)
    inside = columns[None, :] < E

    width = width_of(seed_ptr, site, path, sigma)
    half: tl.constexpr = W // 2
    acc = tl.zeros((BLOCK, BE), tl.float32)
    norm = tl.zeros((BLOCK,), tl.float32)
    place = tokens - prefix
    on_grid = (place >= 0) & there_at_all
    row = place // cols
    col = place % cols
    for dy in tl.static_range(-half, half + 1):
        for dx in tl.static_range(-half, half + 1):
            tap = tl.exp(-0.5 * (dy * dy + dx * dx) / (width * width))
            there_row = row + dy
            there_col = col + dx
            there = on_grid & (there_row >= 0) & (there_row < rows) & (there_col >= 0) & (there_col < cols)
            acc, norm = add_neighbour(
                acc, norm, tap, dy * cols + dx, there, x_at, x_n, real_at, real_n, inverse_at, columns, inside,
                REAL, TRANSPOSED,
            )  # fmt: skip

    if TRANSPOSED:
        if REAL:
            acc = tl.where(tl.load(real_at, mask=there_at_all, other=0)[:, None] != 0, acc, 0.0)
    else:
        inverse = inverse_of(norm)
        acc = acc * inverse[:, None]
        tl.store(inverse_at, inverse, mask=there_at_all)
    before = (there_at_all & (tokens < prefix))[:, None]
    own = tl.load(x_at[:, None] + columns[None, :], mask=before & inside, other=0.0)
    acc = tl.where(before, own.to(tl.float32), acc)
    at = out_at[:, None] + columns[None, :]
    tl.store(at, acc.to(at.dtype.element_ty), mask=there_at_all[:, None] & inside)


@triton.jit
def scores_of(row, starts, keys):
    """`Stream.scores`: words to sort keys by. row: the word of the head."""
    return mix(row * column_words(starts.columns, starts.other_columns, keys))


@triton.jit
def row_word_of(starts, index, sets, sample, head):
    """The word of one of the key sets of all samples, of which each has `sets`; sample, head: those of the first."""
    return row_words(starts.rows, starts.other_rows, index // sets + sample, index % sets + head, index * 0)


@triton.jit
def store_kept(kept_ptr, own, keys, count, row, starts, limit, SOMETIMES: tl.constexpr):
    """Whether each of the `count` first is kept; where SOMETIMES, the last of them is if its word reaches the limit."""
    kept = own >= 0
    if SOMETIMES:
        column = column_words(starts.columns, starts.other_columns, keys)
        kept = (own < count - 1) | ((row * column).to(tl.int32, bitcast=True) >= limit)
    tl.store(kept_ptr + own, kept.to(tl.uint8), mask=own < count)


@triton.jit(do_not_specialize=["limit", "site", "path", "sample", "head"])
def sort_kernel(
    seed_ptr,
    results,  # (sets, keys) order and rank, (sets, count) kept
    sizes,  # key sets of a sample, keys of a set, how many of them are drawn
    limit,  # of the last one that is drawn, read where SOMETIMES
    site, path,  # where the stream starts
    sample, head,  # numbers of the first
    SOMETIMES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sort keys by their scores, equal ones by their number.

    One program owns a key set, and sorts it on chip: BLOCK holds all of its keys. Grid: key sets of all samples.
    """
    order_ptr, rank_ptr, kept_ptr = results
    sets, keys, count = sizes
    index = tl.program_id(0)
    starts = starts_of(seed_ptr, site, path)
    row = row_word_of(starts, index, sets, sample, head)
    own = tl.arange(0, BLOCK)
    scores = scores_of(row, starts, own)
    # Signed 64-bit numbers that sort as the unsigned scores do; what is no key comes last.
    high = (scores ^ 0x80000000).to(tl.int32, bitcast=True).to(tl.int64) << 32
    order = tl.sort(tl.where(own < keys, high | own.to(tl.int64), 0x7FFFFFFFFFFFFFFF)) & 0xFFFFFFFF
    base = index.to(tl.int64) * keys
    tl.store(order_ptr + base + own, order, mask=own < keys)
    tl.store(rank_ptr + base + order, own.to(tl.int64), mask=own < keys)
    store_kept(kept_ptr + index.to(tl.int64) * count, own, keys, count, row, starts, limit, SOMETIMES)


@triton.jit(do_not_specialize=["limit", "site", "path", "sample", "head"])
def order_kernel(
    seed_ptr, results, sizes, limit, site, path, sample, head,  # as above
    SOMETIMES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`sort_kernel` for any number of keys: one program owns BLOCK keys, and counts for each who comes before.

    Grid: key set × block of keys, blocks fastest.
    """
    order_ptr, rank_ptr, kept_ptr = results
    sets, keys, count = sizes
    blocks = (keys + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    index = pid // blocks
    starts = starts_of(seed_ptr, site, path)
    row = row_word_of(starts, index, sets, sample, head)
    own = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    mine = scores_of(row, starts, own)
    rank = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, keys, BLOCK):
        other = first + tl.arange(0, BLOCK)
        theirs = scores_of(row, starts, other)
        earlier = (theirs[None, :] < mine[:, None]) | (
            (theirs[None, :] == mine[:, None]) & (other[None, :] < own[:, None])
        )
        rank += tl.sum((earlier & (other[None, :] < keys)).to(tl.int32), 1)
    base = index.to(tl.int64) * keys
    tl.store(rank_ptr + base + own, rank.to(tl.int64), mask=own < keys)
    tl.store(order_ptr + base + rank, own.to(tl.int64), mask=own < keys)
    store_kept(kept_ptr + index.to(tl.int64) * count, own, keys, count, row, starts, limit, SOMETIMES)


@triton.jit
def take_kernel(
    x, out,  # a tensor, its strides along samples, heads and tokens
    order,  # places of tokens, strides along samples and sets
    sizes,  # heads of the result, how many of them share one of x, tokens of the result
    E: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy tokens in the order in which they were drawn. One program owns BLOCK tokens of the result.

    Grid: sample × head of the result × block, blocks fastest.
    """
    x_ptr, x_b, x_h, x_n = x
    out_ptr, out_b, out_h, out_n = out
    order_ptr, order_b, order_h = order
    heads, group, count = sizes
    blocks = (count + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    head = pid // blocks
    places = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    columns = tl.arange(0, BE)
    at = tl.load(order_ptr + b * order_b + h * order_h + places, mask=places < count, other=0).to(tl.int32)
    mask = (places < count)[:, None] & (columns[None, :] < E)
    x_ptr += b * x_b + (h // group) * x_h
    out_ptr += b * out_b + h * out_h
    values = tl.load(x_ptr + at[:, None] * x_n + columns[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + places[:, None] * out_n + columns[None, :], values, mask=mask)


@triton.jit
def put_back_kernel(
    dout, dx,  # a tensor, its strides along samples, heads and tokens
    rank,  # where tokens went, strides along samples and sets
    sizes,  # heads of dx, how many of dout share one, tokens of dx, tokens of dout
    E: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of `take_kernel`. One program owns BLOCK tokens of dx; each looks where it went, so none collide.

    Grid: sample × head of dx × block, blocks fastest.
    """
    dout_ptr, dout_b, dout_h, dout_n = dout
    dx_ptr, dx_b, dx_h, dx_n = dx
    rank_ptr, rank_b, rank_h = rank
    heads, group, n, count = sizes
    blocks = (n + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    head = pid // blocks
    tokens = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    columns = tl.arange(0, BE)
    acc = tl.zeros((BLOCK, BE), tl.float32)
    for member in range(group):
        of = h * group + member
        place = tl.load(rank_ptr + b * rank_b + of * rank_h + tokens, mask=tokens < n, other=count).to(tl.int32)
        mask = (place < count)[:, None] & (columns[None, :] < E)
        at = dout_ptr + b * dout_b + of * dout_h + place[:, None] * dout_n + columns[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = dx_ptr + b * dx_b + h * dx_h + tokens[:, None] * dx_n + columns[None, :]
    tl.store(at, acc.to(dx_ptr.dtype.element_ty), mask=(tokens < n)[:, None] & (columns[None, :] < E))
