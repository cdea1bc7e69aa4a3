"""What rows must know of an additive mask before attention runs: its largest entry among the keys that they see."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


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
