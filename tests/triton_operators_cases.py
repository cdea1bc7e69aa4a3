"""`torch.library.opcheck` of every operator, in Triton's interpreter; run by `test_triton.py`. `test_gpu_operators.py`
checks every call on a GPU."""

from __future__ import annotations

import pytest

from operator_calls import FEW, KINDS, NOT_HERE, check, check_first, operators, recorded, steps_of


@pytest.mark.slow
def test_one_call_of_every_operator() -> None:
    assert check_first(recorded("cpu", FEW)) == len(operators() - NOT_HERE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_call(kind: str) -> None:
    for func, args, kwargs in recorded("cpu", steps_of(kind)).found.values():
        check(func, args, kwargs)
