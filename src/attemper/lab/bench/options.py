"""What every benchmark is told, and how it tells of its progress."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from attemper.errors import ParameterError
from attemper.lab.bench.results import Head

if TYPE_CHECKING:
    import torch

    from attemper.lab.bench.timing import Stopwatch

Clock = Literal["wall", "cpu"]
Mode = Literal["eager", "compiled"]
MODES: tuple[Mode, ...] = get_args(Mode)
LoopMode = Literal["eager", "compiled", "reduce-overhead", "max-autotune"]
LOOP_MODES: tuple[LoopMode, ...] = get_args(LoopMode)
MOST = {"rounds": 100_000, "threads": 1_024, "batch": 1_000_000}
"""The largest numbers that somebody can mean."""
Progress = Callable[[float, str], None]
"""Called with the share of the work that is done, 0 … 1, and what is done next."""


def silent(share: float, what: str) -> None:
    """Progress that nobody wants to see."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the benchmarks have in common."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure. auto: on a GPU if there is one."""
    rounds: int = 15
    """How often every candidate has its turn; figures are medians over the rounds."""
    clock: Clock = "wall"
    """On a CPU: wall, or cpu, the process's own processor time, for a machine that others use too (with threads 1)."""
    threads: int | None = None
    """CPU threads of torch; torch's own choice if not given."""
    minutes: float | None = None
    """Stop preparing candidates in time to be done after so many minutes. What is left out is a row that says so."""
    note: str = ""
    """A remark that is kept with the figures, such as what else the machine was doing."""
    date: str = ""
    """The date to write into the report; today if not given."""

    def check(self) -> None:
        """Raise if an option is out of range."""
        if self.rounds < 2:
            raise ParameterError(f"rounds must be at least 2, for a median and its interval; got {self.rounds}")
        for name, most in MOST.items():
            if (getattr(self, name, None) or 0) > most:
                raise ParameterError(f"{name} must be at most {most:,}, got {getattr(self, name)}")
        if self.clock not in get_args(Clock):
            raise ParameterError(f"clock must be one of {', '.join(get_args(Clock))}; got {self.clock!r}")
        if self.threads is not None and self.threads < 1:
            raise ParameterError(f"threads must be at least 1, got {self.threads}")
        if self.minutes is not None and self.minutes <= 0:
            raise ParameterError(f"minutes must be above 0, got {self.minutes}")


@dataclass(frozen=True, kw_only=True)
class OpsPlan(Plan):
    """What `bench_ops` measures."""

    shapes: tuple[str, ...] = ()
    """Tokens x head width, such as 197x64, or all four sizes, such as 8x12x4096x64. All named shapes if not given."""
    methods: tuple[str, ...] = ()
    """Names of methods or recipes that act inside of attention. DropKey, HardMask and Blur if not given."""
    backends: tuple[str, ...] = ()
    """What to compare with: cudnn, flash, efficient, math, flex, listing, listing-compiled. All if not given."""


@dataclass(frozen=True, kw_only=True)
class StepPlan(Plan):
    """What `bench_step` measures."""

    methods: tuple[str, ...] = ()
    """Names of methods, or recipes. Every method that there is if not given."""
    modes: tuple[Mode, ...] = ()
    """Among eager and compiled. Both on a GPU, eager on a CPU if not given: compiling takes many minutes there."""
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


@dataclass(frozen=True, kw_only=True)
class LoopPlan(Plan):
    """What `bench_loop` measures."""

    models: tuple[str, ...] = ()
    """Among vit-s, swin-t, bert, gpt and call (one call of attention). All if not given."""
    batches: tuple[int, ...] = ()
    """Samples per step. 8, 32 and 256 on a GPU, 2 on a CPU if not given."""
    modes: tuple[LoopMode, ...] = ()
    """Among eager, compiled, reduce-overhead, max-autotune. All but the last on a GPU, eager on a CPU if not given."""
    cells: tuple[str, ...] = ()
    """Model:batch:mode, such as vit-s:8:eager, in the order to measure in; in place of the three options above."""
    methods: tuple[str, ...] = ()
    """Names of methods, or recipes. Those that have targets if not given."""
    steps: int = 4
    """How many steps follow each other in a turn."""
    rounds: int = 7
    """How often every recipe has its turn; figures are medians over the rounds."""

    def check(self) -> None:
        """Raise if an option is out of range."""
        super().check()
        if self.cells and (self.models or self.batches or self.modes):
            raise ParameterError("cells says which models, batches and modes; leave out the options of those names")
        for mode in self.modes:
            if mode not in LOOP_MODES:
                raise ParameterError(f"modes must be among {', '.join(LOOP_MODES)}; got {mode!r}")
        for batch in self.batches:
            if not 1 <= batch <= MOST["batch"]:
                raise ParameterError(f"batches must be from 1 to {MOST['batch']:,}, got {batch}")
        if not 1 <= self.steps <= MOST["rounds"]:
            raise ParameterError(f"steps must be from 1 to {MOST['rounds']:,}, got {self.steps}")


def head_of(plan: Plan, device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch, command: str) -> Head:
    """When, where and how the figures of a plan are taken."""
    from attemper.lab.bench.machine import describe_machine

    return Head(
        date=plan.date or datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=command,
        machine=describe_machine(device),
        dtype=str(dtype).removeprefix("torch."),
        rounds=plan.rounds,
        clock=stopwatch.name,
        note=plan.note,
    )
