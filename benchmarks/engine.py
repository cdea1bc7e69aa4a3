"""What the training engine costs in one process: its epochs against those of a loop written by hand.

Both train the same model from the same weights on the same batches, with the same optimiser and schedule. They take
turns, epoch by epoch, so that whatever else the machine does falls on both alike. The figure is the median of the
rounds' ratios with a 95 % interval by bootstrap; the engine may cost 1.02. `twin` is a second copy of the loop by hand:
how far its ratio is from 1 says how far to trust the other.

    python benchmarks/engine.py --threads 1 --clock cpu
    python benchmarks/engine.py --task cifar10 --model vit-cifar --batch-size 128 --device cuda
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from attemper.lab.bench.timing import interleaved, interval
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.seed_streams import derive, drawing_from, generator
from attemper.lab.training.data import RunData
from attemper.lab.training.graph import fastest
from attemper.lab.training.loop import Run, choose_device
from attemper.lab.training.schedule import learning_rate
from attemper.lab.training.spec import Budget, RunSpec
from attemper.tempering.outputs import logits_of

Epoch = Callable[[int], object]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def engine(spec: RunSpec, task: Task, device: torch.device) -> Epoch:
    """An epoch as `attemper.lab.training.loop.run` makes it, with its meter and its reports."""
    run = Run(spec, task, None, lambda event: None, device)
    run.learner.model.train()
    learn = fastest(run.learner, run.data)
    return lambda epoch: run.train(epoch, learn)


def by_hand(spec: RunSpec, task: Task, device: torch.device) -> Epoch:
    """The loop that one would write for this task and no other."""
    budget = spec.budget
    with drawing_from(derive(spec.seed, "weights")):
        model = build_model(spec.model, task.shape).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=budget.lr, weight_decay=budget.weight_decay, fused=True)
    source: Any = RunData(spec, task, device).train
    steps = len(source) // budget.batch_size

    def epoch(number: int) -> tuple[float, int]:
        order = torch.randperm(len(source), generator=generator(spec.seed, "order", number)).to(device)
        total = torch.zeros((), device=device)
        right = torch.zeros((), dtype=torch.int64, device=device)
        for step in range(steps):
            chosen = order[step * budget.batch_size : (step + 1) * budget.batch_size]
            inputs, targets = task.to_input(source.images[chosen]), source.targets[chosen]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(budget, (number - 1) * steps + step, steps)
            logits = logits_of(model(inputs))
            loss = F.cross_entropy(logits, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            right += (logits.argmax(-1) == targets).sum()
        return float(total) / steps, int(right)

    return epoch


def timer(epoch: Epoch, device: torch.device, clock: Callable[[], float]) -> Callable[[], float]:
    """Seconds of the next epoch."""
    numbers = itertools.count(1)

    def seconds() -> float:
        begun = clock()
        epoch(next(numbers))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - begun

    return seconds


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--task", default="digits", help="a task with images in memory (default digits)")
    words.add_argument("--model", default="vit-digits(width=64, depth=6)")
    words.add_argument("--batch-size", type=int, default=64)
    words.add_argument("--rounds", type=int, default=30, help="epochs of each (default 30)")
    words.add_argument("--device", help="cpu or cuda; otherwise a GPU where there is one")
    words.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    words.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, for a busy machine")
    given = words.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    device, task = choose_device(given.device), open_task(given.task)
    budget = Budget(epochs=given.rounds + 1, batch_size=given.batch_size)
    spec = RunSpec(task=task.name, model=given.model, recipe="none", seed=0, budget=budget)
    rivals = {"twin": by_hand, "engine": engine}
    timers = [timer(make(spec, task, device), device, CLOCKS[given.clock]) for make in (by_hand, *rivals.values())]
    times, failures = interleaved(timers, given.rounds)
    if failures:
        raise RuntimeError("; ".join(failures.values()))
    print(f"{given.task}, {given.model}, batches of {given.batch_size}, {device}, {given.rounds} rounds")
    print(f"by hand: {np.median(times[:, 0]):.3f} s an epoch")
    for column, name in enumerate(rivals, start=1):
        ratios = times[:, column] / times[:, 0]
        low, high = interval(ratios)
        print(f"{name} / by hand: {np.median(ratios):.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
