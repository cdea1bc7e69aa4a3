"""The random stream of `attemper.ops.stream` inside FlashAttention-4's kernels, as its `mask_mod` and `score_mod`.

FlashAttention-4 compiles these functions into its kernels, so they stand in a file of their own, and importing it
imports the CuTe DSL. They read what `tables.py` wrote, int32 words in memory, through four aux_scalars:

aux_scalars[0]: the address of the limit below which keys are dropped, the word that columns start from, and the column
    word of every key.
aux_scalars[1]: the address of the head words (B, H), from which row words are mixed, or of the row words themselves,
    (B, H, rows).
aux_scalars[2], [3]: H, and the rows of a head.

These are addresses because FlashAttention-4 wraps every index into tensors it is given, a division for each.

A causal kernel takes no mask_mod and skips the tiles that nobody sees, so there a score_mod drops keys.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="no-untyped-call"
from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from flash_attn.cute.utils import scalar_to_ssa

from attemper.ops import stream
from attemper.ops.fa4.tables import HEADER

__all__ = ["mask_mod", "pass_gradient", "score_mod"]


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


def _keep(b, h, q, kv, aux_scalars, rows, columns):
    keys_table, words = _words_at(aux_scalars[0]), _words_at(aux_scalars[1])
    head = b * aux_scalars[2] + h
    row = Uint32(words[head * aux_scalars[3] + q] if rows == "table" else words[head])
    if rows == "mixed":
        row = _mix(row + Uint32(q) * Uint32(stream.QUERY_STEP)) | Uint32(1)
    return Int32(row * _column_word(kv, keys_table, columns)) >= Int32(keys_table[0])


@functools.cache
def mask_mod(rows, columns, causal):
    """A mask_mod: whether a query sees a key. rows, columns: "table" reads their words, "mixed" computes them."""

    @cute.jit
    def mask(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        b, h, q, kv = batch_idx[0], head_idx[0], q_idx[0], kv_idx[0]
        keep = _keep(b, h, q, kv, aux_scalars, rows, columns)
        if cutlass.const_expr(causal):
            keep = keep & (kv <= q)
        return scalar_to_ssa(keep, Boolean)

    return _named(mask, "mask", rows, columns, causal)


@functools.cache
def score_mod(rows, columns):
    """A score_mod: the logit of a kept key, −inf for a dropped one. It gets a few logits at once."""

    @cute.jit
    def score_or_inf(score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        kept = cute.make_rmem_tensor(cute.size(score.shape), Float32)
        for i in cutlass.range_constexpr(cute.size(score.shape)):
            keep = _keep(batch_idx[i], head_idx[i], q_idx[i], kv_idx[i], aux_scalars, rows, columns)
            kept[i] = cutlass.select_(keep, score[i], Float32(-Float32.inf))
        return kept.load()

    return _named(score_or_inf, "score", rows, columns)


@cute.jit
def pass_gradient(grad, score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    """The gradient of every score_mod here: a dropped key has weight 0, so its gradient is 0 already."""
    return grad


SOURCE = hashlib.sha256(Path(__file__).read_bytes() + Path(stream.__file__).read_bytes()).hexdigest()


def _named(mod, *key):
    """FlashAttention-4 finds its compiled kernels by this name. Its own would miss the functions that a mod calls."""
    mod.__cute_hash__ = f"{SOURCE} {key}"
    return mod


_named(pass_gradient, "gradient")
