"""`attemper bench step`: a whole training step of a ViT, every method against a model without any, compiled and not."""

import itertools
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.lab.bench.default_recipes import step_recipes
from attemper.lab.bench.machine import pick_device
from attemper.lab.bench.options import MODES, Mode, Progress, StepPlan, head_of, silent
from attemper.lab.bench.results import Machine, StepReport, StepRow
from attemper.lab.bench.targets import step_target
from attemper.lab.bench.timing import (
    CudaStopwatch,
    Deadline,
    Prepared,
    Stopwatch,
    interleaved,
    interval,
    make_stopwatch,
    reason_of,
)
from attemper.lab.bench.vit_models import BASE, SMALL, ViT, make_vit, pick_library
from attemper.lab.threads import threads

TWIN = "none, once more"
"""A second model without any method: how far its ratio is from 1 says how far to trust the others."""
FEWEST_ROUNDS = 3


def bench_step(
    plan: StepPlan | None = None, *, sizes: ViT | None = None, command: str = "", progress: Progress = silent
) -> StepReport:
    """Measure a whole training step: forward, loss with everything that methods add to it, backward, optimiser.

    sizes: those of the model; ViT-S/16 at 224 pixels on a GPU, a small one on a CPU if not given.
    command: what was typed, for the record.
    """
    plan = plan or StepPlan()
    plan.check()
    device = pick_device(plan.device)
    recipes = ["none", TWIN, *step_recipes(plan.methods)]
    library = pick_library(plan.library)
    sizes = sizes or (BASE if device.type == "cuda" else SMALL)
    modes = dict.fromkeys(plan.modes or (MODES if device.type == "cuda" else ("eager",)))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch = plan.batch or (512 if device.type == "cuda" else 8)
    with threads(plan.threads), torch.random.fork_rng(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        torch.manual_seed(0)
        stopwatch = make_stopwatch(device, plan.clock)
        head = head_of(plan, device, dtype, stopwatch, command)
        images = torch.randn(batch, 3, sizes.image, sizes.image, device=device)
        labels = torch.randint(sizes.classes, (batch,), device=device)
        bench = StepBench(sizes, library, images, labels, dtype, stopwatch, Deadline(plan.minutes), progress)
        rows = bench.rows(recipes, list(modes), head.machine, plan.rounds)
    progress(1.0, "done")
    return StepReport(head=head, model=f"{sizes}, from {library}", batch=batch, rows=tuple(rows))


@dataclass(frozen=True)
class Trained:
    """A model under a recipe, and what trains it."""

    model: nn.Module
    handle: attemper.Tempered
    optimiser: torch.optim.Optimizer

    def kept(self) -> list[Tensor]:
        """What stays in memory between two steps."""
        entries = self.optimiser.state.values()
        state = [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *state]


NUMBERS = itertools.count()


def compiled(model: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """The model compiled as if it were the only one in this process. mode: of torch.compile, None: its default.

    Torch keeps what it compiled by the code that it compiled: to it, the models of all recipes are one function with
    ever new guards, which it takes to be dynamic, and gives up in the end. So each gets a code object of its own.
    """

    def forward(*given: Any) -> Any:
        return model(*given)

    own = forward.__code__.replace(co_name=f"forward_{next(NUMBERS)}")
    function = types.FunctionType(own, forward.__globals__, own.co_name, None, forward.__closure__)
    return torch.compile(function, mode=mode)


@dataclass(frozen=True)
class StepBench:
    """One model, many recipes."""

    sizes: ViT
    library: str
    images: Tensor
    labels: Tensor
    dtype: torch.dtype
    stopwatch: Stopwatch
    deadline: Deadline
    progress: Progress

    def rows(self, recipes: list[str], modes: list[Mode], machine: Machine, rounds: int) -> list[StepRow]:
        """Prepare a model under every recipe in every mode, time all of them in turns, and compare.

        Modes come one after another, eager first: compiling is what a time limit may cut short. Nothing more is
        prepared if that, taking as long as the longest so far, would leave too little time for the rounds.
        """
        rows: list[StepRow] = []
        prepared: dict[int, Prepared] = {}
        built: dict[str, Trained] = {}
        longest, one_round = 0.0, 0.0
        for mode, recipe in itertools.product(modes, recipes):
            self.progress(0.8 * len(rows) / len(modes) / len(recipes), f"preparing {recipe}, {mode}")
            row = StepRow(recipe=recipe, mode=mode, target=step_target(machine, recipe, mode))
            try:
                if self.deadline.passed(longest + rounds * one_round) and recipe != "none":
                    raise RuntimeError(self.deadline.reason)
                start = time.monotonic()
                if recipe not in built:
                    built[recipe] = self.build(recipe)
                prepared[len(rows)] = self.prepare(built[recipe], mode)
                ready = time.monotonic()
                self.stopwatch.seconds(prepared[len(rows)])
                longest, one_round = max(longest, ready - start), one_round + time.monotonic() - ready
            except Exception as error:
                row = replace(row, failure=reason_of(error))
            rows.append(row)
        self.time(rows, prepared, rounds)
        return rows

    def build(self, recipe: str) -> Trained:
        """A tempered model and its optimiser. Every recipe starts from the same weights."""
        torch.manual_seed(0)
        model = make_vit(self.sizes, self.library).to(self.images.device).train()
        handle = attemper.apply(model, "none" if recipe == TWIN else recipe)
        # A rate of zero costs what any other does, and every round computes the same.
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, fused=self.images.device.type == "cuda")
        return Trained(model, handle, optimiser)

    def make_step(self, trained: Trained, mode: Mode) -> Callable[[], None]:
        """One training step on one batch of noise."""
        forward = compiled(trained.model) if mode == "compiled" else trained.model

        def step() -> None:
            with torch.autocast(self.images.device.type, self.dtype, enabled=self.dtype != torch.float32):
                loss = trained.handle.loss(lambda: forward(self.images), lambda out: F.cross_entropy(out, self.labels))
            loss.backward()
            trained.optimiser.step()
            trained.optimiser.zero_grad(set_to_none=True)

        return step

    def prepare(self, trained: Trained, mode: Mode) -> Prepared:
        """The step, compiled and with its optimiser's state in place, and its memory with what stays between steps."""
        step = self.make_step(trained, mode)
        if isinstance(self.stopwatch, CudaStopwatch):
            prepared = self.stopwatch.prepare(step, in_a_loop=True)
        else:
            prepared = self.stopwatch.prepare(step)
        kept = sum(t.numel() * t.element_size() for t in trained.kept())
        return replace(prepared, peak_bytes=prepared.peak_bytes + kept)

    def time(self, rows: list[StepRow], prepared: dict[int, Prepared], rounds: int) -> None:
        """Fill in the figures of the rows that are prepared."""
        places = list(prepared)
        timers = [lambda one=one: self.stopwatch.seconds(one) for one in prepared.values()]

        def tick(done: int) -> bool:
            self.progress(0.8 + 0.2 * done / rounds, f"round {done} of {rounds}")
            return done < FEWEST_ROUNDS or not self.deadline.passed()

        times, failures = interleaved(timers, rounds, tick)
        base = {rows[p].mode: c for c, p in enumerate(places) if rows[p].recipe == "none" and c not in failures}
        for column, place in enumerate(places):
            row = rows[place]
            if column in failures:
                rows[place] = replace(row, failure=failures[column])
                continue
            seconds = float(np.median(times[:, column]))
            peak = prepared[place].peak_bytes
            row = replace(
                row, milliseconds=seconds * 1e3, samples_per_s=len(self.images) / seconds, peak_mib=peak / 2**20
            )
            if row.mode in base:
                ratios = times[:, column] / times[:, base[row.mode]]
                low, high = interval(ratios)
                memory = peak / prepared[places[base[row.mode]]].peak_bytes
                row = replace(row, ratio=float(np.median(ratios)), low=low, high=high, memory_ratio=memory)
            rows[place] = row
