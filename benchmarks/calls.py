"""Calls of attention that people make beside plain ones: who is right, who is fastest, and whether `auto` knows.

Causal, grouped, padded and biased calls, other head widths, float32, every form of DropAttention: each implementation
that serves one is checked against float64 and timed in turns with torch's own kernels without dropout, forward and
backward, from CUDA graphs where these can be captured. A ratio is that to the fastest of torch's.

    python benchmarks/calls.py --seconds 85 --json benchmarks/results/calls-h200.json
    python benchmarks/calls.py --only causal --rounds 20

Where another implementation than that of `auto` is the fastest, the last lines say so: the table is that of
`src/attemper/ops/choice.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attemper
from attemper.lab.bench.machine import describe_machine, versions
from attemper.lab.bench.timing import Prepared, make_stopwatch
from attemper.ops.perturbation import Perturbation

STOCK = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CHECKED = 2**28  # logits; more of them are not checked against float64, which stores them
FASTER = 0.97  # what another implementation must come to before it is named


@dataclass(frozen=True)
class Kind:
    """A call of attention: its shape, its masks, and the recipes that act in it."""

    name: str
    shape: tuple[int, int, int, int, int, int]
    """Samples, heads, heads of K and V, queries, keys, width."""
    recipes: tuple[str, ...] = ("dropkey(0.1)",)
    mask: str = ""
    """"causal", "padding", or "bias", an additive mask for all samples; with a gradient as "bias, learnt"."""
    dtype: torch.dtype = torch.bfloat16


DETACHED = "dropattention(0.1, rescale=normalize, detach=true)"
ON_IMAGES = "dropkey(0.1, structure={}, grid=[{}, {}], prefix={})"
KINDS = (
    Kind("causal 1024", (16, 12, 12, 1024, 1024, 64), ("dropkey(0.1)", "hardmask(0.1)"), "causal"),
    Kind("causal GQA 2048", (4, 16, 4, 2048, 2048, 128), ("dropkey(0.1)",), "causal"),
    Kind("plain 197", (128, 6, 6, 197, 197, 64), ("dropkey(0.1)", "dropattention(0.1)", DETACHED)),
    Kind("windows", (2048, 3, 3, 49, 49, 32), ("dropkey(0.1)", "blur"), "bias"),
    Kind("windows, learnt", (2048, 3, 3, 49, 49, 32), ("dropkey(0.1)",), "bias, learnt"),
    Kind("float32", (64, 6, 6, 197, 197, 64), ("dropkey(0.1)",), dtype=torch.float32),
    Kind("plain 65", (512, 12, 12, 65, 65, 32), ("dropattention(0.1)",)),
    Kind("padded 512", (32, 12, 12, 512, 512, 64), ("dropkey(0.1)",), "padding"),
    Kind("causal 512", (32, 12, 12, 512, 512, 64), ("dropkey(0.1)",), "causal"),
    Kind("width 80", (64, 8, 8, 257, 257, 80)),
    Kind("width 48", (128, 8, 8, 197, 197, 48)),
    Kind("width 96", (64, 8, 8, 197, 197, 96)),
    Kind("biased 197, learnt", (64, 6, 6, 197, 197, 64), ("dropkey(0.1)",), "bias, learnt"),
    Kind("plain 1024", (32, 12, 12, 1024, 1024, 64), ("dropattention(0.1)",)),
    Kind("causal 4096", (4, 12, 12, 4096, 4096, 64), ("dropkey(0.1)",), "causal"),
    Kind("image 197", (128, 6, 6, 197, 197, 64), tuple(ON_IMAGES.format(s, 14, 14, 1) for s in ("block", "cross"))),
    Kind("image 1024", (32, 12, 12, 1024, 1024, 64), tuple(ON_IMAGES.format(s, 32, 32, 0) for s in ("block", "cross"))),
    Kind("image 4096", (4, 12, 12, 4096, 4096, 64), tuple(ON_IMAGES.format(s, 64, 64, 0) for s in ("block", "cross"))),
)  # fmt: skip

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass
class Candidate:
    """Something that computes a call, and what came of it."""

    name: str
    attend: Attend
    methods: tuple[Perturbation, ...] = ()
    chosen: bool = False
    """Whether `auto` takes it."""
    prepared: Prepared | None = None
    seconds: list[float] | None = None
    error: float | None = None
    failure: str = ""


def tensors(kind: Kind, device: torch.device) -> tuple[list[Tensor], Tensor | None, dict[str, Any]]:
    """Q, K and V, the mask, and what is left of the arguments."""
    torch.manual_seed(0)
    batch, heads, kv_heads, nq, nk, width = kind.shape
    sizes = ((batch, heads, nq, width), (batch, kv_heads, nk, width), (batch, kv_heads, nk, width))
    qkv = [torch.randn(size, device=device, dtype=kind.dtype).requires_grad_() for size in sizes]
    if kind.mask == "padding":
        lengths = torch.randint(nk // 2, nk + 1, (batch, 1, 1, 1), device=device)
        return qkv, torch.arange(nk, device=device) < lengths, {}
    if kind.mask.startswith("bias"):
        bias = torch.randn(1, heads, nq, nk, device=device, dtype=kind.dtype)
        return qkv, bias.requires_grad_("learnt" in kind.mask), {}
    return qkv, None, {"is_causal": kind.mask == "causal"}


def stock(kind: Kind, name: str) -> Candidate:
    """One of torch's kernels, without dropout."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(STOCK[name]):
            if mask is not None and mask.is_floating_point():
                mask = mask.expand(q.shape[0], -1, -1, -1)  # which the efficient kernel asks for
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=kind.mask == "causal", enable_gqa=grouped)

    return Candidate(name, attend)


