"""Small pieces that the forward and the backward kernel share."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import math
import os

import triton
import triton.language as tl

from attemper.ops import call

INFINITY_BITS = tl.constexpr(0x7F800000)
LOG2E = tl.constexpr(math.log2(math.e))
OUT_OF_REACH = tl.constexpr(call.OUT_OF_REACH)
ABSORBING = tl.constexpr(-1e9)  # an additive mask this low leaves no digit of what it is added to
FLAG_ROWS = tl.constexpr(16)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


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
    EDGE: keys may lie beyond nk. MASK: "none", "keys" (the same for all queries), "full", or "bias", which is added to
    the logits and forbids nothing by itself, or "last", which `without_last` has put into nk.
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


@triton.jit
def without_last(nk, mask_ptr):
    """How many keys there are, where MASK is "last": its one element says whether the last of nk is among them."""
    return nk - (tl.load(mask_ptr) == 0).to(tl.int32)


@triton.jit
def load_bias(queries, keys, nq, nk, mask_ptr, mask_q, mask_k):
    """An additive mask in float32, 0 beyond its borders."""
    at = mask_ptr + queries.to(tl.int64) * mask_q + keys * mask_k
    return tl.load(at, mask=(queries < nq) & (keys < nk), other=0.0).to(tl.float32)


@triton.jit
def load_rule(
    queries, nq, nk, tops_ptr, tops_q, cuts_ptr, hard_ptr,
    MASK: tl.constexpr, HARD: tl.constexpr, EDGE: tl.constexpr = True,
):  # fmt: skip
    """What rows know about additive masks and hard masking, as a tuple that the functions below take apart.

    floor, shift, live: an additive mask leaves keys above `floor` in reach. Where it has pushed a whole row so far down
    that nothing is left of the content, the content counts 0 times (`live`), and `shift` brings the row back.
    low, word, limit, zero: see `hits.py`.
    """
    floor = queries
    shift = queries
    live = queries
    if MASK == "bias":
        top = tl.load(tops_ptr + queries.to(tl.int64) * tops_q, mask=queries < nq, other=0.0)
        floor = top - OUT_OF_REACH
        live = tl.where(top < ABSORBING, 0.0, 1.0)
        shift = tl.where((top < ABSORBING) & (top > -float("inf")), top, 0.0)
    low = queries
    word = queries
    limit = 0
    zero = 0
    if HARD != "none":
        pairs = load_words(cuts_ptr, queries, nq, INFINITY_BITS, EDGE)
        low = pairs.to(tl.int32)
        word = (pairs >> 32).to(tl.int32)
        limit = tl.load(hard_ptr + nk + 1)
        zero = tl.load(hard_ptr + nk + 2)
    return floor, shift, live, low, word, limit, zero


@triton.jit
def expand_rule(rule, AXIS: tl.constexpr):
    """The tuple of `load_rule`, to be broadcast along an axis of a tile: 1 where queries run down, 0 where across."""
    floor, shift, live, low, word, limit, zero = rule
    return (
        tl.expand_dims(floor, AXIS), tl.expand_dims(shift, AXIS), tl.expand_dims(live, AXIS),
        tl.expand_dims(low, AXIS), tl.expand_dims(word, AXIS), limit, zero,
    )  # fmt: skip


@triton.jit
def to_logits(scores, scale, rule, queries, keys, nq, nk, mask_ptr, mask_q, mask_k, MASK: tl.constexpr):
    """Logits to the base of two: scores · scale, and the additive mask where there is one."""
    if MASK == "bias":
        bias = load_bias(queries, keys, nq, nk, mask_ptr, mask_q, mask_k)
        return scores * (rule[2] * scale) + (bias - rule[1]) * LOG2E
    return scores * scale


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """acc + a·b. In float32 tiles are summed up one by one: one chain through all of them would round more often."""
    if a.dtype == tl.float32 and PRECISION == "ieee" and not INTERPRETED:
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
