"""impl="fa4": what it refuses, what importing it imports, and on a GPU that has it, its kernels."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attemper
from attemper.errors import UnsupportedError
from attemper.kernels.fa4.tables import call_words
from attemper.kernels.implementations import fa4
from attemper.methods import Blur, DropAttention, DropHead, DropKey, HardMask
from attemper.ops.call import make_call
from attemper.ops.choice import preference
from attemper.ops.perturbation import Perturbation, rescue
from attemper.ops.stream import Offsets, Source, Stream, keep_mask, threshold
from interpreter import in_parts, needs_triton, run_cases

TESTS = Path(__file__).parent


@needs_triton
@in_parts
def test_everything_round_the_kernels(part: str) -> None:
    run_cases("fa4_cases.py", part)


@pytest.mark.skipif(fa4.INSTALLED != fa4.VERSION, reason=f"flash-attn-4 {fa4.VERSION} is not installed")
@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_kernels_compile_where_there_is_no_gpu(width: int) -> None:
    command = [sys.executable, str(TESTS / "fa4_compile_cases.py"), str(width)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


# Refusals.


def reason(methods: list[Perturbation], queries: int = 4, keys: int = 4, **changes: object) -> str:
    dtype, width = changes.get("dtype", torch.bfloat16), changes.get("width", 32)
    q, k = (torch.zeros(1, 2, tokens, width, dtype=dtype) for tokens in (queries, keys))
    v = torch.zeros(1, 2, keys, changes.get("width_v", width), dtype=dtype)
    source = Source(torch.tensor(0), at=changes.get("at", Offsets()))
    call = make_call(q, k, v, changes.get("mask"), bool(changes.get("causal")), changes.get("scale"), methods, source)
    return fa4._refuse_methods(call) or fa4._refuse_tensors(call) or ""


def test_refusals_name_what_is_unsupported() -> None:
    assert reason([DropKey(0.1)]) == ""
    assert reason([Blur(), DropKey(0.5), DropHead(0.1)], causal=True) == ""
    assert reason([]) == ""
    assert "32 and 64" in reason([DropKey(0.1)], width_v=64)
    assert "float32" in reason([DropKey(0.1)], dtype=torch.float32)
    assert "attn_mask" in reason([DropKey(0.1)], mask=torch.ones(4, 4, dtype=torch.bool))
    assert "3 queries and 4 keys" in reason([DropKey(0.1)], queries=3, causal=True)
    assert "0.6" in reason([DropKey(0.6)])
    assert "this call has 2" in reason([DropKey(0.1), DropKey(0.1)])
    assert "this call has 2" in reason([DropKey(0.1), HardMask(0.1, k=2)])
    assert "on Hopper GPUs only" in reason([HardMask(0.1, k=2)])
    assert "part of the keys" in reason([DropKey(0.1)], at=Offsets(keys=5))
    assert reason([DropHead(0.1)], at=Offsets(key=5)) == ""
    assert "dropattention(0.1" in reason([DropAttention(0.1, rescale="inverted")])


def test_hard_masking_is_refused_where_its_kernels_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "is_hopper", lambda device: True)
    assert reason([HardMask(0.1, k=2), Blur()]) == ""
    assert "not causal" in reason([HardMask(0.1, k=2)], causal=True)
    assert "its scale is positive" in reason([HardMask(0.1, k=2)], scale=-1.0)


def test_head_widths_that_were_checked_are_served_and_no_others() -> None:
    for width in (32, 64, 96, 128):
        assert reason([DropKey(0.1)], width=width) == ""
    for width in (8, 16, 48, 80, 112, 136, 192):
        assert reason([DropKey(0.1)], width=width) == f"needs heads of width 32, 64, 96 or 128, not {width}"


def test_it_takes_no_part_in_torch_func() -> None:
    found = []
    torch.func.vmap(lambda x: found.append(reason([DropKey(0.1)])) or x)(torch.zeros(2))
    assert "torch.func" in found[0]


@pytest.mark.parametrize(
    ("capability", "installed", "wanted"),
    [
        ((9, 0), None, r"not installed \(pip install 'attemper\[fa4\]'\)"),
        ((9, 0), "4.0.0b1", "needs flash-attn-4 4.0.0b36, and 4.0.0b1 is installed"),
        ((8, 0), fa4.VERSION, "Hopper or Blackwell GPU .*this one has 8"),
        ((12, 0), fa4.VERSION, "this one has 12"),
        ((9, 0), fa4.VERSION, None),
        ((10, 0), fa4.VERSION, None),
    ],
)
def test_the_device_and_the_package_are_named(
    capability: tuple[int, int], installed: str | None, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(fa4, "INSTALLED", installed)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 4, 32, dtype=torch.bfloat16, device="cuda")
    given = fa4.refuse(make_call(q, q, q, None, False, None, [DropKey(0.1)], None))
    if wanted is None:
        assert given is None
    else:
        assert re.search(wanted, str(given))


def test_an_explicit_request_on_a_cpu_is_refused_and_names_who_serves() -> None:
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(
        UnsupportedError, match=r"impl='fa4'.*Hopper or Blackwell.* on cpu.*These can: tiled, reference"
    ):
        attemper.attention(q, q, q, methods=[DropKey(0.1)], impl="fa4")


@pytest.mark.parametrize(
    ("tokens", "dropping", "hitting"),
    [(197, "triton", "triton"), (1000, "triton", "triton"), (1024, "fa4", "triton"), (4096, "fa4", "fa4")],
)
def test_long_rows_ask_it_first(tokens: int, dropping: str, hitting: str) -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, tokens, 64, dtype=torch.bfloat16, device="cuda")
    for method, first in ((DropKey(0.1), dropping), (HardMask(0.1), hitting)):
        assert preference(make_call(q, q, q, None, False, None, [method], None)).order[0] == first


# On a GPU.


def here(method: Perturbation) -> bool:
    if not torch.cuda.is_available():
        return False
    q = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device="cuda")
    return fa4.refuse(make_call(q, q, q, None, False, None, [method], None)) is None


def on_gpu(method: Perturbation, where: str) -> Any:
    reason = f"needs flash-attn-4 and a {where} GPU"
    return pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not here(method), reason=reason)])


ON_GPU = on_gpu(DropKey(0.1), "Hopper or Blackwell")
HITS_ON_GPU = on_gpu(HardMask(0.1), "Hopper")
Tensors = tuple[Tensor, ...]


def make(heads: int, kv_heads: int, nq: int, nk: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    sizes = [(2, heads, nq, width), (2, kv_heads, nk, width), (2, kv_heads, nk, width)]
    return tuple(torch.randn(size, device="cuda", dtype=dtype).requires_grad_() for size in sizes)


def outputs(impl: str, qkv: Tensors, dout: Tensor, p: float, causal: bool) -> Tensors:
    out = attemper.attention(*qkv, methods=[DropKey(p)], is_causal=causal, seed=7, impl=impl)
    return out.detach(), *torch.autograd.grad(out, qkv, dout.to(out.dtype))


@pytest.mark.parametrize("device", [ON_GPU])
@pytest.mark.parametrize(("p", "dtype"), [(0.1, torch.bfloat16), (0.5, torch.bfloat16), (0.3, torch.float16)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 3, 577, 577, 64),
        (4, 2, 577, 577, 64),
        (2, 2, 1000, 1000, 128),
        (2, 2, 300, 1000, 64),
        (2, 2, 300, 300, 96),
        (2, 2, 5, 5, 32),
        (4, 2, 5, 5, 64),
    ],
)
def test_as_exact_as_its_dtype_allows(
    shape: tuple[int, ...], causal: bool, p: float, dtype: torch.dtype, device: str
) -> None:
    """In float16 the forward kernel is FlashAttention-4's, in bfloat16 up to head width 64 ours."""
    if causal and shape[2] != shape[3]:
        pytest.skip("causal calls have as many queries as keys")
    qkv = make(*shape, dtype)
    dout = torch.randn_like(qkv[0])
    exact = tuple(t.detach().double().requires_grad_() for t in qkv)
    for given, wanted in zip(
        outputs("fa4", qkv, dout, p, causal), outputs("reference", exact, dout, p, causal), strict=True
    ):
        assert (given.double() - wanted).norm() <= 1e-2 * wanted.norm() + 1e-3


