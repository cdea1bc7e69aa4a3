"""Calls that are repeated, in Triton's interpreter; run by `test_triton.py` with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest

from repeats import RECIPES, check_changes, check_copies, check_gradients, check_passes, check_watched


@pytest.mark.parametrize("kind", ["packed", "apart", "causal"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_repeated_calls_are_what_first_ones_would_be(recipe: str, kind: str) -> None:
    if kind == "causal" and "blur" in recipe:
        pytest.skip("one-sided blur has cases of its own")
    check_passes(recipe, kind, "cpu")


def test_what_changes_between_passes_is_seen() -> None:
    check_changes("cpu")


def test_copies_find_out_for_themselves() -> None:
    check_copies("cpu")


def test_a_graph_that_is_kept_gives_the_same_gradients_again_and_no_second_ones() -> None:
    check_gradients("cpu")


def test_modes_see_operators_of_repeated_calls() -> None:
    check_watched("cpu")
