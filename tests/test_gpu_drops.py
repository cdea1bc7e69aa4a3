"""Drops of tokens and branches, and the mixed mean, on a GPU; `triton_drops_cases.py` has them in the interpreter."""

from __future__ import annotations

import pytest
import torch

import triton_drops_cases as cases
from attemper.ops.stream import Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = [*cases.TOKENS, (8, 197, 384), (2, 14, 14, 96)]


def here(drawn: Stream) -> Stream:
    """The stream with its seed on the GPU."""
    return Stream(drawn.seed.cuda(), site=drawn.site, call=drawn.call, at=drawn.at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drawn", [cases.STREAM, cases.AT])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens(shape: tuple[int, ...], drawn: Stream, dtype: torch.dtype) -> None:
    cases.test_tokens_are_dropped_by_the_streams_mask(shape, here(drawn), dtype)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
@pytest.mark.parametrize("drawn", [cases.STREAM, cases.AT])
@pytest.mark.parametrize("shape", [(7, 5, 3), (9, 300, 7), (6, 1), (16, 197, 384)])
def test_branches(shape: tuple[int, ...], drawn: Stream, dtypes: tuple[torch.dtype, ...]) -> None:
    cases.test_branches_are_dropped_by_the_streams_mask(shape, here(drawn), dtypes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 33, 5), (2, 64, 65)])
def test_the_mean(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cases.test_the_mean_is_mixed_in(shape, dtype, "cuda")


@pytest.mark.parametrize("recipe", ["droppath(0.5)", "ffdropout(0.4)", "cb", "droppath(0.4) + ffdropout(0.2) + cb"])
@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_models(recipe: str, kind: str) -> None:
    cases.test_models_train_as_without_the_kernels(recipe, kind, "cuda")