@pytest.mark.parametrize("device", [HITS_ON_GPU])
@pytest.mark.parametrize("methods", [[HardMask(0.5)], [HardMask(0.5, fill="neg_inf")], [Blur(), HardMask(0.9, k=20)]])
@pytest.mark.parametrize(
    "shape",
    [(3, 3, 577, 577, 64), (4, 2, 577, 577, 64), (2, 2, 1000, 1000, 128), (2, 2, 300, 1000, 96), (2, 2, 50, 21, 32)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hard_masking_is_as_exact_as_its_dtype_allows(
    shape: tuple[int, ...], methods: list[Perturbation], dtype: torch.dtype, device: str
) -> None:
    """Blurred keys are rounded, and then other logits may be the largest. So with Blur the judge is another kernel."""
    qkv = make(*shape, dtype)
    dout = torch.randn_like(qkv[0])
    results = []
    for impl in ("fa4", "triton" if len(methods) > 1 else "reference"):
        tensors = tuple(t.detach().to(torch.float64 if impl == "reference" else dtype).requires_grad_() for t in qkv)
        out = attemper.attention(*tensors, methods=methods, seed=7, impl=impl)
        results.append((out.detach(), *torch.autograd.grad(out, tensors, dout.to(out.dtype))))
    for given, wanted in zip(*results, strict=True):
        assert (given.double() - wanted.double()).norm() <= 1e-2 * wanted.double().norm() + 1e-3


@pytest.mark.parametrize("device", [ON_GPU])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks_are_those_of_keep_mask_in_both_passes(
    dtype: torch.dtype, kv_heads: int, causal: bool, device: str
) -> None:
    """Equal logits give equal weights to the keys that are kept: V shows them in the output, dO shows them in dV."""
    n, width, p = 321, 64, 0.4
    allowed = torch.ones(n, n, dtype=torch.bool, device=device).tril() if causal else None
    kept = rescue(keep_mask(torch.tensor(7, device=device), (2, 4, n, n), p), allowed)
    kept = kept if allowed is None else kept & allowed
    q, k = (torch.zeros(2, h, n, width, dtype=dtype, device=device) for h in (4, kv_heads))
    group = 4 // kv_heads
    for start in range(0, n, width):
        units = torch.eye(n, width, dtype=dtype, device=device).roll(start, 0)
        units[:start] = 0
        part = slice(start, min(start + width, n))
        count = part.stop - part.start
        v = units.repeat(2, kv_heads, 1, 1).requires_grad_()
        out = attemper.attention(q, k, v, methods=[DropKey(p)], is_causal=causal, seed=7, impl="fa4")
        assert torch.equal((out > 0)[..., :count], kept[..., part])
        for one in range(group):
            dout = torch.zeros_like(out).unflatten(1, (-1, group))
            dout[:, :, one] = units
            (dv,) = torch.autograd.grad(out, v, dout.flatten(1, 2), retain_graph=True)
            assert torch.equal((dv > 0)[..., :count].mT, kept.unflatten(1, (-1, group))[:, :, one, part])


@pytest.mark.parametrize("device", [HITS_ON_GPU])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_hard_masking_keeps_the_same_promises(kv_heads: int, device: str) -> None:
    """Deterministic on request; the same compiled; and with inputs of autocast."""
    qkv = make(4, kv_heads, 1000, 1000, 64)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[HardMask(0.5)], seed=7, impl="fa4")

    def run(function: Callable[..., Tensor], tensors: Tensors) -> Tensors:
        out = function(*tensors)
        return out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))

    torch.use_deterministic_algorithms(True)
    try:
        runs = [run(call, qkv) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    with torch.autocast(device, torch.bfloat16):
        cast = run(call, tuple(t.detach().float().requires_grad_() for t in qkv))
    for other in (run(torch.compile(call, fullgraph=True), qkv), cast):
        assert all((a - b).norm() <= 1e-3 * b.norm() for a, b in zip(other, runs[0], strict=True))


@pytest.mark.parametrize("device", [ON_GPU])
def test_deterministic_on_request(device: str) -> None:
    for kv_heads in (4, 2):
        qkv = make(4, kv_heads, 1000, 1000, 64)
        torch.use_deterministic_algorithms(True)
        try:
            runs = [outputs("fa4", qkv, torch.ones_like(qkv[0]), 0.1, False) for _ in range(3)]
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize(
    ("method", "device"),
    [pytest.param(DropKey(0.3), *ON_GPU.values, marks=ON_GPU.marks),
     pytest.param(HardMask(0.5), *HITS_ON_GPU.values, marks=HITS_ON_GPU.marks)],
)  # fmt: skip
def test_a_cuda_graph_draws_fresh_masks_on_every_replay(method: Perturbation, device: str) -> None:
    qkv = make(4, 4, 577, 577, 64)
    dout = torch.ones_like(qkv[0])

    def step() -> Tensors:
        out = attemper.attention(*qkv, methods=[method], impl="fa4")
        return out.detach(), *torch.autograd.grad(out, qkv, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append([t.clone() for t in results])
    assert all(torch.isfinite(t).all() for replay in replays for t in replay)
    for a, b in itertools.combinations(replays, 2):
        assert not any(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("device", [ON_GPU])
def test_compiles_in_one_graph_with_the_same_masks(device: str) -> None:
    qkv = make(4, 4, 577, 577, 64)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[DropKey(0.3)], impl="fa4")

    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        torch.manual_seed(4)
        out = function(*qkv)
        results.append((out, *torch.autograd.grad(out, qkv, torch.ones_like(out))))
    assert torch.equal(results[0][0], results[1][0])
    for given, wanted in zip(*results, strict=True):
        assert (given - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.parametrize("device", [ON_GPU])
def test_opcheck(device: str) -> None:
    seed, (q, k, v) = torch.tensor(5, device=device), make(4, 4, 577, 577, 64)
    words = call_words(Stream(seed), threshold(0.1), (2, 4, 577, 577), False)
    torch.library.opcheck(torch.ops.attemper.fa4_words, (seed, None, 0, 2, 4, 577, 577, True, 5, 1, 2, 3, 4, 6))
    torch.library.opcheck(torch.ops.attemper.fa4_attention, (q, k, v, words, 0.125, False))


@pytest.mark.parametrize("device", [ON_GPU])
def test_autocast_computes_in_its_dtype(device: str) -> None:
    qkv = make(4, 4, 577, 577, 64, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        out = attemper.attention(*qkv, methods=[DropKey(0.1)], impl="fa4")
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.sum(), qkv[0])[0].dtype == torch.float32


@pytest.mark.parametrize("device", [ON_GPU])
def test_memory_grows_with_tokens_and_not_with_their_square(device: str) -> None:
    peaks = []
    for tokens in (2048, 8192):
        qkv = make(4, 4, tokens, tokens, 64)
        for _ in range(2):  # the first call compiles
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = attemper.attention(*qkv, methods=[DropKey(0.1)], impl="fa4")
            torch.autograd.grad(out, qkv, torch.ones_like(out))
            peaks.append(torch.cuda.max_memory_allocated() - before)
            del out
    assert peaks[3] <= 4.2 * peaks[1]


@pytest.mark.parametrize("device", [ON_GPU])
def test_packed_inputs_are_not_copied(device: str) -> None:
    packed = torch.randn(2, 2048, 3, 4, 64, device=device, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4).unbind(0)
    results, peaks = [], []
    for qkv in (packed, [t.contiguous() for t in packed]):
        for _ in range(2):  # the first call compiles
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = attemper.attention(*qkv, methods=[DropKey(0.1)], seed=1, impl="fa4")
            peak = torch.cuda.max_memory_allocated() - before
        results.append(out)
        peaks.append(peak)
        del out
    assert torch.equal(*results)
    assert peaks[0] == peaks[1]
