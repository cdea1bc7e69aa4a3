"""How times are taken: candidates in turns, so that what slows the machine down for a while slows all of them.

On a GPU a candidate runs from a CUDA graph between two events, after a write that empties the L2 cache and during which
the next launch is queued: neither launches nor a warm cache count. On a CPU it is run often enough for the clock.
"""

import gc
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from attemper.lab.bench.options import Clock

Step = Callable[[], object]
CLOCKS: dict[Clock, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
SHORTEST = 5e-3  # seconds of one reading on a CPU: processor time has a coarse tick
LAUNCHES_MATTER = 10e-3  # seconds: a longer pass hides most of its launches
HELD = 2 * 2**30  # bytes: a graph holds on to the memory of its pass, which may be so much
SCRATCH = 512 * 2**20  # bytes, several times the L2 cache of any GPU; the write takes longer than a graph launch


@dataclass(frozen=True)
class Prepared:
    """A step that has run before and is ready to be timed."""

    run: Step
    peak_bytes: int
    """What one run allocates at its peak, beyond what was allocated before."""
    repeats: int = 1
    captured: bool = False
    in_a_loop: bool = False
    """Whether it is timed behind another run of itself, as steps of a training loop follow each other."""


class CpuStopwatch:
    """Times steps on the CPU, by the wall or by the processor time that this process was given."""

    def __init__(self, clock: Clock = "wall") -> None:
        self.name: str = clock
        self._clock = CLOCKS[clock]

    def prepare(self, step: Step) -> Prepared:
        """Run the step until it is warm, and find out how much memory it takes and how often to repeat it."""
        step()
        once = self.seconds(Prepared(step, 0))
        return Prepared(step, peak_bytes_on_cpu(step), repeats=max(1, math.ceil(SHORTEST / max(once, 1e-7))))

    def seconds(self, prepared: Prepared) -> float:
        """Seconds of one run."""
        start = self._clock()
        for _ in range(prepared.repeats):
            prepared.run()
        return (self._clock() - start) / prepared.repeats


class CudaStopwatch:
    """Times steps on a GPU by events round a replay of their CUDA graph."""

    name = "cuda events"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scratch = torch.empty(SCRATCH, dtype=torch.int8, device=device)
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def prepare(self, step: Step, in_a_loop: bool = False) -> Prepared:
        """Run the step until it is warm, note its peak memory, and capture it unless it is in a loop or too large."""
        step()
        eager = Prepared(step, peak_bytes(self.device, step), in_a_loop=in_a_loop)
        large = eager.peak_bytes > HELD and self.seconds(eager) > LAUNCHES_MATTER
        if in_a_loop or large:
            return eager
        try:
            return Prepared(self._capture(step), eager.peak_bytes, captured=True)
        except RuntimeError:  # the step reads something back to the CPU: time it with its launches, and say so
            torch.cuda.synchronize(self.device)
            return eager

    def _capture(self, step: Step) -> Step:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Graphs never run at once, so they may share their memory; a pool lives as long as one of its graphs does.
        with torch.cuda.graph(graph, pool=self._graphs[0].pool() if self._graphs else None):
            step()
        self._graphs.append(graph)
        return graph.replay

    def seconds(self, prepared: Prepared) -> float:
        """Seconds of one run."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if prepared.in_a_loop:
            prepared.run()  # while the GPU works on it, the CPU launches the next, which is the one that counts
        else:
            self._scratch.zero_()
        start.record()
        prepared.run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


Stopwatch = CpuStopwatch | CudaStopwatch


def make_stopwatch(device: torch.device, clock: Clock) -> Stopwatch:
    """What times steps on this device. A GPU has clocks of its own."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch(clock)


def peak_bytes(device: torch.device, step: Step) -> int:
    """What one run of the step allocates at its peak, beyond what was allocated before."""
    if device.type != "cuda":
        return peak_bytes_on_cpu(step)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_bytes_on_cpu(step: Step) -> int:
    """What one run of the step allocates at its peak; torch's profiler sees every allocation."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell of its start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        return 0
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        peak = max(peak, now)
    return peak


def interleaved(
    timers: Sequence[Callable[[], float]], rounds: int, tick: Callable[[int], bool] | None = None
) -> tuple[NDArray[np.float64], dict[int, str]]:
    """(rounds, timers) seconds, and for each timer that failed, why; its column is NaN from there on.

    The order rotates from round to round, and every other round runs it backwards. One more round before all others
    warms up.
    tick: called with the number of rounds done; False ends the measurement early.
    """
    times = np.full((rounds + 1, len(timers)), np.nan)
    failures: dict[int, str] = {}
    done = 0
    with _no_collection():
        for index in range(rounds + 1):
            order = np.roll(np.arange(len(timers)), index // 2)
            for which in order if index % 2 == 0 else order[::-1]:
                if int(which) in failures:
                    continue
                try:
                    times[index, which] = timers[which]()
                except Exception as error:
                    failures[int(which)] = reason_of(error)
            done = index + 1
            if tick is not None and not tick(index):
                break
    return times[1:done], failures


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage is collected before, not in the middle of somebody's turn."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interval(ratios: NDArray[np.float64], resamples: int = 2000) -> tuple[float, float]:
    """95 % of the bootstrapped median."""
    drawn = np.random.default_rng(0).integers(0, len(ratios), (resamples, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), (2.5, 97.5))
    return float(low), float(high)


def reason_of(error: BaseException, caught: Sequence[warnings.WarningMessage] = ()) -> str:
    """Why a candidate cannot be measured, on one line.

    caught: the warnings before it, in which torch says why it has no kernel for a call.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.startswith("No available kernel"):
        messages = [str(warning.message).split(" (Triggered")[0].strip() for warning in caught]
        reasons = [line for line in dict.fromkeys(messages) if not line.endswith(("because:", "at"))]
        text = "; ".join(["no kernel for this call", *reasons])
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {text.removeprefix('CUDA out of memory. ')[:80]}"
    return text if len(text) <= 200 else f"{text[:199]}…"


class Deadline:
    """A limit on how long a benchmark may take."""

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self._start = time.monotonic()

    def passed(self, ahead: float = 0.0) -> bool:
        """Whether the time is used up, or will be in so many seconds."""
        return self.minutes is not None and time.monotonic() - self._start + ahead > self.minutes * 60

    @property
    def reason(self) -> str:
        return f"not measured: the limit of {self.minutes:g} minutes was reached before"
