"""`attemper bench ops`: the attention operator, forward and backward, by shape, against everything else there is."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import attemper
from attemper.errors import ParameterError
from attemper.lab.bench.candidates import SEED, Candidate, candidates, check_backends
from attemper.lab.bench.default_recipes import ops_recipes
from attemper.lab.bench.machine import pick_device
from attemper.lab.bench.options import OpsPlan, Progress, head_of, silent
from attemper.lab.bench.results import Machine, OpsReport, OpsRow, Shape
from attemper.lab.bench.shapes import find_shapes
from attemper.lab.bench.targets import ops_target
from attemper.lab.bench.timing import Deadline, Prepared, Stopwatch, interleaved, interval, make_stopwatch, reason_of
from attemper.lab.threads import threads

CHECKED_TOKENS = 1024  # the float64 reference stores N × N logits


def bench_ops(
    plan: OpsPlan | None = None,
    *,
    command: str = "",
    progress: Progress = silent,
    after_shape: Callable[[OpsReport], None] | None = None,
) -> OpsReport:
    """Measure the attention operator, forward and backward.

    command: what was typed, for the record.
    after_shape: called with all figures so far, so that a run that is stopped loses little.

    >>> report = bench_ops(OpsPlan(device="cpu", shapes=("1x1x8x8",), methods=("blur",), backends=("math",), rounds=2))
    >>> sorted({row.recipe for row in report.rows})
    ['blur(1.0)', 'dropout(0.1)', 'none']
    """
    plan = plan or OpsPlan()
    plan.check()
    device = pick_device(plan.device)
    shapes = find_shapes(plan.shapes, device.type)
    backends, recipes = check_backends(plan.backends), ops_recipes(plan.methods)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    deadline = Deadline(plan.minutes)
    with threads(plan.threads), torch.random.fork_rng():
        torch.manual_seed(0)
        stopwatch = make_stopwatch(device, plan.clock)
        head = head_of(plan, device, dtype, stopwatch, command)
        progress(0.0, "a large matrix product")
        report = OpsReport(head=head, ceiling_tflops=measure_ceiling(stopwatch, device, dtype), rows=())
        for at, shape in enumerate(shapes):

            def within(share: float, what: str, at: int = at, shape: Shape = shape) -> None:
                progress((at + share) / len(shapes), f"({shape}): {what}")

            stopwatch = make_stopwatch(device, plan.clock)  # a new one lets go of the last shape's graphs
            bench = ShapeBench(shape, device, dtype, stopwatch, deadline, plan.rounds, within)
            rows = bench.rows(backends, recipes, head.machine, report.ceiling_tflops)
            report = replace(report, rows=report.rows + rows)
            if after_shape is not None:
                after_shape(report)
    progress(1.0, "done")
    return report


def measure_ceiling(stopwatch: Stopwatch, device: torch.device, dtype: torch.dtype, readings: int = 10) -> float:
    """TFLOP/s of a large matrix product, the most that attention could hope for."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    product = stopwatch.prepare(lambda: a @ b)
    return 2 * n**3 / min(stopwatch.seconds(product) for _ in range(readings)) / 1e12


