"""The kernel behind `mixing.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix_kernel(x_ptr, out_ptr, tokens, channels, BN: tl.constexpr, BC: tl.constexpr):
    """(x + mean over the tokens) / 2. x, out: (samples, tokens, channels) without gaps.

    One program owns BC channels of a sample, and goes over its tokens twice, BN at a time. Grid: samples × blocks of
    channels.
    """
    first = tl.program_id(0).to(tl.int64) * tokens * channels
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = column < channels
    total = tl.zeros((BN, BC), tl.float32)
    for start in range(0, tokens, BN):
        row = start + tl.arange(0, BN)
        there = (row < tokens)[:, None] & inside[None, :]
        at = first + row[:, None] * channels + column[None, :]
        total += tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / tokens
    for start in range(0, tokens, BN):
        row = start + tl.arange(0, BN)
        there = (row < tokens)[:, None] & inside[None, :]
        at = first + row[:, None] * channels + column[None, :]
        x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, ((x + mean[None, :]) * 0.5).to(out_ptr.dtype.element_ty), mask=there)
