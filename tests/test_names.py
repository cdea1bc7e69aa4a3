"""A model that is itself an attention has no name: messages call it the model, and never ''."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import AlreadyAppliedError, AttemperError, ParameterError


class Silent(nn.MultiheadAttention):
    """Runs, and computes no attention."""

    def forward(self, query, key, value, **options):  # type: ignore[no-untyped-def, override]
        return query, None


def test_a_model_that_is_tempered_already_is_called_the_model() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    attemper.apply(model, "dropkey(0.1)")
    with pytest.raises(AlreadyAppliedError, match=r"^the model is tempered already"):
        attemper.apply(model, "cb")


def test_a_part_that_is_tempered_already_is_called_by_its_name() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True))
    attemper.apply(model[0], "dropkey(0.1)")
    with pytest.raises(AlreadyAppliedError, match=r"^'0' is tempered already"):
        attemper.apply(model, "cb")


def test_a_model_that_computes_no_attention_is_called_the_model() -> None:
    model = Silent(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    attemper.apply(model, "dropkey(0.1)")
    with pytest.raises(AttemperError, match=r"^the model \(\w+\) ran in training mode"):
        model(x, x, x)


def test_a_method_that_needs_a_grid_says_of_which_model() -> None:
    with pytest.raises(ParameterError, match="none is known for the model;"):
        attemper.apply(nn.MultiheadAttention(8, 2, batch_first=True), "dropkey(0.1, structure=block)")
