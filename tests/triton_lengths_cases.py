"""Data of ever new lengths, in Triton's interpreter: what is compiled for it; run by `test_triton.py`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import attemper
from attemper.kernels.attention import launches
from attemper.kernels.common import direct, plans
from attemper.methods import DropKey, HardMask

LENGTHS = list(range(6, 240))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What would be compiled: a kernel, its constants, and what it is specialised on. Nothing is computed."""
    seen: set[Any] = set()

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        kinds: list[Any] = [kernel.__name__, *constants.items()]
        direct.add_kinds(arguments, kinds)
        seen.add(tuple(kinds))

    def start(self: direct.Launch, aligned: bool, *arguments: Any) -> None:
        launch(self.kernel, self.grid, *arguments, **self.constants)

    monkeypatch.setattr(direct.Launch, "__call__", start)
    monkeypatch.setattr("attemper.kernels.attention.prepare.launch", launch)
    monkeypatch.setattr(plans, "_seen", {})
    monkeypatch.setattr(launches, "_forwards", {})
    monkeypatch.setattr(launches, "_backwards", {})
    return seen


def step(tokens: int, methods: Any, heads: int = 2) -> None:
    q, k, v = (torch.empty(3, heads, tokens, 16, requires_grad=True) for _ in range(3))
    attemper.attention(q, k, v, methods=methods, seed=0, impl="triton").sum().backward()


@pytest.mark.parametrize("methods", [(), (DropKey(0.1),), (HardMask(0.1),)], ids=str)
def test_ever_new_lengths_end_up_with_kernels_that_are_there(methods: Any, compiled: set[Any]) -> None:
    lengths = LENGTHS * 2
    random.Random(0).shuffle(lengths)
    for tokens in lengths[: len(lengths) // 2]:
        step(tokens, methods)
    known = set(compiled)
    for tokens in lengths[len(lengths) // 2 :]:
        step(tokens, methods)
    fresh = compiled - known
    assert len(fresh) <= 2, "of kinds that are rare"
    exact = {kinds for kinds in compiled if any(kind in kinds for n in LENGTHS for kind in (("NQ", n), ("NK", n)))}
    of_a_length = {kind[1] for kinds in exact for kind in kinds if isinstance(kind, tuple) and kind[0] == "NQ"} - {0}
    assert len(of_a_length) <= plans.STATIC_SHAPES
    by_kernel: dict[str, int] = {}
    for kinds in compiled - exact:
        by_kernel[kinds[0]] = by_kernel.get(kinds[0], 0) + 1
    assert max(by_kernel.values()) <= 12, by_kernel


def test_lengths_that_stay_are_constants_in_every_stage_of_a_pyramid(compiled: set[Any]) -> None:
    for heads in (1, 2, 5, 8):
        for tokens in (49, 196, 49, 196):
            step(tokens, (DropKey(0.1),), heads)
    constants = {kind for kinds in compiled for kind in kinds if isinstance(kind, tuple) and kind[0] == "NQ"}
    assert constants == {("NQ", 49), ("NQ", 196)}


def test_what_is_remembered_of_lengths_stays_small(compiled: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MOST", 50)
    for tokens in LENGTHS:
        step(tokens, (DropKey(0.1),))
    assert len(launches._forwards) <= 50
    assert len(launches._backwards) <= 50
