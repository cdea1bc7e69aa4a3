"""`attemper bench step`: a whole training step of a ViT, every method against none, compiled and not."""

from __future__ import annotations

import contextlib
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
    with threads(plan.threads), torch.random.fork_rng(), many_programs():
        torch.manual_seed(0)
        stopwatch = make_stopwatch(device, plan.clock)
        head = head_of(plan, device, dtype, stopwatch, command)
        bench = StepBench(sizes, library, batch, device, dtype, stopwatch, Deadline(plan.minutes), progress)
        rows, prepared = [], {}
        for at, recipe in enumerate(recipes):
            for mode, result in bench.prepare(recipe, list(modes), at / len(recipes)):
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


@contextlib.contextmanager
def many_programs() -> Iterator[None]:
    """Let one process compile a model for every recipe.

    Torch counts them as recompilations of one function and would give up in silence after a few; eager code would then
    be measured under the name of compiled code.
    """
    torch._dynamo.reset()
    limits = {"recompile_limit": 1024, "accumulated_recompile_limit": 4096, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(**limits):
        yield
    torch._dynamo.reset()


@dataclass(frozen=True)
class StepBench:
    """One model, many recipes."""

    sizes: ViT
    library: str
    batch: int
    device: torch.device
    dtype: torch.dtype
    stopwatch: Stopwatch
    deadline: Deadline
    progress: Progress

    def prepare(self, recipe: str, modes: list[str], share: float) -> Iterator[tuple[str, Prepared | str]]:
        """For each mode, the step of a model under this recipe, ready to be timed, or why there is none."""
        model: nn.Module | None = None
        for at, mode in enumerate(modes):
            self.progress(0.8 * (share + 0.01 * at), f"preparing {recipe}, {mode}")
            try:
                if self.deadline.passed(PREPARING) and recipe != "none":
                    raise RuntimeError(self.deadline.reason)
                if model is None:
                    model, handle, optimiser = self.build(recipe)
                step = self.make_step(model, handle, optimiser, mode)
                yield mode, self.warm_up(step, model, optimiser)
            except Exception as error:
                yield mode, reason_of(error)

    def build(self, recipe: str) -> tuple[nn.Module, attemper.Tempered, torch.optim.Optimizer]:
        """A tempered model and its optimiser. Every recipe starts from the same weights."""
        torch.manual_seed(0)
        model = make_vit(self.sizes, self.library).to(self.device).train()
        handle = attemper.apply(model, "none" if recipe == TWIN else recipe)
        # A rate of zero costs what any other does, and every round computes the same.
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, fused=self.device.type == "cuda")
        return model, handle, optimiser

    def make_step(
        self, model: nn.Module, handle: attemper.Tempered, optimiser: torch.optim.Optimizer, mode: str
    ) -> Callable[[], None]:
        """One training step on one batch of noise."""
        generator = torch.Generator(self.device).manual_seed(0)
        size = (self.batch, 3, self.sizes.image, self.sizes.image)
        images = torch.randn(size, device=self.device, generator=generator)
        labels = torch.randint(self.sizes.classes, (self.batch,), device=self.device, generator=generator)
        forward: Callable[[Tensor], Tensor] = torch.compile(model) if mode == "compiled" else model

        def step() -> None:
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                loss = handle.loss(lambda: forward(images), lambda out: F.cross_entropy(out, labels))
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
        timers = [lambda one=one: self.stopwatch.seconds(one) for one in prepared.values()]  # type: ignore[misc]

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
                row, milliseconds=seconds * 1e3, samples_per_s=self.batch / seconds, peak_mib=peak / 2**20
            )
            if row.mode in base:
                ratios = times[:, column] / times[:, base[row.mode]]
                low, high = interval(ratios)
                memory = peak / prepared[places[base[row.mode]]].peak_bytes
                row = replace(row, ratio=float(np.median(ratios)), low=low, high=high, memory_ratio=memory)
            rows[place] = row
