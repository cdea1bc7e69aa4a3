"""Calls that are repeated, on a GPU: `triton_repeat_cases.py` has the same in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from repeats import RECIPES, check_changes, check_copies, check_gradients, check_passes, check_watched

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kind", ["packed", "apart", "causal"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_repeated_calls_are_what_first_ones_would_be(recipe: str, kind: str) -> None:
    check_passes(recipe, kind, "cuda")


def test_what_changes_between_passes_is_seen() -> None:
    check_changes("cuda")


def test_copies_find_out_for_themselves() -> None:
    check_copies("cuda")


def test_a_graph_that_is_kept_gives_the_same_gradients_again_and_no_second_ones() -> None:
    check_gradients("cuda")


def test_modes_see_operators_of_repeated_calls() -> None:
    check_watched("cuda")
