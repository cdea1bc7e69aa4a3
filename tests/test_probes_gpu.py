"""Probes on a GPU."""

from __future__ import annotations

import pytest
import torch

from attemper.probes.attention import entropy, see
from test_probes_formula import CASES, map_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("case", list(CASES))
def test_entropy_on_a_gpu_is_that_of_the_map(case, dtype):
    make, is_causal = CASES[case]
    mask = make() if make else None
    q, k = torch.randn(2, 3, 11, 12).to(dtype), torch.randn(2, 3, 13, 12).to(dtype)
    expected = map_entropy(q.double(), k.double(), mask, is_causal, 12**-0.5)
    found = entropy(see(q.cuda(), k.cuda(), None if mask is None else mask.cuda(), is_causal))
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-3, atol=1e-5)
