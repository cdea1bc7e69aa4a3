"""The random stream of `attemper.ops.stream` inside FlashAttention-4's kernels, as its `mask_mod` and `score_mod`.

FlashAttention-4 compiles these functions into its kernels, so they stand in a file of their own, and importing it
imports the CuTe DSL. They read what `tables.py` wrote, int32 words in memory. By tensors:

aux_tensors[0]: (2 + keys,): the limit below which keys are dropped, the word that columns start from, and the column
    word of every key.
aux_tensors[1]: the head words (B, H), from which row words are mixed, or the row words themselves, (B, H, rows).

Or by address: aux_scalars are the addresses of these two, H, and the rows of a head. Where FlashAttention-4 is given
tensors it wraps all indices into the sequence, a division for each, so addresses are faster.

A causal kernel takes no mask_mod and skips the tiles that nobody sees, so there a score_mod drops keys.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="no-untyped-call"
from __future__ import annotations

import hashlib
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from flash_attn.cute.utils import scalar_to_ssa

from attemper.ops import stream
from attemper.ops.fa4.tables import HEADER

__all__ = ["MASKS", "SCORES", "pass_gradient"]


def _mix(x):
    """`stream.mix` of a Uint32."""
    x = (x ^ (x >> Uint32(16))) * Uint32(stream.MIX_1)
    x = (x ^ (x >> Uint32(15))) * Uint32(stream.MIX_2)
    return x ^ (x >> Uint32(16))


def _words_at(address):
    """The int32 words at an address, as a tensor without end."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1 << 30))


def _column_word(kv, keys_table, columns):
    if columns == "table":
        return Uint32(keys_table[kv + HEADER])
    x = Uint32(keys_table[1]) + Uint32(kv) * Uint32(stream.STEP)
    return ((x ^ (x >> Uint32(16))) * Uint32(stream.MIX_1)) | Uint32(1)


def _keep(b, h, q, kv, aux, rows, columns, way):
    if way == "tensors":
        keys_table, words = aux
        row = words[b, h, q] if rows == "table" else words[b, h]
    else:
        keys_table, words = _words_at(aux[0]), _words_at(aux[1])
        head = b * aux[2] + h
        row = words[head * aux[3] + q] if rows == "table" else words[head]
    row = Uint32(row)
    if rows == "mixed":
        row = _mix(row + Uint32(q) * Uint32(stream.QUERY_STEP)) | Uint32(1)
    return Int32(row * _column_word(kv, keys_table, columns)) >= Int32(keys_table[0])


def _mask_mod(rows, columns, way, causal):
    """A mask_mod: whether a query sees a key."""

    @cute.jit
    def by_tensors(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux):
        b, h, q, kv = batch_idx[0], head_idx[0], q_idx[0], kv_idx[0]
        keep = _keep(b, h, q, kv, aux, rows, columns, way)
        if cutlass.const_expr(causal):
            keep = keep & (kv <= q)
        return scalar_to_ssa(keep, Boolean)

    @cute.jit
    def by_address(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        return by_tensors(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_scalars)

    return _named(by_tensors if way == "tensors" else by_address, "mask", rows, columns, way, causal)


def _score_mod(rows, columns, way):
    """A score_mod: the logit of a kept key, −inf for a dropped one. It gets a few logits at once."""

    @cute.jit
    def by_tensors(score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        kept = cute.make_rmem_tensor(cute.size(score.shape), Float32)
        for i in cutlass.range_constexpr(cute.size(score.shape)):
            keep = _keep(batch_idx[i], head_idx[i], q_idx[i], kv_idx[i], aux_tensors, rows, columns, way)
            kept[i] = cutlass.select_(keep, score[i], Float32(-Float32.inf))
        return kept.load()

    @cute.jit
    def by_address(score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        return by_tensors(score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_scalars)

    return _named(by_tensors if way == "tensors" else by_address, "score", rows, columns, way)


@cute.jit
def pass_gradient(grad, score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=None):
    """The gradient of every score_mod here: a dropped key has weight 0, so its gradient is 0 already."""
    return grad


SOURCE = hashlib.sha256(Path(__file__).read_bytes() + Path(stream.__file__).read_bytes()).hexdigest()


def _named(mod, *key):
    """FlashAttention-4 finds its compiled kernels by this name. Its own would miss the functions that a mod calls."""
    mod.__cute_hash__ = f"{SOURCE} {key}"
    return mod


WORDS = ("mixed", "table")
MASKS = {
    (rows, columns, way, causal): _mask_mod(rows, columns, way, causal)
    for rows in WORDS
    for columns in WORDS
    for way in ("tensors", "address")
    for causal in (False, True)
}
"""By where row words come from, where column words come from, how both are found, and whether it is causal."""
SCORES = {key[:3]: _score_mod(*key[:3]) for key in MASKS}
_named(pass_gradient, "gradient")
