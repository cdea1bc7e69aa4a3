"""Parts of the keys and their log-sum-exps on a GPU, against the reference in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import attemper
from attemper import Offsets
from attemper.methods import DropKey

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def ring(qkv: tuple[Tensor, ...], cuts: tuple[int, ...], impl: str, p: float, causal: bool) -> tuple[Tensor, ...]:
    """Output and log-sum-exps of keys in parts, and the gradients of a sum of both."""
    q, k, v = qkv
    options = {"methods": [DropKey(p)] if p else [], "is_causal": causal, "seed": 5, "impl": impl, "return_lse": True}
    parts = []
    for key, end in itertools.pairwise(cuts):
        at = Offsets(key=key, keys=cuts[-1])
        parts.append(attemper.attention(q, k[:, :, key:end], v[:, :, key:end], at=at, **options))
    out, lse = attemper.merge_parts(parts)
    kept = lse > -torch.inf
    loss = (out * torch.linspace(-1, 1, out.shape[-1], device=out.device)).sum() + lse[kept].sum()
    return out.detach(), lse.detach().exp(), *torch.autograd.grad(loss, qkv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("cuts", [(0, 64, 128), (0, 5, 197), (0, 300, 400, 1000)])
def test_merged_parts_equal_the_reference(dtype: torch.dtype, causal: bool, p: float, cuts: tuple[int, ...]) -> None:
    shapes = ((2, 4, cuts[-1], 64), (2, 2, cuts[-1], 64), (2, 2, cuts[-1], 64))
    qkv = tuple(torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes)
    exact = tuple(x.detach().double().requires_grad_() for x in qkv)
    given, wanted = ring(qkv, cuts, "triton", p, causal), ring(exact, cuts, "reference", p, causal)
    for name, a, b in zip(("out", "exp(lse)", "dq", "dk", "dv"), given, wanted, strict=True):
        error = (a.double() - b).norm() / b.norm().clamp(min=1.0)
        assert error <= DTYPES[dtype], f"{name}: {error:.2e}"
