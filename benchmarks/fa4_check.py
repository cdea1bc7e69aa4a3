"""FlashAttention-4 on a GPU that has it: is it right, does it keep its promises, and how fast is it.

    python benchmarks/fa4_check.py --json benchmarks/results/fa4-h200.json

Every section stands by itself: one that fails prints its traceback and the others go on. Kernels are compiled first, in
several processes, into a cache on disk. FA4 in the environment names a folder that holds the packages, if they are not
installed. --skip and --only take names of sections.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import site
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if "FA4" in os.environ:
    site.addsitedir(os.environ["FA4"])
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path(tempfile.gettempdir()) / "attemper-fa4-cache"))

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attemper
from attemper.kernels.fa4.tables import call_words
from attemper.lab.bench.machine import versions
from attemper.lab.bench.timing import CudaStopwatch, interleaved
from attemper.methods import Blur, DropHead, DropKey, HardMask
from attemper.ops.dispatch import Impl
from attemper.ops.stream import Stream, threshold

STARTED = time.perf_counter()
TESTS = Path(__file__).parents[1] / "tests" / "test_fa4.py"
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
        make = partial(torch.randn, device="cuda", dtype=self.dtype)
        if self.packed:
            qkv = make(self.batch, self.queries, 3, self.heads, self.width)
            return [t.requires_grad_() for t in qkv.permute(2, 0, 3, 1, 4).unbind(0)]
        sizes = [(self.heads, self.queries), (self.kv_heads, self.keys), (self.kv_heads, self.keys)]
        return [make(self.batch, h, n, self.width).requires_grad_() for h, n in sizes]


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
    Case(queries=100, keys=100, kv_heads=2, p=0.5),
    Case(queries=1, keys=700),
    Case(width=32),
    Case(width=96),
]


def run(case: Case, impl: Impl, methods: list[Any] | None = None) -> list[Tensor]:
    """Output, dq, dk, dv, the reference in float64."""
    qkv = case.tensors()
    if impl == "reference":
        qkv = [t.detach().double().requires_grad_() for t in qkv]
    methods = [DropKey(case.p)] if methods is None else methods
    out = attemper.attention(*qkv, methods=methods, is_causal=case.causal, seed=SEED, impl=impl)
    torch.manual_seed(5)
    dout = torch.randn(out.shape, device="cuda", dtype=case.dtype)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout.to(out.dtype))]


def errors(given: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [
        float("nan") if not torch.isfinite(a).all() else float((a.double() - b).norm() / b.norm().clamp(min=1e-9))
        for a, b in zip(given, wanted, strict=True)
    ]


def compare(case: Case, label: str, methods: list[Any] | None = None) -> bool:
    found = errors(run(case, "fa4", methods), run(case, "reference", methods))
    right = all(error <= TOLERANCE[case.dtype] for error in found)
    numbers = " ".join(f"{error:.1e}" for error in found)
    print(f"  {'ok  ' if right else 'FAIL'} {label}: out, dq, dk, dv {numbers}", flush=True)
    return right


def check_cases(report: dict[str, Any]) -> None:
    checks: dict[str, tuple[Case, list[Any] | None]] = {str(case): (case, None) for case in CASES}
    checks["blur + dropkey"] = Case(), [Blur(), DropKey(0.1)]
    checks["drophead + dropkey"] = Case(), [DropHead(0.3), DropKey(0.1)]
    checks["none"] = Case(), []
    for width in (32, 64, 96, 128):
        checks[f"hardmask {width}"] = Case(width=width, queries=700, keys=900), [HardMask(0.5)]
    checks["hardmask shared"] = Case(kv_heads=2), [HardMask(0.5)]
    checks["hardmask -inf"] = Case(), [HardMask(0.5, fill="neg_inf")]
    checks["hardmask -inf 128"] = Case(width=128), [HardMask(0.5, fill="neg_inf")]
    failed = []
    for label, (case, methods) in checks.items():
        try:
            right = compare(case, label, methods)
        except Exception:
            right = False
            traceback.print_exc()
        if not right:
            failed.append(label)
    report["cases"] = {"count": len(checks), "failed": failed}


class Outcomes:
    """A plugin of pytest that counts what passed, failed and was skipped."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.count[report.outcome] += 1


