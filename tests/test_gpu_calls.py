"""Kernels for the calls that people make beside plain ones, on a GPU: gradients against float64, masks, compilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.kernels.attention.prepare import drop_table
from attemper.kernels.common.dropping import DETACHED, WEIGHTS
from attemper.methods import Blur, DropAttention, DropKey, HardMask
from attemper.ops.perturbation import Perturbation, WeightDropout
from attemper.ops.seeds import seed_tensor
from attemper.ops.softmax import softmax_with
from attemper.ops.stream import Source, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Tensors = tuple[Tensor, ...]
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-6}
"""The relative error of an output or a gradient in a dtype; torch's own kernels come to half of these."""
FORMS = {
    "inverted": DropAttention(0.2),
    "own": WeightDropout(0.2),
    "detached": DropAttention(0.2, rescale="normalize", detach=True),
    "columns": DropAttention(0.2, unit="column"),
    "normalised-columns": DropAttention(0.2, unit="column", rescale="normalize"),
}
SHAPES = [  # batch, heads, heads of k and v, queries, keys, width
    (4, 3, 3, 65, 65, 32),
    (2, 6, 6, 197, 197, 64),
    (1, 4, 2, 130, 1100, 64),
]


def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    batch, heads, kv_heads, nq, nk, width = shape
    sizes = [(batch, heads, nq, width), (batch, kv_heads, nk, width), (batch, kv_heads, nk, width)]
    return tuple(torch.randn(size, device="cuda", dtype=dtype).requires_grad_() for size in sizes)


def check(
    inputs: Tensors, methods: list[Perturbation], impl: str = "triton", factor: float = 1, **options: Any
) -> None:
    """Output and gradients of q, k, v (and of an additive mask, the fourth of the inputs) against float64."""
    results = []
    for name, given in ((impl, inputs), ("reference", tuple(t.detach().double().requires_grad_() for t in inputs))):
        more = {**options, "attn_mask": given[3]} if len(given) > 3 else options
        out = attemper.attention(*given[:3], methods=methods, seed=3, impl=name, **more)
        torch.manual_seed(1)
        # By shape alone: the numbers that randn_like draws lie as the output does in memory, and the two differ there.
        dout = torch.randn(out.shape, device=out.device).to(inputs[0].dtype).to(out.dtype)
        results.append((out.detach(), *torch.autograd.grad(out, given, dout)))
    for what, a, b in zip(("out", "dq", "dk", "dv", "dmask"), *results, strict=False):
        error = ((a.double() - b).norm() / b.norm()).item()
        assert error <= factor * BOUND[inputs[0].dtype], f"{what}: {error:.2e}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropped_weights(shape: tuple[int, ...], form: str) -> None:
    check(make(shape, torch.bfloat16), [FORMS[form]])


@pytest.mark.parametrize("form", ["inverted", "detached"])
def test_dropped_weights_in_other_dtypes_and_under_masks(form: str) -> None:
    check(make(SHAPES[1], torch.float16), [FORMS[form]])
    check(make(SHAPES[0], torch.float32), [FORMS[form]])
    check(make(SHAPES[1], torch.bfloat16), [FORMS[form]], is_causal=True)
    padding = torch.arange(197, device="cuda") < torch.tensor([197, 50], device="cuda")[:, None, None, None]
    check(make(SHAPES[1], torch.bfloat16), [FORMS[form]], attn_mask=padding)
    check(make(SHAPES[0], torch.bfloat16), [HardMask(0.3), FORMS[form]])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_masks_of_dropped_weights_bit_for_bit(form: str, p: float) -> None:
    shape = (3, 4, 130, 128)
    method = type(FORMS[form])(**{**vars(FORMS[form]), "p": p})
    eye = torch.eye(128, device="cuda", dtype=torch.bfloat16).expand(*shape[:2], 128, 128)
    q, k = (torch.zeros(*shape[:2], n, 64, device="cuda", dtype=torch.bfloat16) for n in shape[2:])
    weights = attemper.attention(q, k, eye, methods=[method], seed=12345678901, impl="triton")
    kept = method.drawn(shape, Source(seed_tensor(12345678901, torch.device("cpu"))).stream(0)).expand(shape)
    assert torch.equal((weights > 0).cpu(), kept | ~kept.any(-1, keepdim=True))


