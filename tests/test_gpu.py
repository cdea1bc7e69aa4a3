"""The fused kernels on a GPU: correctness against float64, masks, compilers, CUDA graphs, memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.kernels.attention.prepare import drop_table
from attemper.methods import Blur, DropKey, HardMask
from attemper.methods.hardmask import largest
from attemper.ops.stream import Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Tensors = tuple[Tensor, ...]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

SHAPES = [  # batch, heads, heads of k and v, queries, keys, width
    (4, 3, 3, 1, 1, 32),
    (4, 3, 3, 17, 17, 16),
    (4, 3, 3, 65, 65, 32),
    (2, 2, 2, 64, 128, 64),
    (2, 6, 6, 197, 197, 64),
    (2, 4, 2, 50, 197, 64),
    (2, 2, 2, 577, 577, 64),
    (1, 2, 2, 1025, 300, 64),
    (1, 2, 2, 1500, 1500, 32),
    (2, 2, 2, 100, 100, 80),
    (2, 2, 2, 197, 197, 128),
    (1, 4, 1, 130, 1100, 96),
    (2, 3, 3, 33, 257, 24),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MASKS = ["none", "causal", "keys", "full", "bias"]


def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    batch, heads, kv_heads, nq, nk, width = shape
    sizes = [(batch, heads, nq, width), (batch, kv_heads, nk, width), (batch, kv_heads, nk, width)]
    return tuple(torch.randn(size, device="cuda", dtype=dtype).requires_grad_() for size in sizes)


def make_mask(kind: str, shape: tuple[int, ...]) -> tuple[Tensor | None, bool]:
    batch, _, _, nq, nk, _ = shape
    if kind == "keys":
        lengths = torch.randint(1, nk + 1, (batch, 1, 1, 1), device="cuda")
        return torch.arange(nk, device="cuda") < lengths, False
    if kind == "full":
        mask = torch.rand(batch, 1, nq, nk, device="cuda") < 0.7
        mask[..., 0] = True
        return mask, False
    if kind == "bias":
        mask = torch.randn(1, 1, nq, nk, device="cuda")
        return mask.masked_fill(torch.rand(mask.shape, device="cuda") < 0.2, -1e4), False
    return None, kind == "causal"


def outputs(call: Attention, qkv: Tensors, dout: Tensor) -> Tensors:
    out = call(*qkv)
    return out.detach(), *torch.autograd.grad(out, qkv, dout.to(out.dtype))


def errors(given: Tensors, expected: Tensors) -> list[float]:
    found = []
    for a, b in zip(given, expected, strict=True):
        assert not torch.isnan(a).any()
        found.append(((a.double() - b).norm() / b.norm().clamp(min=1e-6)).item())
    return found


def combinations() -> list[tuple[tuple[int, ...], torch.dtype, str]]:
    """Every shape in every dtype under one kind of mask each, and the two tuned shapes under all of them."""
    pairs = itertools.product(SHAPES, DTYPES)
    found = [(shape, dtype, MASKS[(i + i // 5) % 5]) for i, (shape, dtype) in enumerate(pairs)]
    tuned = itertools.product([SHAPES[2], SHAPES[4]], [torch.bfloat16], MASKS)
    return list(dict.fromkeys([*found, *tuned]))


def stock_attention(mask: Tensor | None, causal: bool, dtype: torch.dtype) -> Attention:
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)


def ours(impl: str, **options: object) -> Attention:
    return lambda q, k, v: attemper.attention(q, k, v, impl=impl, seed=3, **options)


@pytest.mark.parametrize(("shape", "dtype", "kind"), combinations(), ids=str)
def test_as_exact_as_torchs_own_kernels(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    qkv = make(shape, dtype)
    exact = tuple(t.detach().double().requires_grad_() for t in qkv)
    dout = torch.randn(*shape[:2], shape[3], shape[5], device="cuda", dtype=dtype)
    mask, causal = make_mask(kind, shape)
    options = {"attn_mask": mask, "is_causal": causal}
    plain = outputs(ours("reference", **options), exact, dout)
    stock = errors(outputs(stock_attention(mask, causal, dtype), qkv, dout), plain)
    for methods in ([], [DropKey(0.1)]):
        expected = outputs(ours("reference", methods=methods, **options), exact, dout)
        given = errors(outputs(ours("triton", methods=methods, **options), qkv, dout), expected)
        for name, error, bound in zip(("out", "dq", "dk", "dv"), given, stock, strict=True):
            # With one key dQ and dK are zero but for rounding, and there is nothing to compare.
            if shape[4] > 1 or name in ("out", "dv"):
                rounding = 5e-6 if dtype == torch.float32 else 1e-7  # three TF32 products (`common/products.py`)
                assert error <= 1.5 * bound + rounding, f"{methods}, {name}: {error:.2e}, torch {bound:.2e}"


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_masks_are_those_of_keep_mask_on_every_device(p: float) -> None:
    batch, heads, nq, nk = 3, 4, 130, 128
    eye = torch.eye(nk, device="cuda", dtype=torch.bfloat16).expand(batch, heads, nk, nk)
    q = torch.zeros(batch, heads, nq, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.zeros(batch, heads, nk, 64, device="cuda", dtype=torch.bfloat16)
    for seed in (0, 12345678901, -(2**63)):
        weights = attemper.attention(q, k, eye, methods=[DropKey(p)], seed=seed, impl="triton")
        keep = attemper.keep_mask(seed, (batch, heads, nq, nk), p)
        assert torch.equal((weights > 0).cpu(), keep)
        assert torch.equal(attemper.keep_mask(seed, (batch, heads, nq, nk), p, device="cuda").cpu(), keep)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_no_row_loses_all_of_its_keys(tokens: int) -> None:
    qkv = make((64, 4, 4, tokens, tokens, 32), torch.float32)
    dout = torch.randn_like(qkv[0])
    results = [outputs(ours(impl, methods=[DropKey(0.99)]), qkv, dout) for impl in ("triton", "reference")]
    # With one key dQ and dK are zero; rounding is then measured by the size of what cancels.
    size = (dout * qkv[2]).norm()
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 5e-6 * (size + b.norm())


@pytest.mark.parametrize("methods", [[DropKey(0.3)], []])
@pytest.mark.parametrize("tokens", [197, 300, 1100])
def test_logits_far_apart(tokens: int, methods: list[DropKey]) -> None:
    q, k, v = make((2, 2, 2, tokens, tokens, 64), torch.bfloat16)
    far = q.detach().clone()
    far[:, :, 100:] *= 100  # only some rows of a tile, and of some tiles all
    out = [attemper.attention(far, k, v, methods=methods, seed=1, impl=impl) for impl in ("triton", "reference")]
    for rows in (slice(0, 100), slice(100, None)):
        given, wanted = (t[:, :, rows] for t in out)
        assert (given - wanted).norm() <= 1e-2 * wanted.norm()


def test_opcheck() -> None:
    q, k, v = make((2, 4, 4, 65, 65, 32), torch.bfloat16)
    seed = torch.tensor(5, device="cuda")
    table = drop_table(Stream(seed), 0, 65)
    torch.library.opcheck(torch.ops.attemper.drop_table, (seed, None, 0, 65, -7, 1, 2, 3, 4, 5))
    torch.library.opcheck(torch.ops.attemper.fused_attention, (q, k, v, None, table, 0.25, False))
    torch.library.opcheck(torch.ops.attemper.fused_attention, (q, k, v, None, None, 0.25, True))


def test_compiles_in_one_graph_with_the_same_masks() -> None:
    q, k, v = make((2, 4, 4, 65, 65, 32), torch.bfloat16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[DropKey(0.3)])

    compiled = torch.compile(call, fullgraph=True)
    results = []
    for function in (call, compiled):
        torch.manual_seed(4)
        results.append(outputs(function, (q, k, v), torch.ones_like(q)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_cuda_graph_draws_fresh_masks_on_every_replay() -> None:
    q, k, v = (t.detach() for t in make((2, 4, 4, 65, 65, 32), torch.bfloat16))

    def call() -> Tensor:
        return attemper.attention(q, k, v, methods=[DropKey(0.3)])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append(out.clone())
    assert not torch.equal(replays[0], replays[1])
    assert not torch.equal(replays[1], replays[2])
    assert all(torch.isfinite(replay).all() for replay in replays)


def test_autocast_computes_in_its_dtype() -> None:
    q, k, v = make((2, 4, 4, 65, 65, 32), torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = attemper.attention(q, k, v, methods=[DropKey(0.3)], seed=1, impl="triton")
    assert out.dtype == torch.bfloat16
    half = attemper.attention(*(t.bfloat16() for t in (q, k, v)), methods=[DropKey(0.3)], seed=1, impl="triton")
    assert torch.equal(out, half)
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_activation_checkpointing_draws_the_same_mask_again() -> None:
    q, k, v = make((2, 4, 4, 65, 65, 32), torch.bfloat16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[DropKey(0.3)], impl="triton")

    results = []
    for function in (call, lambda q, k, v: checkpoint(call, q, k, v, use_reentrant=False)):
        torch.manual_seed(4)
        results.append(outputs(function, (q, k, v), torch.ones_like(q)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_strided_inputs_give_the_same_bits() -> None:
    packed = torch.randn(4, 197, 3, 6, 64, device="cuda", dtype=torch.bfloat16)
    views = tuple(t.detach().requires_grad_() for t in packed.permute(2, 0, 3, 1, 4))
    copies = tuple(t.detach().contiguous().requires_grad_() for t in views)
    dout = torch.randn_like(copies[0])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[DropKey(0.3)], seed=1, impl="triton")

    for a, b in zip(outputs(call, views, dout), outputs(call, copies, dout), strict=True):
        assert torch.equal(a, b)


def test_repeats_bit_for_bit() -> None:
    qkv = make((4, 6, 6, 577, 577, 64), torch.bfloat16)
    dout = torch.randn_like(qkv[0])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[DropKey(0.1)], seed=1, impl="triton")

    for a, b in zip(outputs(call, qkv, dout), outputs(call, qkv, dout), strict=True):
        assert torch.equal(a, b)


def test_auto_takes_the_fused_kernels() -> None:
    q, k, v = make((2, 4, 4, 65, 65, 32), torch.bfloat16)
    chosen = [verdict.name for verdict in attemper.implementations(q, k, v, methods=[DropKey(0.1)]) if verdict.chosen]
    assert chosen == ["triton"]
    assert [verdict.name for verdict in attemper.implementations(q, k, v) if verdict.chosen] == ["sdpa"]


HARD = [  # batch, heads, heads of k and v, queries, keys, width; k
    ((4, 3, 3, 65, 65, 32), 5),
    ((2, 6, 6, 197, 197, 64), 5),
    ((2, 4, 2, 50, 197, 64), 0.25),
    ((2, 2, 2, 577, 577, 64), 5),
    ((1, 2, 2, 130, 1100, 96), 20),
    ((1, 2, 2, 300, 1500, 64), 0.1),
    ((2, 2, 2, 1, 1, 16), 1),
]


@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
@pytest.mark.parametrize(("shape", "k"), HARD, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_hard_masking_is_the_references(shape: tuple[int, ...], k: float, kind: str, fill: str) -> None:
    # Inputs on a coarse grid, so that every implementation computes the same logits, ties included.
    qkv = tuple((t.detach() * 4).round().div(4).requires_grad_() for t in make(shape, torch.float32))
    dout = torch.randn(*shape[:2], shape[3], shape[5], device="cuda")
    mask, causal = make_mask(kind, shape)
    if mask is not None and mask.is_floating_point():
        mask = (
            mask.round() * 0.37
        )  # logits of different bias are never equal: how such a tie rounds is nobody's promise
    for methods in ([HardMask(0.4, k=k, fill=fill)], [DropKey(0.2), HardMask(0.4, k=k, fill=fill)]):
        options = {"methods": methods, "attn_mask": mask, "is_causal": causal, "scale": 0.125}
        given = outputs(ours("triton", **options), qkv, dout)
        expected = outputs(ours("reference", **options), qkv, dout)
        for name, error in zip(("out", "dq", "dk", "dv"), errors(given, expected), strict=True):
            assert error < 1e-4 or (shape[4] == 1 and name in ("dq", "dk")), f"{methods}, {name}: {error:.2e}"


@pytest.mark.parametrize("keys", [65, 256, 300])
def test_the_largest_logits_are_found_exactly_in_bfloat16(keys: int) -> None:
    q = torch.randint(-2, 3, (2, 3, 70, 64), device="cuda").bfloat16()
    k = torch.randint(-2, 3, (2, 3, keys, 64), device="cuda").bfloat16()
    eye = torch.eye(keys, 128, device="cuda", dtype=torch.bfloat16).expand(2, 3, keys, 128)
    logits = q.float() @ k.float().mT / 8
    hit = largest(logits, 5) & ~attemper.keep_mask(3, logits.shape, 0.5, device="cuda")
    method = HardMask(0.5, k=5, fill="neg_inf")
    # Kept keys far below the others may have no weight left in bfloat16; dropped ones must have none.
    weights = attemper.attention(q * 0.125, k, eye, methods=[method], seed=3, impl="triton", scale=1.0)
    seen = min(keys, 128)
    top = largest(logits, 5)[..., :seen]
    assert torch.equal((weights[..., :seen] == 0) & top, hit[..., :seen])


@pytest.mark.parametrize("share", ["queries", "heads"])
@pytest.mark.parametrize("padded", [False, True])
def test_gathered_keys_are_the_references(share: str, padded: bool) -> None:
    qkv = make((2, 6, 3, 197, 197, 64), torch.float32)
    dout = torch.randn_like(qkv[0])
    mask = make_mask("keys", (2, 6, 3, 197, 197, 64))[0] if padded else None
    options = {"methods": [DropKey(0.3, share=share)], "attn_mask": mask}
    results = [outputs(ours(impl, **options), qkv, dout) for impl in ("gather", "reference")]
    assert max(errors(*results)) < 1e-3
    again = outputs(ours("gather", **options), qkv, dout)
    assert torch.equal(again[3], results[0][3])


def test_auto_blurs_the_keys_for_a_fused_kernel_and_says_why() -> None:
    q, k, v = make((2, 4, 4, 65, 65, 32), torch.bfloat16)
    chosen = {}
    for methods in ([Blur()], [Blur(), DropKey(0.1)], [HardMask(0.1)], [DropKey(0.3, share="heads")]):
        (verdict,) = [v for v in attemper.implementations(q, k, v, methods=methods) if v.chosen]
        chosen[str(methods[-1]).split("(")[0], len(methods)] = verdict.name
        assert verdict.because
    assert chosen == {
        ("blur", 1): "triton",
        ("dropkey", 2): "triton",
        ("hardmask", 1): "triton",
        ("dropkey", 1): "gather",
    }


def test_memory_stays_linear_in_tokens() -> None:
    qkv = make((2, 12, 12, 16384, 16384, 64), torch.bfloat16)
    dout = torch.randn_like(qkv[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs(lambda q, k, v: attemper.attention(q, k, v, methods=[DropKey(0.1)], impl="triton"), qkv, dout)
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20
