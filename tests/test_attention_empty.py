"""Calls with nothing in them: an empty result, as torch has it, or an error that says what is missing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attemper
from attemper.errors import ParameterError
from attemper.kernels.attention.arguments import refuse_tensors
from attemper.kernels.implementations import fa4
from attemper.methods import DropKey
from attemper.ops.call import make_call

RECIPES = [
    "none", "dropkey(0.3)", "dropkey(0.3, share=queries)", "dropkey(0.3, share=heads)",
    "dropkey(0.3, structure=block, grid=[3, 3])", "dropkey(0.3, structure=cross, grid=[3, 3])", "dropattention(0.3)",
    "dropattention(0.3, unit=column, w=2)", "dropattention(0.3, rescale=normalize)",
    "dropattention(0.3, rescale=normalize, detach=true)",
    "hardmask(0.3, k=2)", "hardmask(0.3, k=0.5, fill=neg_inf)", "blur", "blur(grid=2d, size=[3, 3])", "drophead(0.3)",
]  # fmt: skip
MASKS = {
    "none": lambda b, h, n, m: None,
    "bool": lambda b, h, n, m: torch.ones(n, m, dtype=torch.bool),
    "added": lambda b, h, n, m: torch.zeros(n, m),
    "added to every head": lambda b, h, n, m: torch.zeros(b, h, n, m),
    "padding": lambda b, h, n, m: torch.ones(b, 1, 1, m, dtype=torch.bool),
    "padding added": lambda b, h, n, m: torch.zeros(1, m),
}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    recipe=st.sampled_from(RECIPES),
    mask=st.sampled_from(sorted(MASKS)),
    sizes=st.sampled_from([(0, 2, 9), (2, 2, 0), (0, 4, 0), (0, 1, 1), (1, 4, 0)]),
    groups=st.sampled_from([1, 2]),
    impl=st.sampled_from(["auto", "reference"]),
    width=st.sampled_from([1, 4]),
)
def test_without_samples_or_queries_the_result_is_empty_and_gradients_are_zero(
    recipe: str, mask: str, sizes: tuple[int, int, int], groups: int, impl: str, width: int
) -> None:
    batch, heads, queries = sizes
    keys, shared = 9, max(1, heads // groups)
    q = torch.randn(batch, heads, queries, 4, requires_grad=True)
    k, v = (torch.randn(batch, shared, keys, size, requires_grad=True) for size in (4, width))
    chosen = MASKS[mask](batch, heads, queries, keys)
    out = attemper.attention(q, k, v, methods=attemper.parse(recipe), attn_mask=chosen, seed=1, impl=impl)  # type: ignore[arg-type]
    assert out.shape == (batch, heads, queries, width)
    out.sum().backward()
    assert not any(given.grad is not None and given.grad.any() for given in (q, k, v))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("q", "k", "words"),
    [
        ((2, 0, 9, 4), (2, 0, 9, 4), "at least one head"),
        ((2, 2, 9, 4), (2, 0, 9, 4), "at least one head"),
        ((2, 2, 9, 4), (2, 2, 0, 4), "at least one key"),
        ((2, 2, 0, 4), (2, 2, 0, 4), "at least one key"),
        ((2, 2, 9, 0), (2, 2, 9, 0), "head width of at least 1"),
    ],
)
def test_without_heads_keys_or_width_there_is_an_error(
    recipe: str, q: tuple[int, ...], k: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ParameterError, match=words):
        attemper.attention(torch.randn(q), torch.randn(k), torch.randn(k), methods=attemper.parse(recipe), seed=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(0, 2, 9, 64), (2, 2, 0, 64)])
def test_kernels_leave_empty_calls_to_others(sizes: tuple[int, int, int, int]) -> None:
    q, k = torch.randn(sizes), torch.randn(sizes[0], 2, 9, 64)
    call = make_call(q, k, k, None, False, None, [DropKey(0.1)], None)
    assert "nothing to compute" in str(refuse_tensors(call))
    assert "nothing to compute" in str(fa4._refuse_tensors(call))
