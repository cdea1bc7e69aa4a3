"""The random stream of `attemper.ops.stream` inside FlashAttention-4's kernels, as its `mask_mod` and `score_mod`.

FlashAttention-4 compiles these functions into its kernels, so they stand in a file of their own, and importing it
imports the CuTe DSL. They read what `tables.py` wrote, int32 words in memory, through aux_scalars:

the address of the limit below which keys are dropped, which the column words of all keys follow after HEADER words;
the address of the row words, (B, H, Nq);
for hard masking the address of the logits, (B, H, Nq), above which a row's largest lie;
H and Nq.

These are addresses because FlashAttention-4 wraps every index into tensors it is given, a division for each.

A causal kernel takes no mask_mod and skips the tiles that nobody sees, so there a score_mod drops keys. On Hopper the
kernels of `hopper.py` know these functions and do what they say for a whole tile at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="no-untyped-call"
from __future__ import annotations

import hashlib
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from flash_attn.cute.utils import scalar_to_ssa

from attemper.kernels.fa4 import tables
from attemper.kernels.fa4.tables import HEADER


def words_at(address, dtype=Int32):
    """The words at an address, as a tensor without end."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1 << 30))


def _keep(b, h, q, kv, aux_scalars):
    keys_table, row_words = words_at(aux_scalars[0]), words_at(aux_scalars[1])
    row = row_words[(b * aux_scalars[2] + h) * aux_scalars[3] + q]
    return row * keys_table[kv + HEADER] >= keys_table[0]


@cute.jit
def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    """Whether a query sees a key."""
    return scalar_to_ssa(_keep(batch_idx[0], head_idx[0], q_idx[0], kv_idx[0], aux_scalars), Boolean)


@cute.jit
def score_mod(score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    """The logit of a kept key, −inf for a dropped one. It gets a few logits at once."""
    kept = cute.make_rmem_tensor(cute.size(score.shape), Float32)
    for i in cutlass.range_constexpr(cute.size(score.shape)):
        keep = _keep(batch_idx[i], head_idx[i], q_idx[i], kv_idx[i], aux_scalars)
        kept[i] = cutlass.select_(keep, score[i], Float32(-Float32.inf))
    return kept.load()


@cute.jit
def pass_gradient(grad, score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    """The gradient of score_mod: a dropped key has weight 0, so its gradient is 0 already."""
    return grad


FILES = [*sorted(Path(__file__).parent.glob("*.py")), Path(tables.__file__)]
SOURCE = hashlib.sha256(b"".join(path.read_bytes() for path in FILES))


class HitMod:
    """The score_mod of hard masking, which sets logits to 0 ("zero") or −inf ("neg_inf"): what `hits.py` does by tiles.

    fills: to which.
    """

    def __init__(self, fills):
        self.fills = fills
        self.__cute_hash__ = f"{SOURCE.hexdigest()} hit {fills}"

    def __call__(self, *_):
        raise NotImplementedError("hard masking is inside of FlashAttention-4's kernels on Hopper only")


for _mod in (mask_mod, score_mod, pass_gradient):
    # FlashAttention-4 finds its compiled kernels by this name. Its own would miss what a mod calls, and other files.
    _mod.__cute_hash__ = f"{SOURCE.hexdigest()} {_mod.__name__}"
    _mod.drops_keys = _mod is not pass_gradient
