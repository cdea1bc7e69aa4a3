"""A short probe of a plan: some steps of every recipe, in as many processes at once as there will be workers.

Side by side, since workers share caches, memory and a GPU, and a process that has the machine for itself would promise
too much. Batches go through the same code as in a run, so reading and augmenting them is measured too.
"""

import gc
import itertools
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from attemper.errors import AttemperError
from attemper.lab.errors import StudyError
from attemper.lab.study.interrupts import ignore_interrupts, shielded
from attemper.lab.study.plan import Plan
from attemper.lab.study.processes import gpu_memory
from attemper.lab.threads import share_of_cores
from attemper.lab.training.spec import RunSpec

WARM_UP = 3
LOADED_AHEAD = 2
"""Batches that each process of torch's loader has ready: the first steps find them there and would promise too much."""
LEAST = 3
PATIENCE = 10.0
"""Seconds after which the steps of a recipe are enough, once there are a few."""
EXIT_PATIENCE = 10.0
"""Seconds that a process has to end after its answer."""
EVALUATED = 2048
"""Images that are evaluated to know how long one takes."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Sizes:
    """How much there is to do in one run."""

    batches: int
    """Per epoch."""
    batch_size: int
    validation: int
    """Images."""
    measured: int
    """Training images that are evaluated at the end."""
    test: int


@dataclass(frozen=True)
class Measured:
    """What one recipe takes; times in seconds."""

    setup: float
    """Building the model and getting its first step going."""
    batch: float
    """One batch, from the data to the optimiser."""
    evaluation: float
    """One image in eval mode."""
    keeping: float
    """A copy of the weights, as an epoch that is the best so far makes it."""
    saving: float
    """One checkpoint."""
    memory: int | None
    """Most bytes of GPU memory; None on a CPU."""


@dataclass(frozen=True)
class Probe:
    """What a probe found, as means over its processes."""

    start: float
    """Seconds until a worker process is there and has its data."""
    sizes: Sizes
    recipes: dict[str, Measured]
    resident: int
    """Bytes of main memory of one process."""
    workers: int
    device: str
    per_gpu: int = 1
    """Processes that shared a GPU."""


def probe(
    plan: Plan, *, root: Path | None = None, workers: int | None = None, per_gpu: int | None = None, steps: int = 20
) -> Probe:
    """Measure every recipe of a plan on this machine; of a grid, its first configuration stands for all.

    workers, per_gpu: how many processes measure side by side, as in `processes.Processes`, but for runs
        that are packed on a GPU by themselves: without per_gpu it has one each.
    """
    from attemper.lab.study.processes import START, Processes

    gpus = len(gpu_memory())
    size = min(Processes(workers, per_gpu).size(gpu_memory(), []), len(plan.runs()))
    context = multiprocessing.get_context(START)
    start_together = context.Barrier(size)
    lines: list[Connection] = []
    processes: list[Any] = []
    try:
        for place in range(size):
            line, theirs = context.Pipe()
            device = f"cuda:{place % gpus}" if gpus else "cpu"
            arguments = (plan, root, device, share_of_cores(size), steps, time.time())
            with shielded():
                process = context.Process(target=_serve, args=(theirs, start_together, *arguments))
                process.start()
                processes.append(process)
            theirs.close()
            lines.append(line)
        found = [_answer(line) for line in lines]
        for process in processes:
            process.join(EXIT_PATIENCE)
        return _joined(found, size, -(-size // gpus) if gpus else 1)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(line: Connection) -> Probe:
    try:
        kind, answer = line.recv()
    except EOFError:
        raise StudyError("A process of the probe died; the machine may be short of memory.") from None
    if kind == "fatal":
        raise StudyError(answer)
    found: Probe = answer
    return found


def _joined(probes: Sequence[Probe], workers: int, per_gpu: int) -> Probe:
    """Means over the processes; of memory, the most."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def joined(recipe: str) -> Measured:
        each = [found.recipes[recipe] for found in probes]
        times = ("setup", "batch", "evaluation", "keeping", "saving")
        memory = [one.memory for one in each if one.memory is not None]
        return Measured(
            **{name: mean([getattr(one, name) for one in each]) for name in times}, memory=max(memory, default=None)
        )

    return Probe(
        start=mean([found.start for found in probes]),
        sizes=probes[0].sizes,
        recipes={recipe: joined(recipe) for recipe in probes[0].recipes},
        resident=max(found.resident for found in probes),
        workers=workers,
        device=probes[0].device,
        per_gpu=per_gpu,
    )


# --------------------------------------------------------------------------------------------------- in a process


