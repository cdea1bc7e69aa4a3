"""Structured DropKey in the kernels, on a GPU: masks, gradients against float64, memory, compilers and graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attemper
from attemper.methods import DropKey, HardMask
from attemper.ops.perturbation import Perturbation
from attemper.ops.seeds import seed_tensor
from attemper.ops.stream import Source
from test_gpu_calls import check, make

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [  # batch, heads, heads of k and v, queries, keys, width; the image
    ((4, 3, 3, 65, 65, 32), (8, 8)),
    ((2, 6, 6, 197, 197, 64), (14, 14)),
    ((1, 4, 2, 130, 1100, 64), (25, 44)),
]
both = pytest.mark.parametrize("structure", ["block", "cross"])


def on(structure: str, keys: int, image: tuple[int, int], p: float = 0.2, **options: object) -> DropKey:
    return DropKey(p, structure=structure, grid=image, prefix=keys - image[0] * image[1], **options)  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("share", ["none", "queries", "heads"])
@pytest.mark.parametrize(("shape", "image"), SHAPES, ids=str)
def test_output_and_gradients(shape: tuple[int, ...], image: tuple[int, int], share: str, structure: str) -> None:
    check(make(shape, torch.bfloat16), [on(structure, shape[4], image, share=share)])


@both
def test_other_dtypes_and_masks(structure: str) -> None:
    short, image = SHAPES[1]
    method = on(structure, 197, image, 0.5)
    for dtype in (torch.float16, torch.float32):
        check(make(short, dtype), [method])
    check(make(short, torch.bfloat16), [method], is_causal=True)
    padding = torch.arange(197, device="cuda") < torch.tensor([197, 5], device="cuda")[:, None, None, None]
    check(make(short, torch.bfloat16), [method], attn_mask=padding)
    check(make(short, torch.bfloat16), [method], attn_mask=torch.rand(2, 1, 197, 197, device="cuda") > 0.9)
    bias = torch.randn(1, 6, 197, 197, device="cuda", requires_grad=True)
    check((*make(short, torch.float32), bias), [method])


@both
@pytest.mark.parametrize("first", [True, False])
def test_beside_hard_masking(structure: str, first: bool) -> None:
    methods: list[Perturbation] = [on(structure, 65, (8, 8)), HardMask(0.3, k=5)]
    check(make(SHAPES[0][0], torch.float32), methods if first else methods[::-1], factor=4)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("w", [None, 5, 7])
@both
def test_masks_bit_for_bit(structure: str, w: int | None, p: float) -> None:
    shape = (3, 4, 130, 127)
    method = on(structure, 127, (9, 14), p, w=w)
    eye = torch.eye(127, 128, device="cuda", dtype=torch.bfloat16).expand(*shape[:2], 127, 128)
    q, k = (torch.zeros(*shape[:2], n, 64, device="cuda", dtype=torch.bfloat16) for n in shape[2:])
    weights = attemper.attention(q, k, eye, methods=[method], seed=12345678901, impl="triton")[..., :127]
    kept = method.drawn(shape, Source(seed_tensor(12345678901, torch.device("cpu"))).stream(0))
    assert torch.equal((weights > 0).cpu(), kept | ~kept.any(-1, keepdim=True))


@both
def test_no_memory_for_logits_or_masks(structure: str) -> None:
    q, k, v = make((2, 8, 8, 4096, 4096, 64), torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attemper.attention(q, k, v, methods=[on(structure, 4096, (64, 64))]).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 12 * q.nbytes  # one byte for every logit would be 32


@both
def test_compiles_and_replays(structure: str) -> None:
    qkv, method = make(SHAPES[0][0], torch.bfloat16), on(structure, 65, (8, 8))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[method], impl="triton")

    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        torch.manual_seed(4)
        out = function(*qkv)
        results.append((out.detach(), *torch.autograd.grad(out, qkv, torch.ones_like(out))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            out = call(*qkv)
        replays = []
        for _ in range(2):
            graph.replay()
            replays.append(out.clone())
    assert not torch.equal(*replays)


@both
def test_auto_takes_the_kernel(structure: str) -> None:
    for shape, image in SHAPES:
        verdicts = attemper.implementations(*make(shape, torch.bfloat16), methods=[on(structure, shape[4], image)])
        assert next(verdict.name for verdict in verdicts if verdict.chosen) == "triton"
