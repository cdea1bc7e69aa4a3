"""Blurred and gathered keys on a GPU, against torch's own operations."""

from __future__ import annotations

import pytest
import torch

import attemper
from attemper.kernels import keys as triton_keys
from attemper.methods import Blur, DropKey
from attemper.methods.dropkey import draw_shared
from attemper.ops.stream import Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

METHODS = [
    (Blur(1.0), 197, False),
    (Blur(3.0, w=9), 65, False),
    (Blur(2.0), 300, True),
    (Blur(2.0, grid="2d", size=(14, 14), prefix=1), 197, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("method", "tokens", "causal"), METHODS, ids=str)
def test_keys_are_blurred_as_by_torch(
    method: Blur, tokens: int, causal: bool, masked: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = torch.randn(3, tokens, 3, 6, 64, device="cuda", dtype=dtype)
    k = packed[:, :, 1].transpose(1, 2).requires_grad_()
    real = torch.rand(3, 1, 1, tokens, device="cuda") > 0.3 if masked else None
    stream, dout = Stream(torch.tensor(2**40 + 3, device="cuda"), 1), torch.randn(3, 6, tokens, 64, device="cuda")
    results = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(triton_keys, "serves", lambda x: False)
        assert triton_keys.serves(k) == fused
        out = method.perturb_keys(k, real, causal, stream)
        results.append((out, *torch.autograd.grad(out, k, dout.to(dtype))))
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for given, expected in zip(*results, strict=True):
        torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tokens", [65, 197, 1500, 1501])  # of 1500, exactly 1050 are kept
def test_keys_are_drawn_as_on_a_cpu(tokens: int) -> None:
    for lane, seed in enumerate((3, 2**40 + 7)):
        ours, theirs = (
            draw_shared(Stream(torch.tensor(seed, device=d), lane), 4, 3, tokens, 0.3) for d in ("cuda", "cpu")
        )
        assert torch.equal(ours.order.cpu(), theirs.order)
        assert (theirs.kept is None) == (tokens == 1500)
        if ours.kept is None or theirs.kept is None:
            assert ours.kept is theirs.kept
        else:
            assert torch.equal(ours.kept.cpu(), theirs.kept)


@pytest.mark.parametrize(("tokens", "p"), [(64, 0.3), (65, 0.3), (192, 0.34), (577, 0.3), (1100, 0.3)])
@pytest.mark.parametrize("share", ["queries", "heads"])
def test_the_last_gathered_key_is_there_or_not(tokens: int, p: float, share: str) -> None:
    shape = (4, 3, tokens, 64)
    qkv = tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    exact = tuple(t.detach().double().requires_grad_() for t in qkv)
    dout = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    results = []
    for impl, tensors in (("gather", qkv), ("reference", exact)):
        out = attemper.attention(*tensors, methods=[DropKey(p, share=share)], seed=5, impl=impl)
        results.append((out, *torch.autograd.grad(out, tensors, dout.to(out.dtype))))
    for given, expected in zip(*results, strict=True):
        error = (given.double() - expected).norm() / expected.norm()
        assert float(error) < 1e-2


@pytest.mark.parametrize("share", ["queries", "heads"])
def test_shared_keys_compile_in_one_graph_and_are_the_same(share: str) -> None:
    q, k, v = (torch.randn(2, 3, 65, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def call() -> torch.Tensor:
        out: torch.Tensor = attemper.attention(q, k, v, methods=[DropKey(0.3, share=share)], seed=5)
        return out

    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        out = function()
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for given, expected in zip(*results, strict=True):
        torch.testing.assert_close(given, expected)
