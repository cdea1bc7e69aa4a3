"""The attention operator, forward + backward: Attemper's kernels against torch's own, by shape.

    python benchmarks/attention.py --out benchmarks/results

For every shape it checks the fused kernels against the reference, then times all candidates inside CUDA graphs, in
turns, and prints medians and ratios to the fastest of torch's backends without dropout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attemper
from attemper.methods import DropKey

SHAPES = [
    (512, 12, 65, 32),
    (256, 6, 197, 64),
    (64, 12, 577, 64),
    (32, 12, 1024, 64),
    (8, 12, 4096, 64),
    (4, 12, 4096, 128),
    (2, 12, 16384, 64),
]
RATE = 0.1
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def listing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DropKey as its paper prints it."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    scores = scores + torch.bernoulli(torch.ones_like(scores) * RATE) * -1e12
    return scores.softmax(dim=-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attemper.attention(q, k, v, methods=[DropKey(RATE)], impl="triton")


def fused_without_methods(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attemper.attention(q, k, v, impl="triton")


def stock(backend: SDPBackend, p: float) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p)

    return attend


def candidates(tokens: int) -> dict[str, Attention]:
    found: dict[str, Attention] = {"triton, DropKey": fused, "triton, no method": fused_without_methods}
    for name, backend in BACKENDS.items():
        found[f"{name}, no dropout"] = stock(backend, 0.0)
        found[f"{name}, dropout"] = stock(backend, RATE)
    if tokens <= 1024:
        found["the paper's listing"] = listing
    return found


def capture(attend: Attention, qkv: list[Tensor], dout: Tensor, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` forward and backward passes."""

    def step() -> None:
        torch.autograd.grad(attend(*qkv), qkv, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            step()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def peak_memory(attend: Attention, qkv: list[Tensor], dout: Tensor) -> float:
    """Extra MiB at the peak of one forward and backward pass."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(attend(*qkv), qkv, dout)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def relative_error(shape: tuple[int, ...]) -> float:
    """The largest relative error of output and gradients against the reference in float64, on a small batch."""
    _, heads, tokens, width = shape
    small = (1, min(heads, 2), min(tokens, 2048), width)
    qkv = [torch.randn(small, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in qkv]
    dout = torch.randn(small, device="cuda", dtype=torch.bfloat16)
    results = []
    for inputs, impl in ((qkv, "triton"), (exact, "reference")):
        out = attemper.attention(*inputs, methods=[DropKey(RATE)], seed=7, impl=impl)
        results.append((out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))))
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True))


def measure(shape: tuple[int, ...], rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    dout = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    calls = 5 if shape[2] <= 1024 else 2
    graphs, memory = {}, {}
    for name, attend in candidates(shape[2]).items():
        try:
            graphs[name] = capture(attend, qkv, dout, calls)
            memory[name] = peak_memory(attend, qkv, dout)
        except RuntimeError as error:
            print(f"  {name}: {str(error).splitlines()[0][:90]}")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(rounds + 2):
        for name, graph in graphs.items():
            elapsed = milliseconds(graph, calls)
            if round_ >= 2:
                times[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in times.items()}
    fastest = min(value for name, value in medians.items() if name.endswith("no dropout"))
    return {
        "shape": shape,
        "error": relative_error(shape),
        "milliseconds": medians,
        "ratio": {name: value / fastest for name, value in medians.items()},
        "peak extra MiB": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many shapes")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    options = parser.parse_args()
    started = time.time()
    rows = []
    for shape in SHAPES[: options.shapes]:
        row = measure(shape, options.rounds)
        rows.append(row)
        print(f"{shape}  error {row['error']:.1e}")
        for name, value in sorted(row["milliseconds"].items(), key=lambda pair: pair[1]):  # type: ignore[attr-defined]
            ratio, memory = row["ratio"][name], row["peak extra MiB"][name]  # type: ignore[index]
            print(f"  {name:24} {value:9.3f} ms  {ratio:6.3f}  {memory:8.0f} MiB", flush=True)
        torch.cuda.empty_cache()
    import triton

    report = {
        "what": "attention operator, forward + backward in a CUDA graph, bfloat16, medians in milliseconds; "
        "ratio to the fastest of torch's own backends without dropout",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "attemper": attemper.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rate": RATE,
        "rows": rows,
    }
    print(f"{time.time() - started:.0f} s")
    name = torch.cuda.get_device_name().split()[-1].lower()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"attention-{name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
