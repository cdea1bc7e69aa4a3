"""Small pieces that the forward and the backward kernel share."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import os

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(0x7F800000)
FLAG_ROWS = tl.constexpr(16)


@triton.jit
def groups_of(nq):
    """How many groups of FLAG_ROWS rows n rows make; numbers per row are stored in whole groups, which aligns them."""
    return (nq + FLAG_ROWS - 1) // FLAG_ROWS


@triton.jit
def load_tile(ptr, rows, stride, n, WIDTH: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr):
    """(rows, PADDED) elements, zeros beyond row n (where EDGE) and beyond column WIDTH."""
    columns = tl.arange(0, PADDED)
    at = ptr + rows[:, None] * stride + columns[None, :]
    if WIDTH == PADDED:
        if EDGE:
            return tl.load(at, mask=rows[:, None] < n, other=0.0)
        return tl.load(at)
    inside = columns[None, :] < WIDTH
    if EDGE:
        inside = inside & (rows[:, None] < n)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_tile(ptr, tile, rows, stride, n, WIDTH: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr):
    """Write what `load_tile` reads."""
    columns = tl.arange(0, PADDED)
    at = ptr + rows[:, None] * stride + columns[None, :]
    tile = tile.to(ptr.dtype.element_ty)
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
def restrict(
    x, fill, queries, keys, nq, nk, mask_ptr, mask_q, mask_k,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """`x` where the query may attend to the key, `fill` elsewhere.

    queries, keys: index tensors that broadcast to x, such as (BM, 1) and (1, BN), or transposed.
    EDGE: keys may lie beyond nk. MASK: "none", "keys" (the same for all queries) or "full".
    """
    if EDGE:
        x = tl.where(keys < nk, x, fill)
    if CAUSAL:
        x = tl.where(keys <= queries, x, fill)
    if MASK == "keys":
        x = tl.where(tl.load(mask_ptr + keys * mask_k, mask=keys < nk, other=0) != 0, x, fill)
    if MASK == "full":
        at = mask_ptr + queries.to(tl.int64) * mask_q + keys * mask_k
        x = tl.where(tl.load(at, mask=(queries < nq) & (keys < nk), other=0) != 0, x, fill)
    return x


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
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


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
