"""`attemper bench step`: a whole training step of a ViT, every method against none, compiled and not."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.bench.machine import pick_device
from attemper.bench.models import BASE, SMALL, ViT, make_vit, pick_library
from attemper.bench.plan import Plan, Progress, head_of, silent, threads
from attemper.bench.recipes import step_recipes
from attemper.bench.results import StepReport, StepRow
from attemper.bench.targets import step_target
from attemper.bench.timing import (
    CudaStopwatch,
    Deadline,
    Prepared,
    Stopwatch,
    interleaved,
    interval,
    make_stopwatch,
    reason_of,
)
from attemper.errors import ParameterError

__all__ = ["MODES", "TWIN", "StepPlan", "bench_step"]

Mode = Literal["eager", "compiled"]
MODES: tuple[Mode, ...] = ("eager", "compiled")
TWIN = "none, once more"
"""A second model without any method: how far its ratio is from 1 says how far to trust the others."""
PREPARING = 0.75  # of the time limit; the rest is for the rounds
FEWEST_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class StepPlan(Plan):
    """What `bench_step` measures."""

    methods: tuple[str, ...] = ()
    """Names of methods, or recipes. Every method that there is if not given."""
    modes: tuple[Mode, ...] = ()
    """eager, compiled or both. Both on a GPU, eager on a CPU if not given: a compiler takes minutes there."""
    batch: int | None = None
    """Images per step; 512 on a GPU, 8 on a CPU if not given."""
    library: Literal["auto", "timm", "torchvision"] = "auto"
    """Where the model comes from."""

    def check(self) -> None:
        """Raise if an option is out of range."""
        super().check()
        for mode in self.modes:
            if mode not in MODES:
                raise ParameterError(f"modes must be among {', '.join(MODES)}; got {mode!r}")
        if self.batch is not None and self.batch < 1:
            raise ParameterError(f"batch must be at least 1, got {self.batch}")


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
        rows: list[StepRow] = []
        prepared: dict[int, Prepared] = {}
        for at, recipe in enumerate(recipes):
            for mode, result in bench.prepare(recipe, list(modes), at, len(recipes)):
                target = step_target(head.machine, recipe, mode)
                row = StepRow(recipe=recipe, mode=mode, target=target)
                if isinstance(result, str):
                    row = replace(row, failure=result)
                else:
                    prepared[len(rows)] = result
                rows.append(row)
        bench.time(rows, prepared, plan.rounds)
    progress(1.0, "done")
    ordered = sorted(rows, key=lambda row: list(modes).index(row.mode))  # type: ignore[arg-type]
    return StepReport(head=head, model=f"{sizes}, from {library}", batch=batch, rows=tuple(ordered))


def compiled(model: nn.Module, number: int) -> Callable[[Tensor], Tensor]:
    """The model compiled as if it were the only one in this process.

    Torch keeps what it compiled by the code that it compiled: to it, the models of all recipes are one function with
    ever new guards, which it takes to be dynamic, and gives up in the end. So each gets a code object of its own.
    """

    def forward(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    own = forward.__code__.replace(co_name=f"forward_{number}")
    return torch.compile(types.FunctionType(own, forward.__globals__, own.co_name, None, forward.__closure__))


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

    def prepare(self, recipe: str, modes: list[str], at: int, of: int) -> Iterator[tuple[str, Prepared | str]]:
        """For each mode, the step of a model under this recipe, ready to be timed, or why there is none."""
        model: nn.Module | None = None
        for mode in modes:
            self.progress(0.8 * at / of, f"preparing {recipe}, {mode}")
            try:
                if self.deadline.passed(PREPARING) and recipe != "none":
                    raise RuntimeError(self.deadline.reason)
                if model is None:
                    model, handle, optimiser = self.build(recipe)
                forward = compiled(model, at) if mode == "compiled" else model
                yield mode, self.warm_up(self.make_step(forward, handle, optimiser), model, optimiser)
            except Exception as error:
                yield mode, reason_of(error)

    def build(self, recipe: str) -> tuple[nn.Module, attemper.Tempered, torch.optim.Optimizer]:
        """A tempered model and its optimiser. Every recipe starts from the same weights."""
        torch.manual_seed(0)
        model = make_vit(self.sizes, self.library).to(self.images.device).train()
        handle = attemper.apply(model, "none" if recipe == TWIN else recipe)
        # A rate of zero costs what any other does, and every round computes the same.
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, fused=self.images.device.type == "cuda")
        return model, handle, optimiser

    def make_step(
        self, forward: Callable[[Tensor], Tensor], handle: attemper.Tempered, optimiser: torch.optim.Optimizer
    ) -> Callable[[], None]:
        """One training step on one batch of noise."""

        def step() -> None:
            with torch.autocast(self.images.device.type, self.dtype, enabled=self.dtype != torch.float32):
                loss = handle.loss(lambda: forward(self.images), lambda out: F.cross_entropy(out, self.labels))
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

        return step

    def warm_up(self, step: Callable[[], None], model: nn.Module, optimiser: torch.optim.Optimizer) -> Prepared:
        """The step, compiled and with its optimiser's state in place, and its memory with what stays between steps."""
        if isinstance(self.stopwatch, CudaStopwatch):
            prepared = self.stopwatch.prepare(step, capture=False)  # a step of this size hides its launches
        else:
            prepared = self.stopwatch.prepare(step)
        state = [value for entry in optimiser.state.values() for value in entry.values() if isinstance(value, Tensor)]
        kept = [*model.parameters(), *model.buffers(), *state]
        return replace(prepared, peak_bytes=prepared.peak_bytes + sum(t.numel() * t.element_size() for t in kept))

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
