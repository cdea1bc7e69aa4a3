"""Training throughput of several runs side by side on one device: images/s of all of them together.

Every process trains one model of the CIFAR-10 study (made-up images of CIFAR's size, so no files are needed), exactly
as `attemper compare` does: augmented batches, the recipe, the step in a CUDA graph. In a phase only some of them work.

    python benchmarks/throughput.py --workers 1 4 8 12 --compile
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch

from attemper.lab.tasks.base import ImageTask, InputShape
from attemper.lab.tasks.source import MemorySource
from attemper.lab.training.data import RunData
from attemper.lab.training.graph import fastest
from attemper.lab.training.learner import Learner
from attemper.lab.training.spec import Budget, RunSpec

RECIPES = ("none", "dropkey(0.1)", "explicit(v=5e-4, ff=5e-4, p=0.2)", "cb")
IMAGES = 50_000


def made_up_task() -> ImageTask:
    """Noise in the place of CIFAR-10."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (IMAGES, 3, 32, 32), dtype=torch.uint8, generator=draw)
    source = MemorySource(images, torch.arange(IMAGES) % 10)
    shape = InputShape(channels=3, height=32, width=32, classes=10)
    return ImageTask("made-up", shape, "noise", lambda: source, lambda: source, tuple("0123456789"))


def serve(index: int, options: argparse.Namespace, phases: list[int], barrier: Any, counts: Any) -> None:
    """One run: prepare, then work in every phase that it takes part in."""
    torch.set_num_threads(1)
    device = torch.device(options.device)
    budget = Budget(
        epochs=40, batch_size=options.batch, precision=options.precision, compile=options.compile, augment="crop-flip"
    )
    recipe = options.recipes[index % len(options.recipes)]
    spec = RunSpec(task="made-up", model=options.model, recipe=recipe, seed=index, budget=budget)
    data = RunData(spec, made_up_task(), device)
    learner = Learner(spec, data.task, device)
    learner.model.train()
    learn = fastest(learner, data, lambda text: print(f"[{recipe}] {text}", flush=True))
    begun = time.perf_counter()
    for number, (inputs, targets) in enumerate(data.epoch(1)):
        learn(inputs, targets)
        if number == 20:
            break
    wait(device)
    print(f"worker {index} ({recipe}) is ready after {time.perf_counter() - begun:.0f} s", flush=True)
    for at, size in enumerate(phases):
        barrier.wait()
        if index < size:
            counts[at * max(phases) + index] = work(learn, data, device, options.seconds)


def work(learn: Any, data: RunData, device: torch.device, seconds: float) -> float:
    """Images per second of this process over so many seconds."""
    images, begun = 0, time.perf_counter()
    for inputs, targets in data.epoch(2):
        learn(inputs, targets)
        images += len(targets)
        if images % (16 * len(targets)) == 0:
            wait(device)
            if time.perf_counter() - begun > seconds:
                break
    wait(device)
    return images / (time.perf_counter() - begun)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Read the command line, start the processes, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="sizes of the phases")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a phase")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--model", default="vit-cifar")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), help="given to the processes in turn")
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--note", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    phases = sorted(options.workers)
    most = max(phases)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(most)
    counts = context.Array("d", len(phases) * most)
    crew = [context.Process(target=serve, args=(index, options, phases, barrier, counts)) for index in range(most)]
    for process in crew:
        process.start()
    for process in crew:
        process.join()
    rows = [
        {"processes": size, "images_per_second": sum(counts[at * most : (at + 1) * most])}
        for at, size in enumerate(phases)
    ]
    print(f"\n{options.model}, batch {options.batch}, {options.precision}, compile {options.compile} {options.note}")
    for row in rows:
        print(f"{row['processes']:3d} processes: {row['images_per_second']:9,.0f} images/s")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"options": {k: str(v) for k, v in vars(options).items()}, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
