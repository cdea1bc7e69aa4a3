"""What the kernels of attention do to a tile: load and store it, mask it, drop from it.

A tile of Q, K or V holds some tokens of one head, one row each, padded to a power of two columns. A tile of scores or
weights has queries down and keys across, or transposed. Rows beyond the last token are loaded as zeros where EDGE, the
compile-time constant of tiles that may reach over an end; other tiles are read and written without asking.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import math
import os

import triton
import triton.language as tl

from attemper.kernels.common.groups import Mask, RowMasks, Rows
from attemper.ops import call

INFINITY_BITS = tl.constexpr(0x7F800000)
LOG2E = tl.constexpr(math.log2(math.e))
OUT_OF_REACH = tl.constexpr(call.OUT_OF_REACH)
ABSORBING = tl.constexpr(-1e9)  # an additive mask this low leaves no digit of what it is added to
FLAG_ROWS = tl.constexpr(16)  # rows that share a flag
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.constexpr_function
def behind(drop):
    """Whether weights are dropped behind softmax; drop: a number of `dropping.py`."""
    return int(drop) % 4 >= 2


@triton.constexpr_function
def detached(drop):
    """Whether the weights that stay are divided by their sum, which has no gradient."""
    return int(drop) % 4 == 3


@triton.constexpr_function
def by_key(drop):
    """Whether all queries of a head drop the same keys."""
    return int(drop) // 4 % 2 == 1


@triton.constexpr_function
def by_sample(drop):
    """Whether all heads of a sample drop the same keys."""
    return int(drop) // 8 % 2 == 1


@triton.jit
def share_kept(limit):
    """1 − p, from the limit below which products of words are dropped."""
    return (2147483648.0 - limit.to(tl.float32)) * (1.0 / 4294967296.0)


@triton.jit
def groups_of(nq):
    """How many groups of FLAG_ROWS rows n rows make; numbers per row are stored in whole groups, which aligns them."""
    return (nq + FLAG_ROWS - 1) // FLAG_ROWS


@triton.jit
def rows_of(x, b, h):
    """`Rows` of a sample and head. x: a tensor (B, H, N, e), and its strides along samples, heads and tokens."""
    ptr, stride_b, stride_h, stride_n = x
    return Rows(ptr + (b * stride_b + h * stride_h), stride_n)


@triton.jit
def load_tile(x, rows, n, WIDTH: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr):
    """(rows, PADDED) elements of `Rows`, zeros beyond row n (where EDGE) and beyond column WIDTH."""
    columns = tl.arange(0, PADDED)
    at = x.ptr + rows[:, None] * x.stride + columns[None, :]
    if WIDTH == PADDED:
        if EDGE:
            return tl.load(at, mask=rows[:, None] < n, other=0.0)
        return tl.load(at)
    inside = columns[None, :] < WIDTH
    if EDGE:
        inside = inside & (rows[:, None] < n)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_tile(x, tile, rows, n, WIDTH: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr):
    """Write what `load_tile` reads."""
    columns = tl.arange(0, PADDED)
    at = x.ptr + rows[:, None] * x.stride + columns[None, :]
    tile = tile.to(x.ptr.dtype.element_ty)
    if WIDTH == PADDED:
        if EDGE:
            tl.store(at, tile, mask=rows[:, None] < n)
        else:
            tl.store(at, tile)
    else:
        inside = columns[None, :] < WIDTH
        if EDGE:
            inside = inside & (rows[:, None] < n)
        tl.store(at, tile, mask=inside)


@triton.jit
def load_words(ptr, at, n, other, EDGE: tl.constexpr):
    """One number per position, `other` beyond n (where EDGE)."""
    if EDGE:
        return tl.load(ptr + at, mask=at < n, other=other)
    return tl.load(ptr + at)


@triton.jit
def mask_of(mask, b, h, nq, nk):
    """`Mask` of a sample and head. mask: elements, their four strides, row tops, their three strides."""
    ptr, stride_b, stride_h, stride_q, stride_k, tops_ptr, tops_b, tops_h, tops_q = mask
    ptr += b * stride_b + h * stride_h
    tops_ptr += b * tops_b + h * tops_h
    return Mask(ptr, stride_q, stride_k, tops_ptr, tops_q, nq, nk)


@triton.jit
def mask_at(mask, ptr, tops_ptr):
    """The mask of another head, of which elements and row tops begin there."""
    return Mask(ptr, mask.stride_q, mask.stride_k, tops_ptr, mask.tops_stride, mask.nq, mask.nk)


@triton.jit
def without_last(mask):
    """A mask where MASK is "last", with the last key left out of nk where it is not there."""
    nk = mask.nk - (tl.load(mask.ptr) == 0).to(tl.int32)
    return Mask(mask.ptr, mask.stride_q, mask.stride_k, mask.tops_ptr, mask.tops_stride, mask.nq, nk)


@triton.jit
def restrict(x, fill, queries, keys, mask, options, EDGE: tl.constexpr):
    """`x` where the query may attend to the key, `fill` elsewhere.

    queries, keys: index tensors that broadcast to x, such as (BM, 1) and (1, BN), or transposed.
    EDGE: keys may lie beyond nk.
    """
    if EDGE:
        x = tl.where(keys < mask.nk, x, fill)
    if options.CAUSAL:
        x = tl.where(keys <= queries, x, fill)
    if options.MASK == "keys":
        x = tl.where(tl.load(mask.ptr + keys * mask.stride_k, mask=keys < mask.nk, other=0) != 0, x, fill)
    if options.MASK == "full":
        at = mask.ptr + queries.to(tl.int64) * mask.stride_q + keys * mask.stride_k
        x = tl.where(tl.load(at, mask=(queries < mask.nq) & (keys < mask.nk), other=0) != 0, x, fill)
    return x


@triton.jit
def load_bias(queries, keys, mask):
    """An additive mask in float32, 0 beyond its borders."""
    at = mask.ptr + queries.to(tl.int64) * mask.stride_q + keys * mask.stride_k
    return tl.load(at, mask=(queries < mask.nq) & (keys < mask.nk), other=0.0).to(tl.float32)


@triton.jit
def load_row_masks(queries, mask, tables, options, EDGE: tl.constexpr = True):
    """`RowMasks` of a tile, a number per query. mask: with all keys, before `without_last`."""
    floor = queries
    shift = queries
    live = queries
    if options.MASK == "bias":
        top = tl.load(mask.tops_ptr + queries.to(tl.int64) * mask.tops_stride, mask=queries < mask.nq, other=0.0)
        floor = top - OUT_OF_REACH
        live = tl.where(top < ABSORBING, 0.0, 1.0)
        shift = tl.where((top < ABSORBING) & (top > -float("inf")), top, 0.0)
    low = queries
    word = queries
    limit = 0
    zero = 0
    if options.HARD != "none":
        pairs = load_words(tables.cuts, queries, mask.nq, INFINITY_BITS, EDGE)
        low = pairs.to(tl.int32)
        word = (pairs >> 32).to(tl.int32)
        limit = tl.load(tables.hard + mask.nk + 1)
        zero = tl.load(tables.hard + mask.nk + 2)
    return RowMasks(floor, shift, live, low, word, limit, zero)


@triton.jit
def expand_row_masks(known, AXIS: tl.constexpr):
    """The same, to be broadcast along an axis of a tile: 1 where queries run down, 0 where across."""
    return RowMasks(
        tl.expand_dims(known.floor, AXIS), tl.expand_dims(known.shift, AXIS), tl.expand_dims(known.live, AXIS),
        tl.expand_dims(known.low, AXIS), tl.expand_dims(known.word, AXIS), known.limit, known.zero,
    )  # fmt: skip


@triton.jit
def to_logits(scores, scale, row_masks, queries, keys, mask, options):
    """Logits to the base of two: scores · scale, and the additive mask where there is one."""
    if options.MASK == "bias":
        bias = load_bias(queries, keys, mask)
        return scores * (row_masks.live * scale) + (bias - row_masks.shift) * LOG2E
    return scores * scale


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """acc + a·b. In float32 tiles are summed up one by one: one chain through all of them would round more often."""
    if a.dtype == tl.float32 and PRECISION != "tf32" and not INTERPRETED:
        product = tl.dot(a, b, input_precision=PRECISION)
        return tl.inline_asm_elementwise(  # the compiler would make one chain of a plain sum
            "add.rn.f32 $0, $1, $2;", "=f,f,f", [acc, product], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.dot(a, b, acc, input_precision=PRECISION)


# What `drop` does to four elements: multiply, compare, select. The products also add a word that is always zero. The
# assembler does not know that, and must first take the word from a weight. Otherwise it would compare long before the
# weights are there and carry the results over in packed bits, at nearly two more instructions per element.
DROP_ASM = tl.constexpr("""{
    .reg .pred k0, k1, k2, k3;
    .reg .b32 z, t0, t1, t2, t3;
    and.b32 z, $4, $20;
    mad.lo.s32 t0, $8, $12, z;
    mad.lo.s32 t1, $9, $13, z;
    mad.lo.s32 t2, $10, $14, z;
    mad.lo.s32 t3, $11, $15, z;
    setp.ge.s32 k0, t0, $16;
    setp.ge.s32 k1, t1, $17;
    setp.ge.s32 k2, t2, $18;
    setp.ge.s32 k3, t3, $19;
    selp.b32 $0, $4, 0, k0;
    selp.b32 $1, $5, 0, k1;
    selp.b32 $2, $6, 0, k2;
    selp.b32 $3, $7, 0, k3;
}""")
DROP_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r," + ",".join(["r"] * 20))


@triton.jit
def drop(p, words, columns, limit, zero, LARGE: tl.constexpr):
    """`p` where the element is kept, 0 elsewhere. `zero` is a word of value 0 from memory; LARGE: not a remainder."""
    if LARGE and not INTERPRETED:
        bits = tl.inline_asm_elementwise(
            DROP_ASM, DROP_CONSTRAINTS, [p.to(tl.int32, bitcast=True), words, columns, limit, zero],
            dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
        return bits.to(tl.float32, bitcast=True)
    return tl.where(words * columns >= limit, p, 0.0)
