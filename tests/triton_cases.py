"""The Triton kernels in Triton's interpreter, on a CPU. `test_triton.py` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attemper
from attemper.kernels.attention.prepare import drop_table
from attemper.kernels.common import plans as plan
from attemper.methods import Blur, DropKey
from attemper.ops.stream import Stream

Tensors = tuple[Tensor, ...]


def make(batch: int, heads: int, nq: int, nk: int, width: int, **options: object) -> Tensors:
    dtype = options.get("dtype", torch.float32)
    kv_heads, width_v = options.get("kv_heads", heads), options.get("width_v", width)
    shapes = [(batch, heads, nq, width), (batch, kv_heads, nk, width), (batch, kv_heads, nk, width_v)]
    return tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)


def run(impl: str, qkv: Tensors, p: float | None, dout: Tensor, **options: object) -> Tensors:
    methods = [] if p is None else [DropKey(p)]
    out = attemper.attention(*qkv, methods=methods, seed=11, impl=impl, **options)
    return out.detach(), *torch.autograd.grad(out, qkv, dout)


def check(qkv: Tensors, p: float | None, tolerance: float = 2e-6, **options: object) -> None:
    dout = torch.randn(*qkv[0].shape[:3], qkv[2].shape[-1]).to(qkv[0].dtype)
    expected = run("reference", qkv, p, dout, **options)
    given = run("triton", qkv, p, dout, **options)
    assert_close(given, expected, dout, qkv[2], tolerance)


def assert_close(given: Tensors, expected: Tensors, dout: Tensor, v: Tensor, tolerance: float) -> None:
    """Output, dQ, dK and dV within a relative error of `tolerance`."""
    # dQ and dK vanish where a row has one key; errors are then measured by the size of their terms.
    floor = dout.float().norm() * v.float().norm() * 1e-2
    for name, a, b in zip(("out", "dq", "dk", "dv"), given, expected, strict=True):
        assert a.shape == b.shape
        error = (a.float() - b.float()).norm() / (b.float().norm() + floor)
        assert error <= tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize(
    ("heads", "tokens", "width"), [(2, 1, 16), (2, 17, 16), (1, 33, 24), (2, 64, 16), (1, 65, 32), (1, 197, 64)]
)
def test_output_and_gradients_equal_the_reference(heads: int, tokens: int, width: int) -> None:
    # With one key dQ and dK are zero, and what is left is rounding: up to 3.3e-6 over 60 seeds.
    tolerance = 1e-5 if tokens == 1 else 2e-6
    check(make(1 if tokens > 64 else 2, heads, tokens, tokens, width), 0.1, tolerance)


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9])
def test_every_rate(p: float) -> None:
    check(make(1, 2, 20, 37, 16), p)


def test_without_a_method() -> None:
    check(make(2, 2, 17, 40, 16, width_v=24), None)


def test_half_precision() -> None:
    check(make(1, 2, 20, 37, 16, dtype=torch.float16), 0.1, tolerance=1e-3)


def test_grouped_query_heads() -> None:
    check(make(2, 4, 17, 20, 16, kv_heads=2), 0.3)


def test_causal() -> None:
    check(make(1, 2, 40, 40, 16), 0.5, is_causal=True)
    check(make(1, 1, 20, 40, 16), 0.3, is_causal=True)


def test_key_padding_and_a_sample_without_keys() -> None:
    mask = torch.arange(40) < torch.tensor([40, 3, 0])[:, None, None, None]
    check(make(3, 2, 17, 40, 16), 0.4, attn_mask=mask)


def test_mask_that_differs_between_queries() -> None:
    check(make(2, 2, 20, 33, 16), 0.6, attn_mask=torch.rand(2, 1, 20, 33) > 0.8)
    check(make(1, 2, 20, 20, 16), 0.2, attn_mask=torch.rand(20, 20) > 0.5, is_causal=True)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_rows_that_would_lose_all_keys_are_left_undropped(tokens: int) -> None:
    qkv = make(4, 2, tokens, tokens, 16)
    check(qkv, 0.99)
    assert not torch.equal(run("triton", qkv, 0.99, torch.ones_like(qkv[0]))[0], torch.zeros_like(qkv[0]))


def test_masks_are_those_of_keep_mask_bit_for_bit() -> None:
    batch, heads, nq, nk = 2, 2, 35, 64
    eye = torch.eye(nk)[None, None].expand(batch, heads, nk, nk)
    q, k = torch.zeros(batch, heads, nq, 16), torch.zeros(batch, heads, nk, 16)
    for seed, p in ((3, 0.1), (-(2**63) + 5, 0.5), (2**40 + 1, 0.02)):
        weights = attemper.attention(q, k, eye, methods=[DropKey(p)], seed=seed, impl="triton")
        assert torch.equal(weights > 0, attemper.keep_mask(seed, (batch, heads, nq, nk), p))


@pytest.mark.parametrize("p", [0.2, None])
def test_logits_far_apart_need_the_running_maximum(p: float | None) -> None:
    q, k, v = make(1, 2, 50, 140, 16)
    far = q.detach().clone()
    far[:, :, 20:] *= 300  # only some rows of a tile, and of some tiles all
    check((far.requires_grad_(), k, v), p, tolerance=1e-4)


@pytest.mark.parametrize("p", [0.2, None])
def test_logits_far_below_zero(p: float | None) -> None:
    q, k, v = make(1, 1, 20, 20, 16)
    check(((q.detach() + 40).requires_grad_(), (k.detach() * 0.01 - 40).requires_grad_(), v), p, tolerance=1e-3)


def test_strided_inputs() -> None:
    packed = torch.randn(2, 17, 3, 2, 16)
    check(tuple(t.detach().requires_grad_() for t in packed.permute(2, 0, 3, 1, 4)), 0.1)


def test_lengths_beyond_the_compiled_ones_share_a_general_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "STATIC_TOKENS", 0)
    check(make(1, 2, 37, 70, 16), 0.2)
    check(make(1, 1, 64, 64, 16), 0.2, is_causal=True)


def test_the_output_lies_token_by_token() -> None:
    q, k, v = make(2, 3, 17, 17, 16)
    out = attemper.attention(q, k, v, methods=[DropKey(0.1)], seed=0, impl="triton")
    assert out.transpose(1, 2).is_contiguous()


def test_repeats_bit_for_bit() -> None:
    qkv = make(1, 2, 35, 35, 16)
    first, second = (run("triton", qkv, 0.3, torch.ones_like(qkv[0])) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_opcheck_of_the_operators() -> None:
    q, k, v = make(1, 2, 17, 20, 16)
    table = drop_table(Stream(torch.tensor(5)), 0, 20)
    torch.library.opcheck(torch.ops.attemper.drop_table, (torch.tensor(5), None, 0, 20, -7, 1, 2, 3, 4, 5))
    torch.library.opcheck(torch.ops.attemper.fused_attention, (q, k, v, None, table, 0.25, False))


def test_a_changed_rate_needs_no_new_graph() -> None:
    q, k, v = (t.detach() for t in make(1, 2, 17, 17, 16))
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(p: float) -> Tensor:
        return torch.ops.attemper.fused_attention(q, k, v, None, table_of(p), 0.25, False)[0]

    def table_of(p: float) -> Tensor:
        limit = ((torch.ones((), dtype=torch.float64) * p * 2**32).round() - 2**31).to(torch.int32)
        return drop_table(Stream(torch.tensor(7)), limit, 17)

    for p in (0.1, 0.2, 0.3, 0.4):
        eager = attemper.attention(q, k, v, methods=[DropKey(p)], seed=7, impl="triton", scale=0.25)
        assert torch.equal(compiled(p), eager)
    assert graphs <= 2


def test_compiles_in_one_graph_and_gives_the_same_bits() -> None:
    q, k, v = make(1, 2, 17, 17, 16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[DropKey(0.2)], seed=7, impl="triton")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    given = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def test_backward_makes_no_zeros_for_outputs_that_have_no_gradient() -> None:
    seen: list[str] = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    qkv = make(1, 1, 17, 17, 16)
    out = attemper.attention(*qkv, methods=[DropKey(0.1), Blur(1.0)], impl="triton")
    with Listening():
        torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert any("fused_attention_backward" in name for name in seen)
    assert not any("zeros" in name for name in seen)