def ours(kind: Kind, recipe: str, qkv: list[Tensor], mask: Tensor | None, options: dict[str, Any]) -> list[Candidate]:
    """Each implementation that serves the call."""
    methods = tuple(method for method in attemper.parse(recipe) if isinstance(method, Perturbation))
    found = []
    for verdict in attemper.implementations(*qkv, attn_mask=mask, methods=methods, **options):
        if verdict.serves:

            def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, impl: Any = verdict.name) -> Tensor:
                return attemper.attention(q, k, v, attn_mask=mask, methods=methods, seed=1, impl=impl, **options)

            found.append(Candidate(f"{recipe}: {verdict.name}", attend, methods, verdict.chosen))
    return found


def gradients(candidate: Candidate, qkv: list[Tensor], mask: Tensor | None, dout: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    out = candidate.attend(*qkv, mask)  # type: ignore[call-arg]
    wanted = [*qkv, mask] if mask is not None and mask.requires_grad else qkv
    return [out.detach(), *torch.autograd.grad(out, wanted, dout.to(out.dtype))]


def error_of(candidate: Candidate, kind: Kind, qkv: list[Tensor], mask: Tensor | None, options: Any) -> float | None:
    """The largest relative error of the output and the gradients, on the first samples of the call."""
    batch, heads, _, nq, nk, _ = kind.shape
    few = min(batch, CHECKED // (heads * nq * nk * 8))
    if few == 0:
        return None
    parts = [t.detach()[:few].requires_grad_() for t in qkv]
    part_mask = mask if mask is None or mask.shape[0] == 1 else mask[:few]
    exact = [t.detach().double().requires_grad_() for t in parts]
    exact_mask = part_mask
    if part_mask is not None and part_mask.is_floating_point():
        exact_mask = part_mask.detach().double().requires_grad_(part_mask.requires_grad)

    def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attemper.attention(
            q, k, v, attn_mask=mask, methods=candidate.methods, seed=1, impl="reference", **options
        )

    dout = torch.randn(few, heads, nq, kind.shape[5], device=qkv[0].device)
    given = gradients(candidate, parts, part_mask, dout)
    expected = gradients(Candidate("", reference), exact, exact_mask, dout)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(given, expected, strict=True))


def measure(kind: Kind, arguments: argparse.Namespace, device: torch.device, end: float) -> dict[str, Any]:
    """All candidates of a kind of call: error, seconds and ratio of each."""
    qkv, mask, options = tensors(kind, device)
    candidates = [stock(kind, name) for name in STOCK]
    for recipe in kind.recipes:
        candidates += ours(kind, recipe, qkv, mask, options)
    dout = torch.randn(*qkv[0].shape[:3], kind.shape[5], device=device, dtype=kind.dtype)
    stopwatch = make_stopwatch(device, "wall")
    for candidate in candidates:
        stores = candidate.name == "math" or candidate.name.endswith("reference")
        if time.monotonic() > end or (stores and math.prod(kind.shape[i] for i in (0, 1, 3, 4)) > 2**30):
            candidate.failure = "left out"
            continue
        try:
            candidate.error = error_of(candidate, kind, qkv, mask, options)
            candidate.prepared = stopwatch.prepare(lambda each=candidate: gradients(each, qkv, mask, dout))
            candidate.seconds = []
        except Exception as error:  # one that fails says why, and the others go on
            candidate.failure = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    for _ in range(arguments.rounds):
        for candidate in candidates:
            if candidate.prepared is not None and candidate.seconds is not None:
                candidate.seconds.append(stopwatch.seconds(candidate.prepared))
    return {"call": kind.name, "shape": kind.shape, "mask": kind.mask, "rows": rows_of(candidates)}


def rows_of(candidates: list[Candidate]) -> list[dict[str, Any]]:
    """What came of each candidate; ratios to the fastest of torch's kernels."""
    times = {each.name: statistics.median(each.seconds) for each in candidates if each.seconds}
    fastest = min((seconds for name, seconds in times.items() if name in STOCK), default=None)
    rows = []
    for each in candidates:
        seconds = times.get(each.name)
        rows.append(
            {
                "name": each.name,
                "auto": each.chosen,
                "seconds": seconds,
                "ratio": None if seconds is None or fastest is None else seconds / fastest,
                "error": each.error,
                "captured": each.prepared is not None and each.prepared.captured,
                "failure": each.failure,
            }
        )
    return rows


def show(found: dict[str, Any]) -> None:
    """One call as a table."""
    print(f"\n{found['call']}  {'x'.join(map(str, found['shape']))}  {found['mask']}")
    for row in found["rows"]:
        if row["seconds"] is None:
            print(f"  {row['name']:<62} {row['failure']}")
            continue
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        print(
            f"  {row['name']:<62} {row['seconds'] * 1e3:8.3f} ms {ratio:>6} {error:>9} {'auto' if row['auto'] else ''}"
        )


def better(found: dict[str, Any]) -> list[str]:
    """Where `auto` does not take the fastest."""
    lines = []
    for row in found["rows"]:
        recipe = row["name"].rpartition(": ")[0]
        others = [
            other
            for other in found["rows"]
            if recipe and other["name"].startswith(f"{recipe}: ") and other["seconds"] is not None
        ]
        if row["auto"] and row["seconds"] is not None:
            best = min(others, key=lambda other: other["seconds"])
            if best["seconds"] < FASTER * row["seconds"]:
                factor = best["seconds"] / row["seconds"]
                lines.append(
                    f"{found['call']}: auto takes {row['name']}; {best['name']} takes {factor:.2f} of its time"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--rounds", type=int, default=10, help="how often everything is timed in turns")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shrink", type=int, default=1, help="divide samples by this, to try the script out")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    device, end = torch.device(arguments.device), time.monotonic() + arguments.seconds
    calls = []
    for kind in KINDS:
        if arguments.only in kind.name and time.monotonic() < end:
            shape = (max(1, kind.shape[0] // arguments.shrink), *kind.shape[1:])
            smaller = Kind(kind.name, shape, kind.recipes, kind.mask, kind.dtype)
            calls.append(measure(smaller, arguments, device, end))
            show(calls[-1])
            if arguments.json:  # after every call: what is stopped loses little
                head = {"date": datetime.date.today().isoformat(), "machine": describe_machine(device)}
                text = json.dumps({**head, "versions": versions(), "calls": calls}, indent=1, default=str)
                arguments.json.write_text(text + "\n")
    print()
    for line in [line for found in calls for line in better(found)] or ["auto takes the fastest everywhere"]:
        print(line)


if __name__ == "__main__":
    main()