@dataclass(frozen=True)
class ShapeBench:
    """All candidates at one shape."""

    shape: Shape
    device: torch.device
    dtype: torch.dtype
    stopwatch: Stopwatch
    deadline: Deadline
    rounds: int
    progress: Progress

    def rows(
        self, backends: Sequence[str], recipes: Sequence[str], machine: Machine, ceiling: float | None
    ) -> tuple[OpsRow, ...]:
        """Prepare every candidate, time them in turns, and compare."""
        torch._dynamo.reset()  # a compiler that met other shapes before would make one program for all of them
        qkv = self.tensors(self.shape, requires_grad=True)
        dout = self.tensors(self.shape)[0]
        found = candidates(qkv[0], qkv[1], qkv[2], backends, recipes)
        rows, prepared = [], {}
        for at, candidate in enumerate(found):
            self.progress(0.8 * at / len(found), f"preparing {candidate}")
            row = OpsRow(
                shape=self.shape,
                family=candidate.family,
                name=candidate.name,
                recipe=candidate.recipe,
                chosen=candidate.chosen,
                target=ops_target(machine, candidate.recipe, self.shape) if candidate.chosen else None,
            )
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    prepared[at] = self.prepare(candidate, qkv, dout)
                    row = replace(row, captured=prepared[at].captured, error=self.error(candidate))
                except Exception as error:
                    prepared.pop(at, None)
                    row = replace(row, failure=reason_of(error, caught))
            rows.append(row)
        self.time(rows, prepared, ceiling)
        return tuple(rows)

    def tensors(self, shape: Shape, requires_grad: bool = False) -> list[Tensor]:
        """Three tensors of a shape, drawn anew."""
        try:
            drawn = [torch.randn(shape.sizes, device=self.device, dtype=self.dtype) for _ in range(3)]
        except RuntimeError as error:
            raise ParameterError(
                f"shape ({shape}) does not fit into this machine's memory: its inputs alone"
            ) from error
        return [t.requires_grad_(requires_grad) for t in drawn]

    def prepare(self, candidate: Candidate, qkv: list[Tensor], dout: Tensor) -> Prepared:
        """The candidate's forward and backward pass, ready to be timed; raises where that cannot be."""
        if candidate.make is None:
            raise RuntimeError(candidate.refusal)
        if self.deadline.passed():
            raise RuntimeError(self.deadline.reason)
        attend = candidate.make()
        return self.stopwatch.prepare(lambda: torch.autograd.grad(attend(*qkv), qkv, dout))

    def error(self, candidate: Candidate) -> float | None:
        """The largest relative error of output and gradients against the reference in float64, on a small batch."""
        if candidate.seeded is None:
            return None
        small = Shape(1, min(self.shape.heads, 2), min(self.shape.tokens, CHECKED_TOKENS), self.shape.width)
        qkv, dout = self.tensors(small, requires_grad=True), self.tensors(small)[0]
        exact = [t.detach().double().requires_grad_() for t in qkv]
        out = candidate.seeded(*qkv)
        wanted = attemper.attention(*exact, methods=candidate.methods, seed=SEED, impl="reference")
        got = (out, *torch.autograd.grad(out, qkv, dout))
        true = (wanted, *torch.autograd.grad(wanted, exact, dout.double()))
        with torch.no_grad():
            return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, true, strict=True))

    def time(self, rows: list[OpsRow], prepared: dict[int, Prepared], ceiling: float | None) -> None:
        """Fill in the figures of the rows that are prepared."""
        places = list(prepared)
        timers = [lambda one=one: self.stopwatch.seconds(one) for one in prepared.values()]

        def tick(done: int) -> bool:
            self.progress(0.8 + 0.2 * done / self.rounds, f"round {done} of {self.rounds}")
            return True

        times, failures = interleaved(timers, self.rounds, tick)
        base = fastest_stock([rows[place] for place in places], times, failures)
        for column, place in enumerate(places):
            if column in failures:
                rows[place] = replace(rows[place], failure=failures[column])
                continue
            seconds = float(np.median(times[:, column]))
            tflops = self.shape.flops / seconds / 1e12
            rows[place] = replace(
                rows[place],
                milliseconds=seconds * 1e3,
                peak_mib=prepared[place].peak_bytes / 2**20,
                tflops=tflops,
                ceiling_share=None if ceiling is None else tflops / ceiling,
            )
            if base is not None:
                ratios = times[:, column] / times[:, base]
                low, high = interval(ratios)
                rows[place] = replace(rows[place], ratio=float(np.median(ratios)), low=low, high=high)


def fastest_stock(rows: Sequence[OpsRow], times: NDArray[np.float64], failures: dict[int, str]) -> int | None:
    """The column of the fastest of torch's kernels without dropout, the bar that everything is held to."""
    stock = [
        column
        for column, row in enumerate(rows)
        if row.family == "stock" and row.recipe == "none" and column not in failures
    ]
    return min(stock, key=lambda column: float(np.median(times[:, column])), default=None)