def _serve(
    line: Connection, barrier: Any, plan: Plan, root: Path | None, device: str, threads: int, steps: int, begun: float
) -> None:
    ignore_interrupts()
    try:
        torch.set_num_threads(threads)
        line.send(("probe", _measure_plan(plan, root, device, steps, begun, barrier.wait)))
    except AttemperError as error:
        barrier.abort()
        line.send(("fatal", str(error)))
    except Exception:
        barrier.abort()
        line.send(("fatal", f"The probe failed:\n{traceback.format_exc()}"))


def _measure_plan(
    plan: Plan, root: Path | None, device: str, steps: int, begun: float, await_others: Callable[[], Any]
) -> Probe:
    import psutil  # type: ignore[import-untyped]

    from attemper.lab.tasks.registry import open_task
    from attemper.lab.training.data import RunData
    from attemper.lab.training.outcome import versions

    chosen = torch.device(device)
    task = open_task(plan.task, root)
    recipes = list(dict.fromkeys(entry.configurations[0] for entry in plan.recipes))
    first = plan.spec(recipes[0], plan.lr[0], plan.seeds[0], task.name)
    data = RunData(first, task, chosen)
    measure(first, data, chosen, steps=1)  # libraries load and set themselves up: once per worker, not once per run
    start = time.time() - begun
    found = {}
    for recipe in recipes:
        await_others()
        found[recipe] = measure(plan.spec(recipe, plan.lr[0], plan.seeds[0], task.name), data, chosen, steps=steps)
    sizes = Sizes(
        batches=data.batches_per_epoch,
        batch_size=data.batch_size,
        validation=len(data.validation),
        measured=len(data.measured_train()),
        test=len(task.test()),
    )
    return Probe(start, sizes, found, int(psutil.Process().memory_info().rss), 1, versions(chosen)["device"])


def measure(
    spec: RunSpec, data: Any, device: torch.device, *, steps: int, clock: Clock = time.perf_counter
) -> Measured:
    """What one recipe takes on one device.

    data: a `RunData`. clock: tells seconds.
    """
    from attemper.lab.training.checkpoint import save_checkpoint
    from attemper.lab.training.devices import synchronise
    from attemper.lab.training.randomness import preserved_random_state, seed_everything
    from attemper.lab.training.validation import evaluate

    def now() -> float:
        synchronise(device)
        return clock()

    def took(do: Callable[[], Any]) -> float:
        begun = now()
        do()
        return now() - begun

    _make_room(device)
    with preserved_random_state():
        seed_everything(spec.seed)
        if device.type == "cuda" or spec.budget.compile:
            # What a compiler makes now is kept on disk: the first run finds it there as all others do.
            _begun(spec, data, device)
            _make_room(device)
        begun = now()
        learner, learn, batches, ahead = _begun(spec, data, device)
        ready = now()
        done = 0
        for inputs, targets in itertools.islice(batches, max(steps, ahead)):
            learn(inputs, targets)
            done += 1
            if done >= LEAST and clock() - ready > PATIENCE:
                break
        batch = (now() - ready) / done
        del batches  # processes that read ahead would disturb what follows
        some = data.validation.take(torch.arange(min(EVALUATED, len(data.validation))))
        evaluation = min(took(lambda: evaluate(learner, data.task, some)) for _ in range(2)) / len(some)
        with tempfile.TemporaryDirectory() as folder:
            saving = took(lambda: save_checkpoint(Path(folder), {"best": learner.weights(), **learner.state()}))
        return Measured(
            setup=max(0.0, ready - begun - (WARM_UP + ahead) * batch),
            batch=batch,
            evaluation=evaluation,
            keeping=took(learner.weights),
            saving=saving,
            memory=int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None,
        )


def _begun(spec: RunSpec, data: Any, device: torch.device) -> tuple[Any, Callable[..., Any], Iterator[Any], int]:
    """A learner behind its first steps, what makes the next, its batches, and how many of them were read ahead."""
    from attemper.lab.training.graph import fastest
    from attemper.lab.training.learner import Learner
    from attemper.lab.training.rates import at_full_rate

    learner = Learner(at_full_rate(spec), data.task, device, data.accumulate)
    learner.to_training()
    learn = fastest(learner, data)
    ahead = LOADED_AHEAD * getattr(data.train, "workers", 0)
    batches = itertools.chain.from_iterable(data.epoch(epoch) for epoch in itertools.count(1))
    for inputs, targets in itertools.islice(batches, WARM_UP + ahead):
        learn(inputs, targets)
    return learner, learn, batches, ahead


def _make_room(device: torch.device) -> None:
    """Give back what the recipe before has left, so that the next one's peak is its own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
