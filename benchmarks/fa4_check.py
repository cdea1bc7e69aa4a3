"""FlashAttention-4 on a GPU that has it: is it right, does it keep its promises, and which way of dropping is fastest.

    python benchmarks/fa4_check.py --json benchmarks/results/fa4-h200.json

Every section stands by itself: one that fails prints its traceback and the others go on. Kernels are compiled first, in
several processes, into a cache on disk (--no-cache compiles them one by one, in memory). FA4 in the environment names a
folder that holds the packages, if they are not installed. --skip and --only take names of sections.

Ways of dropping are named kind/rows/columns/way, as in `attemper.ops.fa4.library.Source`; --forward and --backward pick
those that everything but the comparison itself uses.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import site
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if "FA4" in os.environ:
    site.addsitedir(os.environ["FA4"])
if "--no-cache" not in sys.argv:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path(tempfile.gettempdir()) / "attemper-fa4-cache"))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attemper
from attemper.bench.timing import CudaStopwatch, interleaved
from attemper.methods import Blur, DropHead, DropKey
from attemper.ops.fa4 import library
from attemper.ops.fa4.library import Source
from attemper.ops.fa4.tables import call_words
from attemper.ops.perturbation import rescue
from attemper.ops.stream import keep_mask, threshold

FORWARDS = [
    Source("mask", "table", "table", "address"),
    Source("mask", "mixed", "table", "address"),
    Source("mask", "table", "mixed", "address"),
    Source("score", "table", "table", "address"),
    Source("mask", "mixed", "table", "tensors"),
    Source("mask", "mixed", "mixed", "tensors"),
]
BACKWARDS = [
    Source("score", "table", "mixed", "address"),
    Source("score", "table", "table", "address"),
    Source("mask", "table", "mixed", "address"),
    Source("score", "mixed", "mixed", "address"),
    Source("mask", "mixed", "mixed", "address"),
    Source("mask", "mixed", "mixed", "tensors"),
]
SHAPES = [(64, 12, 577, 64), (32, 12, 1024, 64), (8, 12, 4096, 64), (4, 12, 4096, 128), (2, 12, 16384, 64)]
RATE, SEED = 0.1, 1234567890123
BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 2e-2, FP16: 4e-3}


@dataclass(frozen=True)
class Case:
    """One kind of call."""

    heads: int = 4
    kv_heads: int = 4
    queries: int = 577
    keys: int = 577
    width: int = 64
    dtype: torch.dtype = BF16
    causal: bool = False
    p: float = 0.1
    packed: bool = False
    batch: int = 2

    def __str__(self) -> str:
        extra = [name for name in ("causal", "packed") if getattr(self, name)]
        shape = f"({self.batch}, {self.heads}/{self.kv_heads}, {self.queries}x{self.keys}, {self.width})"
        return " ".join([shape, str(self.dtype).removeprefix("torch."), f"p={self.p}", *extra])

    def tensors(self) -> list[Tensor]:
        torch.manual_seed(3)
        if self.packed:
            sizes = (self.batch, self.queries, 3, self.heads, self.width)
            qkv = torch.randn(sizes, device="cuda", dtype=self.dtype)
            return [t.requires_grad_() for t in qkv.permute(2, 0, 3, 1, 4).unbind(0)]
        sizes = [(self.heads, self.queries), (self.kv_heads, self.keys), (self.kv_heads, self.keys)]
        return [
            torch.randn(self.batch, h, n, self.width, device="cuda", dtype=self.dtype).requires_grad_()
            for h, n in sizes
        ]


CASES = [
    Case(),
    Case(queries=1000, keys=1000, dtype=FP16),
    Case(queries=1000, keys=1000, width=128),
    Case(queries=300, keys=1000),
    Case(queries=1000, keys=300),
    Case(packed=True),
    Case(p=0.5),
    Case(p=0.0),
    Case(kv_heads=2),
    Case(kv_heads=1, queries=1000, keys=1000),
    Case(causal=True),
    Case(causal=True, p=0.5),
    Case(queries=1000, keys=1000, width=128, causal=True),
    Case(causal=True, packed=True, p=0.3),
    Case(kv_heads=2, causal=True, p=0.4),
    Case(queries=5, keys=3, p=0.5, batch=8),
    Case(queries=1, keys=700),
    Case(width=32),
    Case(width=80),
    Case(width=96),
    Case(width=8),
]


# ------------------------------------------------------------------------------------------------------------ sections
def run(case: Case, impl: str, methods: list[Any] | None = None, dout: Tensor | None = None) -> list[Tensor]:
    """Output, dq, dk, dv, the reference in float64."""
    qkv = case.tensors()
    if impl == "reference":
        qkv = [t.detach().double().requires_grad_() for t in qkv]
    methods = [DropKey(case.p)] if methods is None else methods
    out = attemper.attention(*qkv, methods=methods, is_causal=case.causal, seed=SEED, impl=impl)  # type: ignore[arg-type]
    torch.manual_seed(5)
    dout = torch.randn(out.shape, device="cuda", dtype=case.dtype) if dout is None else dout
    return [out.detach(), *torch.autograd.grad(out, qkv, dout.to(out.dtype))]


def errors(given: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [
        float("nan") if not torch.isfinite(a).all() else float((a.double() - b).norm() / b.norm().clamp(min=1e-9))
        for a, b in zip(given, wanted, strict=True)
    ]


def compare(case: Case, label: str, methods: list[Any] | None = None) -> bool:
    found = errors(run(case, "fa4", methods), run(case, "reference", methods))
    right = all(error <= TOLERANCE[case.dtype] for error in found)
    print(
        f"  {'ok  ' if right else 'FAIL'} {label}: out, dq, dk, dv " + " ".join(f"{e:.1e}" for e in found), flush=True
    )
    return right


@contextlib.contextmanager
def sources(forward: Source, backward: Source) -> Iterator[None]:
    before = library.FORWARD, library.BACKWARD
    library.FORWARD, library.BACKWARD = forward, backward
    try:
        yield
    finally:
        library.FORWARD, library.BACKWARD = before


def check_sources(report: dict[str, Any]) -> None:
    """Every way of dropping against the reference; if the chosen ones are wrong, others are chosen."""
    right: dict[str, list[Source]] = {"forward": [], "backward": []}
    for forward, backward in itertools.zip_longest(FORWARDS, BACKWARDS):
        with sources(forward or FORWARDS[0], backward or BACKWARDS[0]):
            for width in (64, 128):
                try:
                    good = compare(Case(width=width), f"forward {name(forward)}, backward {name(backward)}, {width}")
                except Exception:
                    good = False
                    traceback.print_exc()
                if not good:
                    break
            else:
                right["forward"].append(forward)
                right["backward"].append(backward)
    report["right"] = {side: [name(source) for source in found] for side, found in right.items()}
    if right["forward"] and library.FORWARD not in right["forward"]:
        library.FORWARD = right["forward"][0]
        print(f"  !! the rest uses forward {name(library.FORWARD)}")
    if right["backward"] and library.BACKWARD not in right["backward"]:
        library.BACKWARD = right["backward"][0]
        print(f"  !! the rest uses backward {name(library.BACKWARD)}")


def check_cases(report: dict[str, Any]) -> None:
    failed = []
    for case in CASES:
        try:
            if not compare(case, str(case)):
                failed.append(str(case))
        except Exception:
            failed.append(str(case))
            print(f"  FAIL {case}")
            traceback.print_exc()
    methods = {
        "blur + dropkey": [Blur(), DropKey(0.1)],
        "drophead + dropkey": [DropHead(0.3), DropKey(0.1)],
        "none": [],
    }
    for label, some in methods.items():
        try:
            if not compare(Case(), label, some):
                failed.append(label)
        except Exception:
            failed.append(label)
            traceback.print_exc()
    report["cases"] = {"count": len(CASES) + len(methods), "failed": failed}


def check_masks(report: dict[str, Any]) -> None:
    """Weights of equal logits tell which keys were kept: in the output through V, in dV through its gradient."""
    wrong = {}
    for case in (Case(heads=3, kv_heads=3, p=0.3), Case(heads=4, kv_heads=2, p=0.3), Case(p=0.5, causal=True)):
        batch, heads, n, width = case.batch, case.heads, case.keys, case.width
        allowed = torch.ones(n, n, dtype=torch.bool, device="cuda").tril() if case.causal else None
        seed = torch.tensor(SEED, device="cuda")
        wanted = rescue(keep_mask(seed, (batch, heads, n, n), case.p), allowed)
        wanted = wanted if allowed is None else wanted & allowed
        q = torch.zeros(batch, heads, n, width, device="cuda", dtype=BF16)
        k = torch.zeros(batch, case.kv_heads, n, width, device="cuda", dtype=BF16)
        unit = torch.eye(n, device="cuda", dtype=BF16)
        missed = [0, 0]
        for start in range(0, n, width):
            part = unit[:, start : start + width]
            part = F.pad(part, (0, width - part.shape[1]))
            kept = min(width, n - start)
            v = part.expand(batch, case.kv_heads, n, width).contiguous().requires_grad_()
            out = attemper.attention(q, k, v, methods=[DropKey(case.p)], is_causal=case.causal, seed=SEED, impl="fa4")
            missed[0] += int(((out > 0)[..., :kept] != wanted[..., start : start + kept]).sum())
            group = heads // case.kv_heads
            for one in range(group):  # heads that share keys, one after another
                dout = torch.zeros_like(out).unflatten(1, (-1, group))
                dout[:, :, one] = part
                (dv,) = torch.autograd.grad(out, v, dout.flatten(1, 2), retain_graph=True)
                rows = wanted.unflatten(1, (-1, group))[:, :, one, start : start + kept]
                missed[1] += int(((dv > 0)[..., :kept].transpose(-2, -1) != rows).sum())
        print(f"  {'ok  ' if missed == [0, 0] else 'FAIL'} {case}: entries that differ {missed} of {wanted.numel()}")
        wrong[str(case)] = missed
    report["masks"] = wrong


def check_promises(report: dict[str, Any]) -> None:
    for promise in (deterministic, graphs, compiles, opchecks, memory, copies, autocasts, chosen):
        started = time.perf_counter()
        try:
            verdict = promise()
        except Exception:
            traceback.print_exc()
            verdict = "FAIL: " + traceback.format_exc().strip().splitlines()[-1]
        print(f"  {promise.__name__}: {verdict} ({time.perf_counter() - started:.1f} s)", flush=True)
        report.setdefault("promises", {})[promise.__name__] = verdict


def deterministic() -> str:
    case = Case(queries=1000, keys=1000)
    plain = run(case, "fa4"), run(case, "fa4")
    torch.use_deterministic_algorithms(True)
    try:
        runs = [run(case, "fa4") for _ in range(4)]
        grouped = [run(Case(queries=1000, keys=1000, kv_heads=2), "fa4") for _ in range(3)]
        error = max(errors(runs[0], run(case, "reference")))
    finally:
        torch.use_deterministic_algorithms(False)
    same = all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    same_grouped = all(torch.equal(a, b) for other in grouped[1:] for a, b in zip(grouped[0], other, strict=True))
    free = [torch.equal(a, b) for a, b in zip(*plain, strict=True)]
    return f"on request {same}, with shared keys {same_grouped}, error {error:.1e}; without asking {free}"


def graphs() -> str:
    q, k, v = (t.detach().requires_grad_() for t in Case().tensors())
    dout = torch.ones_like(q)

    def step() -> tuple[Tensor, ...]:
        out = attemper.attention(q, k, v, methods=[DropKey(0.3)], impl="fa4")
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    replays = []
    for _ in range(3):
        torch.empty(2**26, device="cuda").fill_(float("nan"))
        graph.replay()
        replays.append([t.clone() for t in out])
    fresh = not any(torch.equal(a, b) for a, b in itertools.combinations([r[0] for r in replays], 2))
    finite = all(bool(torch.isfinite(t).all()) for r in replays for t in r)
    return f"fresh masks {fresh}, finite {finite}"


def compiles() -> str:
    q, k, v = Case().tensors()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attemper.attention(q, k, v, methods=[DropKey(0.3)], impl="fa4")

    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        torch.manual_seed(4)
        out = function(q, k, v)
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
    found = errors(results[1], [t.double() for t in results[0]])
    return f"output the same {torch.equal(results[0][0], results[1][0])}, gradients differ by {max(found[1:]):.1e}"


def opchecks() -> str:
    seed = torch.tensor(SEED, device="cuda")
    q, k, v = Case().tensors()
    words = call_words(seed, threshold(0.1), 0, (2, 4, 577, 577), False)
    torch.library.opcheck(torch.ops.attemper.fa4_words, (seed, None, 0, 0, 2, 4, 577, 577, True))
    torch.library.opcheck(torch.ops.attemper.fa4_attention, (q, k, v, words, 0.125, False))
    return "passed"


def memory() -> str:
    peaks = []
    for tokens in (2048, 4096, 8192):
        q, k, v = (torch.randn(1, 4, tokens, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
        for _ in range(2):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = attemper.attention(q, k, v, methods=[DropKey(0.1)], impl="fa4")
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            peak = torch.cuda.max_memory_allocated() - before
            del out
        peaks.append(peak / 2**20)
    return "MiB at 2048, 4096, 8192 tokens: " + ", ".join(f"{peak:.1f}" for peak in peaks)


def copies() -> str:
    """Packed qkv must allocate no more than separate tensors do."""
    peaks = []
    for packed in (False, True):
        q, k, v = (t.detach() for t in Case(packed=packed, queries=4096, keys=4096).tensors())
        attemper.attention(q, k, v, methods=[DropKey(0.1)], seed=1, impl="fa4")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attemper.attention(q, k, v, methods=[DropKey(0.1)], seed=1, impl="fa4")
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
    return f"MiB separate, packed: {peaks[0]:.2f}, {peaks[1]:.2f}"


def autocasts() -> str:
    q, k, v = (t.detach().float().requires_grad_() for t in Case().tensors())
    with torch.autocast("cuda", BF16):
        out = attemper.attention(q, k, v, methods=[DropKey(0.1)], seed=1, impl="fa4")
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return f"output {out.dtype}, gradients {grads[0].dtype}"


def chosen() -> str:
    found = []
    for tokens in (577, 1024, 4096):
        q = torch.randn(1, 2, tokens, 64, device="cuda", dtype=BF16)
        verdicts = attemper.implementations(q, q, q, methods=[DropKey(0.1)])
        found.append(f"{tokens}: " + next(f"{one.name} ({one.because})" for one in verdicts if one.chosen))
    return "; ".join(found)


# -------------------------------------------------------------------------------------------------------------- timing
def stock(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


def ours(impl: str, methods: list[Any]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attemper.attention(q, k, v, methods=methods, impl=impl)  # type: ignore[arg-type]


def steps_at(shape: tuple[int, int, int, int]) -> dict[str, Callable[[], object]]:
    """What is timed at one shape: whole passes, and FlashAttention-4's two kernels by way of dropping."""
    batch, heads, tokens, width = shape
    qkv = [torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
    q, k, v = (t.detach() for t in qkv)
    dout = torch.randn(shape, device="cuda", dtype=BF16)
    seed = torch.tensor(SEED, device="cuda")
    words = call_words(seed, threshold(RATE), 0, (batch, heads, tokens, tokens), False)
    scale = width**-0.5
    passes = {
        "both stock cudnn": stock(SDPBackend.CUDNN_ATTENTION),
        "both stock flash": stock(SDPBackend.FLASH_ATTENTION),
        "both stock efficient": stock(SDPBackend.EFFICIENT_ATTENTION),
        "both triton dropkey": ours("triton", [DropKey(RATE)]),
        "both fa4 dropkey": ours("fa4", [DropKey(RATE)]),
        "both fa4 nothing": ours("fa4", []),
    }
    steps: dict[str, Callable[[], object]] = {
        label: lambda attend=attend: torch.autograd.grad(attend(*qkv), qkv, dout) for label, attend in passes.items()
    }
    steps["forward stock cudnn"] = lambda: passes["both stock cudnn"](q, k, v)
    steps["words"] = lambda: call_words(seed, threshold(RATE), 0, (batch, heads, tokens, tokens), False)
    steps["words causal"] = lambda: call_words(seed, threshold(RATE), 0, (batch, heads, tokens, tokens), True)

    def forward(source: Source | None) -> object:
        with sources(source or FORWARDS[0], BACKWARDS[0]):
            return torch.ops.attemper.fa4_attention(q, k, v, None if source is None else words, scale, False)

    def backward(source: Source | None, saved: tuple[Tensor, ...]) -> object:
        with sources(FORWARDS[0], source or BACKWARDS[0]):
            some = None if source is None else words
            return torch.ops.attemper.fa4_attention_backward(dout, q, k, v, *saved, some, scale, False, False)

    for source in (None, *FORWARDS):
        steps[f"forward fa4 {name(source)}"] = lambda source=source: forward(source)
    saved = torch.ops.attemper.fa4_attention(q, k, v, words, scale, False)
    for source in (None, *BACKWARDS):
        steps[f"backward fa4 {name(source)}"] = lambda source=source: backward(source, saved)
    return steps


def time_shapes(report: dict[str, Any], rounds: int, limit: float) -> None:
    table: dict[str, dict[str, float]] = {}
    for shape in SHAPES:
        if time.perf_counter() - STARTED > limit:
            print(f"  {shape}: not measured, {limit:.0f} s are over")
            continue
        stopwatch = CudaStopwatch(torch.device("cuda"))
        prepared = {}
        for label, step in steps_at(shape).items():
            try:
                prepared[label] = stopwatch.prepare(step)
                if not prepared[label].captured:
                    print(f"  {shape} {label}: not captured in a graph")
            except Exception as error:
                torch.cuda.synchronize()
                print(f"  {shape} {label}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        timers = [functools.partial(stopwatch.seconds, one) for one in prepared.values()]
        times, failures = interleaved(timers, rounds)
        labels = list(prepared)
        for column, why in failures.items():
            print(f"  {shape} {labels[column]}: {why}")
        medians = {label: float(np.median(times[:, at])) * 1e3 for at, label in enumerate(labels) if at not in failures}
        table[str(shape)] = medians
        peaks = {label: prepared[label].peak_bytes / 2**20 for label in labels if label.startswith("both")}
        report.setdefault("peak_mib", {})[str(shape)] = peaks
        show(shape, medians, peaks)
        del prepared, timers, stopwatch
        torch.cuda.empty_cache()
    report["milliseconds"] = table


def show(shape: tuple[int, ...], medians: dict[str, float], peaks: dict[str, float]) -> None:
    stocks = [value for label, value in medians.items() if label.startswith("both stock")]
    base = min(stocks) if stocks else float("nan")
    print(f"\n  {shape}: milliseconds, and for both passes the ratio to torch's fastest without dropping, peak MiB")
    for label, value in sorted(medians.items(), key=lambda pair: (pair[0].split()[0], pair[1])):
        more = f"  {value / base:5.2f}  {peaks.get(label, float('nan')):8.0f}" if label.startswith("both") else ""
        print(f"    {label:50} {value:9.4f}{more}")
    best = {
        side: min((v, l) for l, v in medians.items() if l.startswith(f"{side} fa4 ") and not l.endswith("nothing"))
        for side in ("forward", "backward")
        if any(l.startswith(f"{side} fa4 ") and not l.endswith("nothing") for l in medians)
    }
    if len(best) == 2:
        total = best["forward"][0] + best["backward"][0] + medians.get("words", 0.0)
        print(f"    best together, with words: {total:.4f}, ratio {total / base:.3f}", flush=True)


def launches(report: dict[str, Any]) -> None:
    """What a launch takes on the host: many calls of a small shape, without waiting for the device."""
    q, k, v = (torch.randn(1, 1, 128, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    found = {}
    for impl in ("triton", "fa4"):
        for _ in range(3):
            out = attemper.attention(q, k, v, methods=[DropKey(0.1)], impl=impl)  # type: ignore[arg-type]
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            out = attemper.attention(q, k, v, methods=[DropKey(0.1)], impl=impl)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        forward = (time.perf_counter() - start) / 50
        start = time.perf_counter()
        for _ in range(50):
            torch.autograd.grad(out, (q, k, v), q, retain_graph=True)
        torch.cuda.synchronize()
        found[impl] = [forward * 1e3, (time.perf_counter() - start) / 50 * 1e3]
    print("  host milliseconds of forward, backward:", {k: [f"{x:.3f}" for x in v] for k, v in found.items()})
    report["host_ms"] = found


# ------------------------------------------------------------------------------------------------------------- compile
def jobs() -> list[tuple[Case, Source, Source, bool, bool]]:
    """What must be compiled: a call, how it drops, whether it is deterministic, and whether it drops at all."""
    found = [
        (Case(width=width), forward, backward, False, True)
        for width in (64, 128)
        for forward, backward in itertools.zip_longest(FORWARDS, BACKWARDS)
    ]
    chosen = library.FORWARD, library.BACKWARD
    seen: set[tuple[Any, ...]] = set()
    for case in CASES:
        kind = (case.dtype, case.width, case.causal, case.heads // case.kv_heads)
        if kind not in seen and kind not in {(BF16, 64, False, 1), (BF16, 128, False, 1)}:
            seen.add(kind)
            found.append((case, *chosen, False, True))
    found += [(Case(), *chosen, True, True), (Case(kv_heads=2), *chosen, True, True)]
    found += [(Case(width=64), *chosen, False, False), (Case(width=128), *chosen, False, False)]
    return found


def compile_share(which: int, count: int) -> None:
    for at, (case, forward, backward, fixed, drops) in enumerate(jobs()):
        if at % count == which:
            try:
                torch.use_deterministic_algorithms(fixed)
                with sources(forward, backward):
                    run(case, "fa4", None if drops else [])
            except Exception as error:
                print(f"  compile {case} {name(forward)} {name(backward)}: {type(error).__name__}: {str(error)[:300]}")


def compile_all(options: argparse.Namespace) -> None:
    """Every kernel, in several processes; what they could not, this one does when it is needed."""
    workers = min(options.workers, len(jobs()))
    chosen = ["--forward", name(library.FORWARD), "--backward", name(library.BACKWARD)]
    command = [sys.executable, __file__, *chosen, "--compile"]
    started = [subprocess.Popen([*command, str(which), str(workers)]) for which in range(workers)]
    deadline = time.perf_counter() + 120
    for process in started:
        try:
            process.wait(max(1.0, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            print("  a compiler process took too long and was stopped")


# ---------------------------------------------------------------------------------------------------------------- main
STARTED = time.perf_counter()


def name(source: Source | None) -> str:
    return "nothing" if source is None else "/".join(source)


def source_of(text: str) -> Source:
    return Source(*text.split("/"))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=130.0, help="seconds after which no shape is begun")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--forward", type=source_of, default=library.FORWARD)
    parser.add_argument("--backward", type=source_of, default=library.BACKWARD)
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--compile", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    library.FORWARD, library.BACKWARD = options.forward, options.backward
    if options.compile:
        compile_share(*options.compile)
        return
    print(torch.cuda.get_device_name(), torch.__version__, attemper.ops.fa4.INSTALLED)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rate": RATE}
    report |= {"flash-attn-4": attemper.ops.fa4.INSTALLED, "rounds": options.rounds}
    sections: dict[str, Callable[[], None]] = {
        "compile": lambda: None if options.no_cache else compile_all(options),
        "sources": lambda: check_sources(report),
        "cases": lambda: check_cases(report),
        "masks": lambda: check_masks(report),
        "promises": lambda: check_promises(report),
        "times": lambda: time_shapes(report, options.rounds, options.limit),
        "launches": lambda: launches(report),
    }
    for label, section in sections.items():
        if label in options.skip or (options.only and label not in options.only):
            continue
        started = time.perf_counter()
        print(f"== {label}", flush=True)
        try:
            section()
            torch.cuda.synchronize()
        except Exception:
            traceback.print_exc()
            report.setdefault("failed", []).append(label)
        print(
            f"== {label}: {time.perf_counter() - started:.1f} s, {time.perf_counter() - STARTED:.0f} s in all",
            flush=True,
        )
        report["forward"], report["backward"] = name(library.FORWARD), name(library.BACKWARD)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
