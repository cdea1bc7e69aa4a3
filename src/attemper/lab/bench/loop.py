"""`attemper bench loop`: what recipes cost in ordinary training loops, at small batches too.

At small batches a GPU waits for the host. So the time until the host is done with a step is measured beside the step.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import attemper
from attemper.errors import ParameterError, suggestion
from attemper.lab.bench.default_recipes import loop_recipes
from attemper.lab.bench.loop_models import MODELS, Trainable
from attemper.lab.bench.machine import pick_device
from attemper.lab.bench.options import LOOP_MODES, LoopPlan, Progress, head_of, silent
from attemper.lab.bench.results import LoopReport, LoopRow, Machine
from attemper.lab.bench.step import TWIN, compiled
from attemper.lab.bench.targets import LOOP, loop_target
from attemper.lab.bench.timing import CLOCKS, CpuStopwatch, Deadline, interleaved, interval, peak_bytes, reason_of
from attemper.lab.threads import threads
from attemper.lab.training.devices import synchronise
from attemper.ops.perturbation import Perturbation

Cell = tuple[str, int, str]
"""A model, a batch and a mode."""
WARM_UP = 3
FEWEST_ROUNDS = 3
GRAPHED = ("reduce-overhead", "max-autotune")


def bench_loop(
    plan: LoopPlan | None = None,
    *,
    command: str = "",
    progress: Progress = silent,
    after_cell: Callable[[LoopReport], None] | None = None,
) -> LoopReport:
    """Measure training loops: forward, loss with everything that methods add to it, backward, optimiser.

    command: what was typed, for the record.
    after_cell: called with all figures so far, so that a run that is stopped loses little.

    >>> plan = LoopPlan(device="cpu", cells=("call:1:eager",), methods=("dropkey(0.1)",), rounds=2, steps=1)
    >>> [row.recipe for row in bench_loop(plan).rows]
    ['none', 'none, once more', 'dropkey(0.1)']
    """
    plan = plan or LoopPlan()
    plan.check()
    device = pick_device(plan.device)
    cells, recipes = cells_of(plan, device), ["none", TWIN, *loop_recipes(plan.methods)]
    deadline = Deadline(plan.minutes)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with threads(plan.threads), torch.random.fork_rng():
        head = head_of(plan, device, dtype, CpuStopwatch(plan.clock), command)
        large = device.type == "cuda"
        models = {name: MODELS[name].large if large else MODELS[name].small for name, _, _ in cells}
        report = LoopReport(head=head, models=models, rows=())
        for at, cell in enumerate(cells):

            def within(share: float, what: str, at: int = at, cell: Cell = cell) -> None:
                progress((at + share) / len(cells), f"{':'.join(map(str, cell))}: {what}")

            bench = CellBench(cell, device, dtype, CLOCKS[plan.clock], deadline, plan.steps, within)
            report = replace(report, rows=(*report.rows, *bench.rows(recipes, head.machine, plan.rounds)))
            if after_cell is not None:
                after_cell(report)
    progress(1.0, "done")
    return report


def cells_of(plan: LoopPlan, device: torch.device) -> list[Cell]:
    """What is measured, in order: as given; otherwise cells that have targets first, and what is compiled last."""
    if plan.cells:
        return list(dict.fromkeys(map(read_cell, plan.cells)))
    cuda = device.type == "cuda"
    for name in plan.models:
        check_model(name)
    batches = plan.batches or ((8, 32, 256) if cuda else (2,))
    modes = plan.modes or (LOOP_MODES[:3] if cuda else LOOP_MODES[:1])
    found: list[Cell] = list(itertools.product(plan.models or MODELS, batches, modes))
    if cuda and not plan.batches:
        wanted = (cell for cell in LOOP if cell[0] in (plan.models or MODELS) and cell[2] in modes)
        found = list(dict.fromkeys((*found, *wanted)))
    # A call by itself is never compiled, and is small whatever the batch.
    found = [cell for cell in found if cell[0] != "call" or (cell[2] == "eager" and cell[1] == batches[0])]
    return sorted(found, key=lambda cell: (cell[2] != "eager", cell not in LOOP, LOOP_MODES.index(cell[2])))


def read_cell(text: str) -> Cell:
    """A cell from its text, such as vit-s:8:eager."""
    model, _, rest = text.partition(":")
    batch, _, mode = rest.partition(":")
    if not batch.isdecimal() or int(batch) < 1 or mode not in LOOP_MODES:
        modes = ", ".join(LOOP_MODES)
        raise ParameterError(f"a cell is model:batch:mode, such as vit-s:8:eager, mode among {modes}; got {text!r}")
    check_model(model)
    if model == "call" and mode != "eager":
        raise ParameterError(f"a call by itself is measured eager only; got {text!r}")
    return model, int(batch), mode


def check_model(name: str) -> None:
    """Raise if there is no such model."""
    if name not in MODELS:
        raise ParameterError(f"models must be among {', '.join(MODELS)}; got {name!r}.{suggestion(name, MODELS)}")


@dataclass(frozen=True)
class Prepared:
    """A loop that is warm."""

    step: Callable[[], None]
    first_seconds: float
    graph_skips: int | None
    peak_bytes: int


@dataclass(frozen=True)
class CellBench:
    """One model at one batch in one mode, under many recipes."""

    cell: Cell
    device: torch.device
    dtype: torch.dtype
    clock: Callable[[], float]
    deadline: Deadline
    steps: int
    progress: Progress

    def rows(self, recipes: list[str], machine: Machine, rounds: int) -> list[LoopRow]:
        """Prepare a loop under every recipe, time all of them in turns, and compare.

        Nothing more is prepared where that, taking as long as the longest so far, would leave too little time for the
        fewest rounds.
        """
        torch._dynamo.reset()
        gc.collect()
        rows: list[LoopRow] = []
        prepared: dict[int, Prepared] = {}
        longest, one_round = 0.0, 0.0
        for recipe in recipes:
            self.progress(0.7 * len(rows) / len(recipes), f"preparing {recipe}")
            row = LoopRow(**self.names, recipe=recipe, target=loop_target(machine, self.cell, recipe))
            try:
                if self.deadline.passed(longest + FEWEST_ROUNDS * one_round):
                    raise RuntimeError(self.deadline.reason)
                start = time.monotonic()
                prepared[len(rows)] = self.prepare(recipe)
                ready = time.monotonic()
                self.turn(prepared[len(rows)], [])
                longest, one_round = max(longest, ready - start), one_round + time.monotonic() - ready
            except Exception as error:
                row = replace(row, failure=reason_of(error))
            rows.append(row)
        return self.timed(rows, prepared, rounds)

    @property
    def names(self) -> dict[str, Any]:
        """The cell, as fields of a row."""
        model, batch, mode = self.cell
        return {"model": model, "batch": batch, "mode": mode}

    def prepare(self, recipe: str) -> Prepared:
        """A loop under a recipe, warm. Every recipe starts from the same weights."""
        name, batch, mode = self.cell
        torch.manual_seed(0)
        trainable = MODELS[name].make(self.device.type == "cuda", batch, self.device)
        counters = torch._dynamo.utils.counters["inductor"]
        skips = counters["cudagraph_skips"]
        step = self.make_call(trainable, recipe) if name == "call" else self.make_step(trainable, recipe, mode)
        synchronise(self.device)
        begun = time.perf_counter()
        step()
        synchronise(self.device)
        first = time.perf_counter() - begun
        for _ in range(WARM_UP - 1):
            step()
        skipped = counters["cudagraph_skips"] - skips if mode in GRAPHED else None
        return Prepared(step, first, skipped, peak_bytes(self.device, step))

    def make_step(self, trainable: Trainable, recipe: str, mode: str) -> Callable[[], None]:
        """One training step. "none" is the model as it came, not one that was tempered with nothing."""
        model, criterion = trainable.model, trainable.criterion
        tempered = None if recipe in ("none", TWIN) else attemper.apply(model, recipe)
        network = model if mode == "eager" else compiled(model, None if mode == "compiled" else mode)
        # A rate of zero costs what any other does, and every round computes the same.
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, fused=self.device.type == "cuda")

        def step() -> None:
            if mode in GRAPHED:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                if tempered is None:
                    loss = criterion(network(*trainable.inputs))
                else:
                    loss = tempered.loss(lambda: network(*trainable.inputs), criterion)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

        return step

    def make_call(self, trainable: Trainable, recipe: str) -> Callable[[], None]:
        """Attention of given tensors, forward and backward."""
        q, k, v = trainable.inputs
        methods = [] if recipe in ("none", TWIN) else cast(list[Perturbation], attemper.parse(recipe))
        dout = torch.ones_like(q)

        def attend() -> Tensor:
            if methods:
                return attemper.attention(q, k, v, methods=methods)
            return F.scaled_dot_product_attention(q, k, v)

        def step() -> None:
            attend().backward(dout)
            q.grad = k.grad = v.grad = None

        return step

    def turn(self, prepared: Prepared, hosts: list[float]) -> float:
        """Seconds of one of some steps in a row; the host's part of the first, which begins on an idle device."""
        synchronise(self.device)
        begun = self.clock()
        prepared.step()
        hosts.append(self.clock() - begun)
        for _ in range(self.steps - 1):
            prepared.step()
        synchronise(self.device)
        return (self.clock() - begun) / self.steps

    def timed(self, rows: list[LoopRow], prepared: dict[int, Prepared], rounds: int) -> list[LoopRow]:
        """The rows with the figures of those that are prepared."""
        places = list(prepared)
        hosts: dict[int, list[float]] = {place: [] for place in prepared}
        timers = [lambda place=place: self.turn(prepared[place], hosts[place]) for place in places]

        def tick(done: int) -> bool:
            self.progress(0.7 + 0.3 * done / rounds, f"round {done} of {rounds}")
            return done < FEWEST_ROUNDS or not self.deadline.passed()

        times, failed = interleaved(timers, rounds, tick)
        found = list(rows)
        none = next((column for column, place in enumerate(places) if rows[place].recipe == "none"), None)
        for column, place in enumerate(places):
            if column in failed:
                found[place] = replace(rows[place], failure=failed[column])
                continue
            base = None if none is None or none in failed else none
            found[place] = replace(rows[place], **figures(times[:, column], hosts[place], prepared[place]))
            if base is not None:
                other = prepared[places[base]]
                found[place] = replace(
                    found[place],
                    **ratios(times[:, column], times[:, base], hosts[place], hosts[places[base]]),
                    memory_ratio=prepared[place].peak_bytes / max(1, other.peak_bytes),
                    first_ratio=prepared[place].first_seconds / other.first_seconds,
                )
        return found


def figures(seconds: Any, hosts: list[float], prepared: Prepared) -> dict[str, Any]:
    """What was measured of one recipe."""
    return {
        "milliseconds": float(np.median(seconds)) * 1e3,
        "host_milliseconds": float(np.median(hosts[-len(seconds) :])) * 1e3,
        "peak_mib": prepared.peak_bytes / 2**20,
        "first_seconds": prepared.first_seconds,
        "graph_skips": prepared.graph_skips,
    }


def ratios(seconds: Any, none: Any, hosts: list[float], none_hosts: list[float]) -> dict[str, Any]:
    """Medians over rounds of what a recipe takes, divided by what `none` took in the same round."""
    quotients = seconds / none
    low, high = interval(quotients)
    count = len(seconds)
    host = np.array(hosts[-count:]) / np.array(none_hosts[-count:])
    return {"ratio": float(np.median(quotients)), "low": low, "high": high, "host_ratio": float(np.median(host))}
