"""Packed documents and FlexAttention on a GPU, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attemper
from attemper import flex
from attemper.methods import DropAttention, DropHead, DropKey
from attemper.ops.perturbation import Perturbation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LENGTHS = [(197,), (5, 400, 1, 0, 64, 1030), (1,) * 50, (128, 128, 64), (0, 3000, 17)]


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)


def make(tokens: int, dtype: torch.dtype, width: int = 64, kv_heads: int = 4) -> tuple[Tensor, ...]:
    shapes = [(1, 4, tokens, width), (1, kv_heads, tokens, width), (1, kv_heads, tokens, width)]
    return tuple(torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes)


def results(attend: object, qkv: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, ...]:
    out = attend(*qkv)  # type: ignore[operator]
    return out.detach(), *torch.autograd.grad(out, qkv, dout.to(out.dtype))


def assert_close(given: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), given, wanted, strict=True):
        # A gradient of the scores may cancel, wholly where a document has one key; what cancels is as large as dV.
        size = max(b.norm(), wanted[3].norm()) if name in ("dq", "dk") else b.norm()
        error = (a.double() - b).norm() / size.clamp(min=1.0)
        assert error <= tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("methods", [[], [DropKey(0.1)], [DropKey(0.8), DropHead(0.3)]], ids=len)
def test_packed_documents_equal_the_reference(
    lengths: tuple[int, ...], dtype: torch.dtype, causal: bool, methods: list[Perturbation]
) -> None:
    qkv = make(sum(lengths), dtype, width=128 if len(lengths) == 3 else 64, kv_heads=2 if causal else 4)
    options = {"methods": methods, "is_causal": causal, "seed": 5, "cu_seqlens": offsets(lengths)}
    dout = torch.randn_like(qkv[0])
    exact = tuple(x.detach().double().requires_grad_() for x in qkv)
    given = results(lambda q, k, v: attemper.attention(q, k, v, impl="triton", **options), qkv, dout)
    wanted = results(lambda q, k, v: attemper.attention(q, k, v, impl="reference", **options), exact, dout)
    assert_close(given, wanted, DTYPES[dtype])


def test_new_lengths_neither_compile_nor_wait() -> None:
    qkv = make(2000, torch.bfloat16)
    cu = [offsets(lengths) for lengths in ((700, 1300), (1999, 1), (0, 2000))]
    methods = [DropKey(0.1)]
    seed = torch.tensor(3, device="cuda")
    torch.autograd.grad(attemper.attention(*qkv, cu_seqlens=cu[0], methods=methods, seed=seed).sum(), qkv)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in cu:
            torch.autograd.grad(attemper.attention(*qkv, cu_seqlens=each, methods=methods, seed=seed).sum(), qkv)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "methods", [[DropKey(0.3)], [DropAttention(0.5, rescale="normalize"), DropKey(0.4, share="heads")]], ids=len
)
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_flex_attention_drops_the_same_keys_forward_and_backward(
    methods: list[Perturbation], packed: bool
) -> None:
    compiled = torch.compile(flex_attention)
    cu = offsets((70, 1, 185))
    documents = {"cu_seqlens": cu} if packed else {}
    visible = flex.document_mask(cu if packed else offsets((256,)), 256, is_causal=True)
    mask = create_block_mask(visible, None, None, 256, 256, device="cuda")
    qkv = make(256, torch.float32)
    exact = tuple(x.detach().double().requires_grad_() for x in qkv)
    dout = torch.randn_like(qkv[0])
    for number in (3, 2**61 + 1):
        seed = torch.tensor(number, device="cuda")
        drop = flex.score_mod(methods, seed, (1, 4, 256, 256), is_causal=True, **documents)
        given = results(lambda q, k, v, drop=drop: compiled(q, k, v, score_mod=drop, block_mask=mask), qkv, dout)
        options = {"methods": methods, "seed": seed, "is_causal": True, "impl": "reference", **documents}
        wanted = results(lambda q, k, v, options=options: attemper.attention(q, k, v, **options), exact, dout)
        assert_close(given, wanted, 5e-3)
