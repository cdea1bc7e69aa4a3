"""FlashAttention-4's kernels with keys dropped, compiled for an H200 on a machine without a GPU.

`test_fa4.py` runs this file where flash-attn-4 is installed, with a head width as its argument.
"""

from __future__ import annotations

import contextlib
import os
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS = 577
CASES = ((False, 4, "none"), (True, 4, "none"), (False, 2, "none"), (False, 4, "zero"), (False, 2, "neg_inf"))


def compile_kernels(width: int, causal: bool, kv_heads: int, fill: str) -> None:
    """Both passes of one kind of call; backward alone of hard masking."""
    from attemper.kernels.fa4 import operators as library

    batch, heads = 2, 4
    with FakeTensorMode():
        q, k, v = (
            torch.empty(batch, h, TOKENS, width, device="cuda", dtype=torch.bfloat16)
            for h in (heads, kv_heads, kv_heads)
        )
        words = torch.empty(8, device="cuda", dtype=torch.int32)
        out, stats = library._forward_fake(q, k, v)
        if fill == "none":
            library._forward(q, k, v, words, width**-0.5, causal)
        library._backward(out, q, k, v, out, stats, words, width**-0.5, causal, False, fill)


if __name__ == "__main__":
    os.environ.update(FLASH_ATTENTION_ARCH="sm_90", CUTE_DSL_ARCH="sm_90a", FLASH_ATTENTION_NUM_SMS="132")
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.device = lambda device: contextlib.nullcontext()
    for case in CASES:
        compile_kernels(int(sys.argv[1]), *case)
