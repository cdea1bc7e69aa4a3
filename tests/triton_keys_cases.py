"""Blurred and gathered keys in Triton's interpreter. `test_triton.py` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attemper
from attemper.kernels import keys as triton_keys
from attemper.kernels.keys import operators
from attemper.methods import Blur, DropKey
from attemper.methods.dropkey import draw_shared
from attemper.ops.stream import Offsets, Stream

SEEDS = (3, 2**40 + 7)


def keys(batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, heads, tokens, width).to(dtype).requires_grad_()


def by_torch(method: Blur, k: Tensor, real: Tensor | None, causal: bool, stream: Stream, monkeypatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(triton_keys, "serves", lambda x: False)
        return method.perturb_keys(k, real, causal, stream)


def padding(batch: int, tokens: int) -> Tensor:
    lengths = torch.randint(0, tokens + 1, (batch, 1, 1, 1))
    return torch.arange(tokens) < lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("method", "shape", "causal"),
    [
        (Blur(1.0), (2, 3, 17, 8), False),
        (Blur(2.0, w=3), (1, 1, 1, 16), False),
        (Blur(1.5, w=9), (2, 2, 70, 24), False),
        (Blur(3.0, w=5), (1, 2, 65, 32), True),
        (Blur(1.0, w=3), (2, 1, 1031, 8), False),
        (Blur(1.0, grid="2d", size=(4, 5), prefix=1), (2, 2, 21, 16), False),
        (Blur(2.0, w=3, grid="2d", size=(7, 3)), (1, 3, 21, 8), False),
    ],
    ids=str,
)
def test_keys_are_blurred_as_by_torch(method, shape, causal, masked, dtype, monkeypatch) -> None:
    for lane, seed in enumerate(SEEDS):
        k = keys(*shape, dtype)
        real = padding(shape[0], shape[2]) if masked else None
        stream = Stream(torch.tensor(seed), lane, site=-77 * lane, call=lane, at=Offsets(3 * lane, lane, 5 * lane))
        assert triton_keys.serves(k)
        given = method.perturb_keys(k, real, causal, stream)
        expected = by_torch(method, k, real, causal, stream, monkeypatch)
        tolerance = 1e-6 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)
        dout = torch.randn(shape).to(dtype)
        ours, theirs = (torch.autograd.grad(out, k, dout)[0] for out in (given, expected))
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_blurred_keys_have_second_gradients() -> None:
    k, stream = keys(1, 2, 9, 8), Stream(torch.tensor(5))
    dout = torch.randn(1, 2, 9, 8, requires_grad=True)
    (dk,) = torch.autograd.grad(Blur(2.0).perturb_keys(k, None, False, stream), k, dout, create_graph=True)
    direction = torch.randn_like(dk)
    (given,) = torch.autograd.grad(dk, dout, direction)
    torch.testing.assert_close(given, Blur(2.0).perturb_keys(direction, None, False, stream))


def test_strided_keys_are_blurred_in_place_of_copies(monkeypatch) -> None:
    packed = torch.randn(2, 13, 3, 4, 16)
    k = packed[:, :, 1].transpose(1, 2)
    stream = Stream(torch.tensor(1))
    expected = by_torch(Blur(1.0), k, None, False, stream, monkeypatch)
    torch.testing.assert_close(Blur(1.0).perturb_keys(k, None, False, stream), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("tokens", "p"), [(1, 0.5), (10, 0.3), (65, 0.3), (197, 0.1), (300, 0.77)])
@pytest.mark.parametrize("sorted_at_once", [True, False])
def test_keys_are_drawn_in_the_order_of_the_stream(tokens: int, p: float, sorted_at_once: bool, monkeypatch) -> None:
    monkeypatch.setattr(operators, "SORTED", 512 if sorted_at_once else 0)
    samples = 3 if tokens < 100 else 1  # to sort 512 words takes the interpreter a second
    for lane, seed in enumerate(SEEDS):
        stream = Stream(torch.tensor(seed), lane, site=-77 * lane, call=lane, at=Offsets(3 * lane, lane, 5 * lane))
        given = draw_shared(stream, samples, 2, tokens, p)
        with monkeypatch.context() as patch:
            patch.setattr(triton_keys, "runs_on", lambda x: False)
            expected = draw_shared(stream, samples, 2, tokens, p)
        assert torch.equal(given.order, expected.order)
        assert torch.equal(given.rank.gather(-1, given.order), torch.arange(tokens).expand(samples, 2, tokens))
        assert (given.kept is None) == (expected.kept is None)
        assert given.kept is None or torch.equal(given.kept, expected.kept)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "share"), [(4, 4, "heads"), (4, 2, "heads"), (4, 4, "queries"), (4, 2, "queries")]
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("p", [0.3, 0.25])
def test_gathered_keys_are_the_references(heads: int, kv_heads: int, share: str, padded: bool, p: float) -> None:
    q, k, v = keys(2, heads, 5, 8), keys(2, kv_heads, 20, 8), keys(2, kv_heads, 20, 16)
    mask = torch.rand(2, 1, 1, 20) > 0.4 if padded else None
    results = []
    for impl in ("gather", "reference"):
        out = attemper.attention(q, k, v, methods=[DropKey(p, share=share)], attn_mask=mask, seed=7, impl=impl)
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
        results.append((out, *torch.autograd.grad((out * weight).sum(), (q, k, v))))
    for given, expected in zip(*results, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["blur", "order", "take"])
def test_operators_keep_torchs_rules(name: str) -> None:
    seed = torch.tensor(3)
    order, rank, _ = triton_keys.draw_order(Stream(seed), 2, 2, 9, 6, 0)
    calls = {
        "blur": (torch.ops.attemper.blur_keys, (keys(2, 2, 9, 8), seed, 5, 1, 1.0, 5, False, None, [])),
        "order": (torch.ops.attemper.draw_order, (seed, 2, 2, 9, 6, 0, 5, 1, 2, 3)),
        "take": (torch.ops.attemper.take_keys, (keys(2, 2, 9, 8), order, rank, 6)),
    }
    op, arguments = calls[name]
    torch.library.opcheck(op, arguments)
