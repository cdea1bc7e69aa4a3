"""Masks that come quickly, by numpy on a CPU and by one kernel on a GPU, are the stream's bit for bit."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import attemper
from attemper.methods import FeedForwardDropout
from attemper.ops.stream import Offsets, Stream, column_words, row_words, threshold
from interpreter import in_parts, needs_triton, run_cases

SEEDS = st.one_of(st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]), st.integers(-(2**63), 2**63 - 1))
WORDS = st.integers(-(2**31), 2**31 - 1)
PLACES = st.integers(0, 2**31 - 100)
STREAMS = st.builds(
    lambda seed, lane, site, call, at: Stream(torch.tensor(seed), lane, site=site, call=call, at=Offsets(*at)),
    SEEDS, st.integers(0, 255), WORDS, st.integers(0, 10_000), st.tuples(PLACES, PLACES, PLACES, PLACES),
)  # fmt: skip


class Watching(TorchDispatchMode):
    """Sees every operation, as fake tensors and counters do; whoever watches is shown the operations of torch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@given(STREAMS, st.tuples(*(st.integers(0, 5) for _ in range(4))))
def test_words_are_those_of_the_stream(stream: Stream, shape: tuple[int, int, int, int]) -> None:
    batch, heads, queries, keys = shape
    cpu = torch.device("cpu")
    assert stream.is_quick
    assert torch.equal(
        stream.row_words(batch, heads, queries), row_words(stream.rows, (batch, heads, queries), stream.at, cpu)
    )
    assert torch.equal(stream.column_words(keys), column_words(stream.columns, keys, stream.at.key, cpu))


@given(STREAMS, st.floats(0, 0.999))
def test_whoever_watches_draws_the_same(stream: Stream, p: float) -> None:
    shape = (2, 3, 4, 5)
    ours = stream.keep(shape, p), stream.uniform(), stream.scores(2, 3, 5)
    with Watching():
        assert not stream.is_quick
        other = stream.placed(stream.at)
        theirs = other.keep(shape, p), other.uniform(), other.scores(2, 3, 5)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(ours[0], stream.products(*shape) >= threshold(p))


def test_torchs_transforms_and_compilers_draw_the_same() -> None:
    x = torch.randn(3, 5, 8)

    def drop(x: Tensor) -> Tensor:
        return FeedForwardDropout(0.4).map_tokens(x, None, Stream(torch.tensor(7)))  # type: ignore[arg-type]

    expected = drop(x)
    assert torch.equal(torch.func.vjp(drop, x)[0], expected)
    assert torch.equal(torch.compile(drop, backend="aot_eager", fullgraph=True)(x), expected)


BRANCHES = ("droppath(0.3)", "ffdropout(0.3)", "drophead(0.3)", "layerdrop(0.3)", "dropconnect(0.3)")


@pytest.mark.parametrize("recipe", BRANCHES)
def test_a_block_asks_torch_for_few_operations(recipe: str) -> None:
    """Where a model is small, they are the time of a step: by torch alone a mask takes four hundred."""

    def operations(recipe: str | None) -> int:
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, num_heads=2, depth=4, num_classes=3
        ).train()  # fmt: skip
        if recipe is not None:
            attemper.apply(model, recipe)
        x = torch.randn(2, 3, 32, 32)
        for _ in range(3):  # the first passes are looked at
            model(x)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            model(x)
        return sum(event.count for event in found.key_averages() if event.key.startswith("aten::"))

    # One or two masks in a block, each used by about ten operations, views among them.
    assert (operations(recipe) - operations(None)) / 4 <= 60


@needs_triton
@in_parts
def test_kernels_in_the_interpreter(part: str) -> None:
    run_cases("triton_masks_cases.py triton_drops_cases.py", part)


def test_the_library_loads_no_kernels_for_masks_on_a_cpu() -> None:
    code = (
        "import sys, torch; from attemper.ops.stream import Stream; Stream(torch.tensor(0)).keep((1, 1, 2, 2), 0.5); "
        "assert 'attemper.kernels.masks' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
