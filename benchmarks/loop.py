"""What a recipe costs in an ordinary training loop: forward, loss, backward, optimiser, at small batches too.

Each recipe has a model of its own. All are timed in turns, some steps at a time, so that what slows the machine down
slows all of them; a ratio is that of one round, and the figure its median over rounds. "host" is the time until the
host is done with a step, which is what small batches wait for.

    python benchmarks/loop.py --batches 8 32 256 --json benchmarks/results/loop-h200.json
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F

import attemper
from attemper.lab.bench.machine import describe_machine, versions

RECIPES = (
    "dropkey(0.1)",
    "dropattention(0.1)",
    "cb",
    "hardmask(0.1)",
    "blur",
    "explicit(v=5e-4, ff=5e-4)",
    "dropkey(0.1) + cb + explicit(v=5e-4, ff=5e-4)",
)
WARM_UP = 4
Step = Callable[[], None]


def make_step(recipe: str, batch: int, device: torch.device, options: argparse.Namespace) -> Step:
    """One training step of a ViT; "none": without methods."""
    torch.manual_seed(0)
    model: Any = timm.create_model(options.model, img_size=options.size, num_classes=1000).to(device).train()
    tempered = None if recipe == "none" else attemper.apply(model, recipe)
    network = torch.compile(model, mode=options.compile) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    images = torch.randn(batch, 3, options.size, options.size, device=device)
    labels = torch.randint(1000, (batch,), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            if tempered is None:
                loss = F.cross_entropy(network(images), labels)
            else:
                loss = tempered.loss(lambda: network(images), lambda out: F.cross_entropy(out, labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(step: Step, steps: int, device: torch.device) -> dict[str, float]:
    """Seconds of a step, and those until the host is done with it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    launched = time.perf_counter()
    wait()
    return {"step": (time.perf_counter() - begun) / steps, "host": (launched - begun) / steps}


def peak(step: Step, device: torch.device) -> int | None:
    """Bytes that a step takes at most beyond what is there before."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(batch: int, device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every recipe, and one more for `none` a second time, which says how far to trust the others."""
    recipes = ["none", *options.recipes, "none"]
    steps, first = [], []
    for recipe in recipes:
        step = make_step(recipe, batch, device, options)
        begun = time.perf_counter()
        timed(step, WARM_UP, device)
        first.append(time.perf_counter() - begun)
        steps.append(step)
    taken: list[list[dict[str, float]]] = [[] for _ in recipes]
    for turn in range(options.rounds):
        for index in range(len(steps)):
            at = (turn + index) % len(steps)
            taken[at].append(timed(steps[at], options.steps, device))
    memory = [peak(step, device) for step in steps]
    rows = []
    for at, recipe in enumerate(recipes):
        row: dict[str, Any] = {"batch": batch, "recipe": recipe if at == 0 or recipe != "none" else "none, again"}
        for what in ("step", "host"):
            row[f"{what}_ms"] = 1e3 * statistics.median(each[what] for each in taken[at])
            ratios = sorted(ours[what] / none[what] for ours, none in zip(taken[at], taken[0], strict=True))
            row[f"{what}_ratio"] = statistics.median(ratios)
            row[f"{what}_quartiles"] = [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]]
        row["memory_ratio"] = None if memory[at] is None else memory[at] / memory[0]  # type: ignore[operator]
        row["first_steps_s"] = first[at]
        rows.append(row)
        memory_text = "–" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}"
        print(
            f"| {batch} | `{row['recipe']}` | {row['step_ms']:.2f} ms | {row['step_ratio']:.2f} | "
            f"{row['host_ratio']:.2f} | {memory_text} |",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--size", type=int, default=224, help="of images")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 256])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--compile", help="mode of torch.compile, such as default or reduce-overhead; otherwise eager")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="at a time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    record: dict[str, Any] = {
        "benchmark": "loop",
        "machine": describe_machine(device).device,
        "date": datetime.date.today().isoformat(),
        "versions": versions(("timm",)),
        "settings": {name: str(value) for name, value in vars(options).items() if name != "json"},
        "rows": [],
    }
    print("| batch | recipe | step | step / none | host / none | memory / none |\n|---|---|---|---|---|---|")
    for batch in options.batches:
        record["rows"] += measure(batch, device, options)
        gc.collect()
        if options.json is not None:
            options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
