"""Packed documents in Triton's interpreter, against the reference; run by `test_triton.py` with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import attemper
from attemper.errors import UnsupportedError
from attemper.methods import Blur, DropHead, DropKey, HardMask
from attemper.ops.perturbation import Perturbation
from triton_cases import assert_close

LENGTHS = [(17,), (5, 40, 1), (33, 0, 64, 3), (1, 1, 1, 1, 1, 1, 1), (0, 31, 0), (97, 16, 15)]


def offsets(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0, dtype=dtype)


def check(
    lengths: Sequence[int], methods: list[Perturbation], lengths_k: Sequence[int] | None = None, *, heads: int = 2,
    kv_heads: int = 2, width: int = 16, width_v: int = 16, dtype: torch.dtype = torch.float32,
    counted: torch.dtype = torch.int32, tolerance: float = 3e-6, **options: object,
) -> None:  # fmt: skip
    """Output and gradients of both implementations."""
    keys = sum(lengths if lengths_k is None else lengths_k)
    shapes = [(1, heads, sum(lengths), width), (1, kv_heads, keys, width), (1, kv_heads, keys, width_v)]
    qkv = tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    cu: dict[str, object] = {"cu_seqlens": offsets(lengths, counted)}
    if lengths_k is not None:
        cu["cu_seqlens_k"] = offsets(lengths_k, counted)
    dout = torch.randn(1, heads, sum(lengths), width_v).to(dtype)
    results = []
    for impl in ("triton", "reference"):
        out = attemper.attention(*qkv, methods=methods, seed=11, impl=impl, **cu, **options)
        results.append((out.detach(), *torch.autograd.grad(out, qkv, dout)))
    assert_close(*results, dout, qkv[2], tolerance)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_documents_equal_the_reference(lengths: tuple[int, ...], causal: bool) -> None:
    check(lengths, [DropKey(0.3)], is_causal=causal, tolerance=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths_k", [(9, 40, 0), (0, 0, 70), (33, 1, 2)], ids=str)
def test_keys_of_other_lengths(lengths_k: tuple[int, ...], causal: bool) -> None:
    check((20, 3, 34), [DropKey(0.3)], lengths_k, is_causal=causal, tolerance=1e-5)


@pytest.mark.parametrize("p", [0.01, 0.5, 0.95])
def test_rows_that_lose_everything(p: float) -> None:
    check((3, 20, 2, 1, 18), [DropKey(p)], is_causal=True, counted=torch.int64, tolerance=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("methods", [[], [DropHead(0.5)], [DropKey(0.2), DropHead(0.5)]], ids=len)
def test_without_methods_and_with_dropped_heads(methods: list[Perturbation], causal: bool) -> None:
    check((20, 5, 3), methods, is_causal=causal)


@pytest.mark.parametrize(("width", "width_v"), [(24, 16), (16, 40)])
def test_grouped_heads_and_other_widths(width: int, width_v: int) -> None:
    check((5, 3, 20), [DropKey(0.8)], heads=4, kv_heads=2, width=width, width_v=width_v, is_causal=True)


def test_half_precision() -> None:
    check((20, 50, 1, 17), [DropKey(0.3)], dtype=torch.float16, tolerance=1e-3, is_causal=True)


def test_large_logits() -> None:
    check((40, 20), [DropKey(0.3)], scale=30.0, tolerance=1e-4)


def test_a_part_of_the_heads_and_samples() -> None:
    check((20, 5, 3), [DropKey(0.5), DropHead(0.4)], at=attemper.Offsets(sample=4, head=2, heads=8))


def test_offsets_that_do_not_lie_side_by_side() -> None:
    q = torch.randn(1, 2, 9, 16)
    cu = torch.tensor([[0, 1], [4, 2], [9, 3]])[:, 0]
    given, wanted = (attemper.attention(q, q, q, cu_seqlens=cu, impl=impl) for impl in ("triton", "reference"))
    torch.testing.assert_close(given, wanted)


@pytest.mark.slow
def test_no_compiler_is_in_the_way() -> None:
    """One graph serves documents of any lengths."""
    q = torch.randn(1, 2, 20, 16, requires_grad=True)

    def attend(q: Tensor, cu: Tensor) -> Tensor:
        return attemper.attention(q, q, q, cu_seqlens=cu, methods=DropKey(0.3), seed=3, impl="triton")

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for lengths in ((3, 17), (10, 10)):
        cu = offsets(lengths)
        torch.testing.assert_close(compiled(q, cu), attend(q, cu))
        grads = [torch.autograd.grad(f(q, cu).square().sum(), q)[0] for f in (compiled, attend)]
        torch.testing.assert_close(*grads)


def test_what_the_kernels_cannot_do_in_documents_is_refused() -> None:
    q = torch.randn(1, 2, 9, 16)
    for method in (HardMask(0.3, k=2), Blur(1.0)):
        with pytest.raises(UnsupportedError, match="packed documents"):
            attemper.attention(q, q, q, cu_seqlens=offsets((4, 5)), methods=method, impl="triton")
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda q: attemper.attention(q, q, q, cu_seqlens=offsets((4, 5)), impl="triton").sum())(q)


def test_operations_are_counted_as_of_documents_of_one_length() -> None:
    q = torch.randn(1, 2, 32, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        attemper.attention(q, q, q, cu_seqlens=offsets((16, 16)), impl="triton").sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 32 * 16 * (2 + 5) * 16
