"""`torch.library.opcheck` of every operator on a GPU; `triton_operators_cases.py` has one call of each in the
interpreter."""

from __future__ import annotations

import pytest
import torch

from operator_calls import KINDS, check, recorded, steps_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_of_every_operator(kind: str) -> None:
    for func, args, kwargs in recorded("cuda", steps_of(kind)).found.values():
        check(func, args, kwargs)
