"""Eager loops over changing lengths on a GPU: nothing is compiled for ever, and nothing piles up."""

from __future__ import annotations

import gc
import random

import pytest
import torch

import attemper
from attemper.kernels.common import direct
from attemper.methods import DropKey

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def step(tokens: int, batch: int) -> None:
    shape = (batch, 4, tokens, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attemper.attention(q, k, v, methods=[DropKey(0.1)], seed=0, impl="triton").sum().backward()


def test_a_thousand_steps_of_random_lengths_compile_a_few_kernels_and_take_no_more_memory() -> None:
    """Half of a minute, nearly all of it the compiler's, in the first steps."""
    draw = random.Random(0)

    def some_steps(count: int) -> tuple[int, int]:
        for _ in range(count):
            step(draw.randint(130, 250), draw.randint(1, 9))
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated(), len(direct._known)

    some_steps(100)
    memory, kernels = some_steps(100)
    later, more = some_steps(800)
    assert later <= memory
    assert more <= kernels + 4, "of specialisations that are rare, such as a batch of one"