@pytest.mark.parametrize("form", ["inverted", "detached"])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_no_row_loses_all_of_its_weights(form: str, tokens: int) -> None:
    method = type(FORMS[form])(**{**vars(FORMS[form]), "p": 0.95})
    qkv = make((64, 4, 4, tokens, tokens, 32), torch.bfloat16)
    dout = torch.randn_like(qkv[0])
    results = []
    for impl in ("triton", "reference"):
        out = attemper.attention(*qkv, methods=[method], seed=3, impl=impl)
        results.append((out.detach(), *torch.autograd.grad(out, qkv, dout)))
    size = (dout.float() * qkv[2].float()).norm()  # with one key dQ and dK are zero but for what cancels
    for a, b in zip(*results, strict=True):
        assert (a - b).float().norm() <= 1e-2 * (size + b.float().norm())


def test_dropped_weights_take_no_memory_for_logits() -> None:
    q, k, v = make((2, 8, 8, 4096, 4096, 64), torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attemper.attention(q, k, v, methods=[DropAttention(0.1)]).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 12 * q.nbytes  # one byte for every logit would be 32


@pytest.mark.parametrize("drop", [WEIGHTS, DETACHED])
def test_opcheck_of_dropped_weights(drop: int) -> None:
    q, k, v = make((2, 4, 4, 65, 65, 32), torch.bfloat16)
    table = drop_table(Stream(torch.tensor(5, device="cuda")), 0, 65)
    arguments = (q, k, v, None, table, 0.25, False, None, None, None, "none", drop)
    torch.library.opcheck(torch.ops.attemper.fused_attention, arguments)


def test_dropped_weights_compile_and_replay() -> None:
    q, k, v = make((2, 4, 4, 65, 65, 32), torch.bfloat16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[DropAttention(0.3)], impl="triton")

    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        torch.manual_seed(4)
        out = function(q, k, v)
        results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            out = call(q, k, v)
        replays = []
        for _ in range(2):
            graph.replay()
            replays.append(out.clone())
    assert not torch.equal(*replays)


SOFTMAX: dict[str, list[Perturbation]] = {
    "dropkey": [DropKey(0.2)],
    "inverted": [DropAttention(0.2)],
    "detached": [DropAttention(0.2, rescale="normalize", detach=True)],
    "zero": [HardMask(0.5, k=5)],
    "neg_inf": [DropKey(0.2), HardMask(0.5, k=3, fill="neg_inf")],
}


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("shape", [(64, 3, 49, 49), (2, 6, 197, 197), (1, 2, 33, 3000)], ids=str)
def test_softmax_in_one_kernel(shape: tuple[int, ...], name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(shape, device="cuda", dtype=dtype)
        logits[..., -3:] = -100.0  # as Swin hides keys
        dout = torch.randn(shape, device="cuda")
        results = []
        for given_logits, plainly in ((logits, False), (logits.double(), True)):
            x = given_logits.detach().requires_grad_()
            source = Source(torch.tensor(11, device="cuda"), site=7)
            weights = softmax_with(x, SOFTMAX[name], source, x.dtype, plainly)
            results.append((weights.detach(), *torch.autograd.grad(weights, x, dout.to(x.dtype))))
        given, expected = results
        for a, b in zip(given, expected, strict=True):
            assert (a - b).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-5) * b.norm()
        if dtype == torch.float32:
            seen = slice(None, -3)  # e^-100 is 0 in float32 and is not in float64
            assert torch.equal(given[0][..., seen] > 0, expected[0][..., seen] > 0)


def test_softmax_in_one_kernel_passes_opcheck_compiles_and_replays() -> None:
    x = torch.randn(4, 3, 49, 49, device="cuda", requires_grad=True)
    seed = torch.tensor(5, device="cuda")
    table = drop_table(Stream(seed), 0, 49)
    arguments = (x, torch.float32, table, None, 0, WEIGHTS, True, "none", False)
    torch.library.opcheck(torch.ops.attemper.perturbed_softmax, arguments)

    def call(x: Tensor) -> Tensor:
        return softmax_with(x, [DropAttention(0.3)], Source(seed), torch.float32)

    compiled = torch.compile(call, fullgraph=True)
    assert torch.equal(call(x), compiled(x))
    given, expected = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, call))
    assert torch.equal(given, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            out = call(x)
        seed.fill_(5)
        graph.replay()
        first = out.clone()
        seed.fill_(6)
        graph.replay()
    assert not torch.equal(first, out)


def test_float32_by_three_products_is_much_better_than_by_one() -> None:
    qkv = make(SHAPES[1], torch.float32)
    check(qkv, [DropKey(0.1)])
    exact = attemper.attention(*(t.double() for t in qkv), methods=[DropKey(0.1)], seed=3, impl="reference")
    before = torch.get_float32_matmul_precision()
    errors = []
    try:
        for setting in ("highest", "high"):
            torch.set_float32_matmul_precision(setting)
            out = attemper.attention(*qkv, methods=[DropKey(0.1)], seed=3, impl="triton")
            errors.append(((out - exact).norm() / exact.norm()).item())
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors[0] < 5e-6 < 5e-5 < errors[1]


@pytest.mark.parametrize("name", ["dropkey", "inverted", "zero"])
def test_masks_get_gradients(name: str) -> None:
    for shape, mask_shape in (
        ((256, 3, 3, 49, 49, 32), (1, 3, 49, 49)),
        ((16, 3, 3, 49, 49, 32), (16, 3, 49, 49)),
        ((4, 6, 3, 197, 197, 64), (1, 6, 197, 197)),
    ):
        mask = torch.randn(mask_shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
        check((*make(shape, torch.bfloat16), mask), SOFTMAX[name])
    mask = torch.randn(1, 3, 65, 65, device="cuda").requires_grad_()
    check((*make(SHAPES[0], torch.float32), mask), SOFTMAX[name])


def test_the_gradient_of_a_mask_takes_no_memory_for_logits_and_repeats() -> None:
    qkv, mask = make((32, 12, 12, 512, 512, 64), torch.bfloat16), torch.randn(1, 12, 512, 512, device="cuda")
    mask = mask.bfloat16().requires_grad_()
    found = []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attemper.attention(*qkv, attn_mask=mask, methods=[DropKey(0.1)], seed=1)
        found.append(torch.autograd.grad(out.sum(), (*qkv, mask))[3])
        del out
        assert torch.cuda.max_memory_allocated() - before < 8 * qkv[0].nbytes  # logits alone would be as much
    assert torch.equal(*found)


def test_the_gradient_of_a_mask_under_a_compiler() -> None:
    qkv, mask = make(SHAPES[0], torch.bfloat16), torch.randn(1, 3, 65, 65, device="cuda").requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attemper.attention(q, k, v, attn_mask=mask, methods=[DropKey(0.2)], seed=7, impl="triton")

    functions = (call, torch.compile(call, fullgraph=True))
    given, expected = (torch.autograd.grad(f(*qkv, mask).sum(), mask)[0] for f in functions)
    assert torch.equal(given, expected)


@pytest.mark.parametrize("hides", ["nothing", "padding", "from each query"])
def test_blur_under_a_bias(hides: str) -> None:
    shape = (4, 6, 6, 197, 197, 64)
    bias = torch.randn(4, 6, 197, 197, device="cuda")
    if hides == "padding":
        bias[1:, :, :, 150:] = -torch.inf
    if hides == "from each query":
        bias[:, :, :100, 150:] = -torch.inf
    inputs = (*make(shape, torch.float32), bias.requires_grad_())
    verdicts = attemper.implementations(*inputs[:3], attn_mask=bias, methods=[Blur(1.0)])
    chosen = next(verdict.name for verdict in verdicts if verdict.chosen)
    assert (chosen == "reference") == (hides == "from each query")
    assert next(verdict.serves for verdict in verdicts if verdict.name == "triton") == (chosen != "reference")
    if chosen != "reference":
        check(inputs, [Blur(1.0)], factor=4)
        check(inputs, [Blur(1.0), DropKey(0.2)], factor=4)


def test_a_graph_captures_blur_under_a_bias_of_which_nobody_can_see_what_it_hides() -> None:
    q, k, v = make((2, 4, 4, 65, 65, 32), torch.bfloat16)
    bias = torch.randn(1, 4, 65, 65, device="cuda", dtype=torch.bfloat16)
    seed = torch.tensor(3, device="cuda")
    expected = attemper.attention(q, k, v, attn_mask=bias, methods=[Blur(1.0)], seed=seed)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = attemper.attention(q, k, v, attn_mask=bias, methods=[Blur(1.0)], seed=seed)
    graph.replay()
    assert (out - expected).float().norm() <= BOUND[torch.bfloat16] * expected.float().norm()