def run_tests(report: dict[str, Any], label: str, which: str) -> None:
    """Tests of ours that need this GPU, in this process, which knows where the packages are."""
    outcomes = Outcomes()
    pytest.main([str(TESTS), "-m", "gpu", "-k", which, "-q", "-p", "no:cacheprovider"], plugins=[outcomes])
    report[label] = dict(outcomes.count)


def stock(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


def ours(impl: Impl, methods: list[Any]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attemper.attention(q, k, v, methods=methods, impl=impl)


def steps_at(shape: tuple[int, int, int, int]) -> dict[str, Callable[[], object]]:
    """What is timed at one shape: whole passes, and what FlashAttention-4's are made of."""
    batch, heads, tokens, width = shape
    qkv = [torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
    q, k, v = (t.detach() for t in qkv)
    dout, seed, scale = torch.randn_like(q), torch.tensor(SEED, device="cuda"), width**-0.5
    passes = {
        "both stock cudnn": stock(SDPBackend.CUDNN_ATTENTION),
        "both stock flash": stock(SDPBackend.FLASH_ATTENTION),
        "both stock efficient": stock(SDPBackend.EFFICIENT_ATTENTION),
        "both triton dropkey": ours("triton", [DropKey(RATE)]),
        "both fa4 dropkey": ours("fa4", [DropKey(RATE)]),
        "both fa4 nothing": ours("fa4", []),
        "both triton hardmask": ours("triton", [HardMask(RATE)]),
        "both fa4 hardmask": ours("fa4", [HardMask(RATE)]),
        "both fa4 blur": ours("fa4", [Blur()]),
    }

    def gradients(attend: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(attend(*qkv), qkv, dout)

    steps: dict[str, Callable[[], object]] = {label: partial(gradients, attend) for label, attend in passes.items()}
    for label in ("stock cudnn", "triton dropkey", "triton hardmask"):
        steps[f"forward {label}"] = partial(passes[f"both {label}"], q, k, v)
    steps["words"] = lambda: call_words(Stream(seed), threshold(RATE), (batch, heads, tokens, tokens), False)
    forward, backward = torch.ops.attemper.fa4_attention, torch.ops.attemper.fa4_attention_backward
    for label, words in {"nothing": None, "dropkey": steps["words"]()}.items():
        saved = forward(q, k, v, words, scale, False)
        steps[f"forward fa4 {label}"] = partial(forward, q, k, v, words, scale, False)
        steps[f"backward fa4 {label}"] = partial(backward, dout, q, k, v, *saved, words, scale, False, False)
    return steps


def time_shape(shape: tuple[int, int, int, int], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """The median milliseconds of every step at one shape, and the peak MiB of whole passes."""
    stopwatch, prepared = CudaStopwatch(torch.device("cuda")), {}
    for label, step in steps_at(shape).items():
        try:
            prepared[label] = stopwatch.prepare(step)
            if not prepared[label].captured:
                print(f"  {shape} {label}: not captured in a graph")
        except Exception as error:
            torch.cuda.synchronize()
            print(f"  {shape} {label}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    labels = list(prepared)
    times, failures = interleaved([partial(stopwatch.seconds, one) for one in prepared.values()], rounds)
    for column, why in failures.items():
        print(f"  {shape} {labels[column]}: {why}")
    medians = {label: float(np.median(times[:, at])) * 1e3 for at, label in enumerate(labels) if at not in failures}
    return medians, {label: prepared[label].peak_bytes / 2**20 for label in labels if label.startswith("both")}


def time_shapes(report: dict[str, Any], rounds: int, limit: float) -> None:
    for shape in SHAPES:
        if time.perf_counter() - STARTED > limit:
            print(f"  {shape}: not measured, {limit:.0f} s are over")
            continue
        medians, peaks = time_shape(shape, rounds)
        report.setdefault("milliseconds", {})[str(shape)] = medians
        report.setdefault("peak_mib", {})[str(shape)] = peaks
        base = min((value for label, value in medians.items() if "both stock" in label), default=float("nan"))
        print(f"\n  {shape}: milliseconds, and for both passes the ratio to torch's fastest without dropping, peak MiB")
        for label, value in sorted(medians.items(), key=lambda pair: (pair[0].split()[0], pair[1])):
            more = f"  {value / base:5.2f}  {peaks[label]:8.0f}" if label in peaks else ""
            print(f"    {label:24} {value:9.4f}{more}", flush=True)
        torch.cuda.empty_cache()


def launches(report: dict[str, Any]) -> None:
    """What a launch takes on the host: many calls of a small shape, without waiting for the device."""
    q, k, v = (torch.randn(1, 1, 128, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))

    def host_ms(step: Callable[[], object], count: int = 50) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count * 1e3

    impls: tuple[Impl, ...] = ("triton", "fa4")
    for impl in impls:
        attend = partial(ours(impl, [DropKey(RATE)]), q, k, v)
        gradients = partial(torch.autograd.grad, attend(), (q, k, v), q, retain_graph=True)
        gradients()
        found = [host_ms(attend), host_ms(gradients)]
        print(f"  host milliseconds of {impl}, forward and backward: {found[0]:.3f} {found[1]:.3f}")
        report.setdefault("host_ms", {})[impl] = found


Job = tuple[Case, list[Any] | None, bool]


def jobs() -> list[Job]:
    """What must be compiled: a call, its methods if not DropKey, and whether it is deterministic."""
    kinds = {(c.dtype, c.width, c.causal, c.heads // c.kv_heads): c for c in CASES}
    found: list[Job] = [(case, None, False) for case in kinds.values()]
    found += [(Case(), [], False), (Case(width=128), [], False)]
    found += [(Case(width=width), [HardMask(0.5)], False) for width in (32, 64, 96, 128)]
    return [*found, (Case(), None, True), (Case(kv_heads=2), None, True)]


def compile_share(which: int, count: int) -> None:
    for case, methods, deterministic in jobs()[which::count]:
        try:
            torch.use_deterministic_algorithms(deterministic)
            run(case, "fa4", methods)
        except Exception as error:
            print(f"  compile {case}: {type(error).__name__}: {str(error)[:300]}")


def compile_all(workers: int) -> None:
    """Every kernel, in several processes; what they could not, this one does when it is needed."""
    command = [sys.executable, __file__, "--compile"]
    started = [subprocess.Popen([*command, str(which), str(workers)]) for which in range(workers)]
    deadline = time.perf_counter() + 120
    for process in started:
        try:
            process.wait(max(1.0, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            print("  a compiler process took too long and was stopped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=130.0, help="seconds after which no shape is begun")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--compile", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_share(*options.compile)
        return
    report: dict[str, Any] = {"benchmark": "fa4", "machine": torch.cuda.get_device_name()}
    report |= {"date": str(datetime.date.today()), "versions": versions(("triton", "flash-attn-4"))}
    report["settings"] = {"rate": RATE, "dtype": "bfloat16", "rounds": options.rounds}
    print(report["machine"], report["versions"])
    sections: dict[str, Callable[[], None]] = {
        "compile": lambda: compile_all(options.workers),
        "cases": lambda: check_cases(report),
        "masks": lambda: run_tests(report, "masks", "masks_are_those"),
        "promises": lambda: run_tests(report, "promises", "not masks_are_those"),
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
        now = time.perf_counter()
        print(f"== {label}: {now - started:.1f} s, {now - STARTED:.0f} s in all", flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
