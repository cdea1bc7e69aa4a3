"""The sum of a pass's terms: scalars and numbers whose sum is meant, in every kind of differentiation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attemper.tempering.ledger import Entry, Ledger
from attemper.tempering.root import total, total_of


def entries_of(values: list[Tensor]) -> list[Entry]:
    return [Entry(f"layer {n}", n, "explicit", "ff1", value) for n, value in enumerate(values)]


def squares(x: Tensor, sizes: list[int]) -> list[Tensor]:
    """Terms of x: a scalar for size 0, otherwise so many numbers."""
    return [(n + 1) * (x.square().sum() if size == 0 else x[:size].square()) for n, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_totals_and_their_first_and_second_gradients_are_those_of_sums(sizes: list[int]) -> None:
    x = torch.linspace(-1, 2, 6, dtype=torch.float64, requires_grad=True)
    results = []
    for ours in (True, False):
        terms = squares(x, sizes)
        found = total(entries_of(terms))[0] if ours else torch.stack([term.sum() for term in terms]).sum()
        (first,) = torch.autograd.grad(found.square(), x, create_graph=True)
        results.append((found, first, *torch.autograd.grad(first.square().sum(), x)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_terms_that_were_taken_are_remembered_one_by_one_and_without_their_graph() -> None:
    x, ledger = torch.ones(6, requires_grad=True), Ledger()
    total_of(entries_of(squares(x, [0, 3, 1])), ledger)
    assert [entry.site for entry in ledger.last] == ["layer 0", "layer 1", "layer 2"]
    assert [entry.term.item() for entry in ledger.last] == [6, 6, 3]
    assert not any(entry.value.requires_grad for entry in ledger.last)


@pytest.mark.parametrize("sizes", [[0, 0], [0, 3, 2]])
def test_totals_can_be_differentiated_in_forward_mode_and_by_torch_func(sizes: list[int]) -> None:
    x = torch.randn(6)

    def penalty(x: Tensor) -> Tensor:
        return total(entries_of(squares(x, sizes)))[0]

    expected = torch.autograd.grad(penalty(x.requires_grad_()), x)[0]
    torch.testing.assert_close(torch.func.grad(penalty)(x.detach()), expected)
    _, pushed = torch.func.jvp(penalty, (x.detach(),), (torch.ones(6),))
    torch.testing.assert_close(pushed, expected.sum())
