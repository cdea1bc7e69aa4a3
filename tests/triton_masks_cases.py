"""Masks and numbers of the stream, each by one kernel, interpreted on a CPU.

`test_quick_masks.py` runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attemper.kernels.masks import keep, uniform
from attemper.kernels.masks.launches import tile
from attemper.ops.stream import Offsets, Stream

PLACES = [Offsets(), Offsets(3, 2, 1, 7), Offsets(2**31 - 9, 9, 2**31 - 300, 2**31 - 300)]


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize(
    "shape", [(5, 1, 1, 1), (1, 1, 1, 1), (2, 3, 17, 197), (3, 1, 1, 6), (2049, 1, 1, 1), (2, 2, 0, 3), (1, 1, 2, 300)]
)
def test_masks_are_the_streams(shape: tuple[int, int, int, int], at: Offsets) -> None:
    stream = Stream(torch.tensor(-(2**62) + 5), 3, site=-77, call=5, at=at)
    for p in (0.0, 0.1, 0.5, 0.999):
        mask = keep(stream, shape, p)
        assert mask.dtype == torch.bool
        assert torch.equal(mask, stream.keep(shape, p))


@settings(deadline=None, max_examples=20)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1), st.integers(0, 999), st.integers(0, 255))
def test_numbers_are_the_streams(seed: int, site: int, call: int, lane: int) -> None:
    stream = Stream(torch.tensor(seed), lane, site=site, call=call, at=Offsets(sample=4))
    assert torch.equal(uniform(stream), stream.uniform())


@given(st.integers(1, 10_000))
def test_a_program_holds_powers_of_two(keys: int) -> None:
    across, down = tile(keys)
    assert across & (across - 1) == 0
    assert across * down == 2048
    assert across == 128 or keys <= across < 2 * keys
