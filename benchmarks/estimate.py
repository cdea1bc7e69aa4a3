"""What `attemper plan estimate` promises against what the plan then takes.

    python benchmarks/estimate.py                                  # digits, on whatever this machine has
    python benchmarks/estimate.py --task cifar10 --model vit-cifar --epochs 4 --batch-size 256 --data DATA

Prints the estimated and the true wall time of the study, and those of one run for every recipe. Nothing else should run
on the machine meanwhile. On GPUs one run has a GPU for itself, in the estimate and in truth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from attemper.lab.bench.machine import describe_machine
from attemper.lab.study.estimate import estimate
from attemper.lab.study.executor import work
from attemper.lab.study.plan import Plan
from attemper.lab.study.probing import probe
from attemper.lab.study.processes import Processes, gpu_memory
from attemper.lab.study.study import Study


def truth(plan: Plan, data: Path | None, workers: int | None) -> tuple[float, dict[str, float]]:
    """Seconds of the whole study, and the median of each recipe's runs."""
    with tempfile.TemporaryDirectory() as folder:
        study = Study(folder, plan, data)
        begun = time.perf_counter()
        work(study, executor=Processes(workers, 1 if gpu_memory() and workers is None else None))
        seconds = time.perf_counter() - begun
        took: dict[str, list[float]] = {}
        for key, result in study.results().items():
            took.setdefault(study.runs[key].recipe, []).append(result["timing"]["seconds"])
    return seconds, {recipe: median(values) for recipe, values in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--model", default="vit-digits")
    parser.add_argument("--recipes", nargs="+", default=["dropkey(0.1)", "cb", "explicit(v=5e-4, ff=5e-4, p=0.2)"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    plan = Plan.from_dict(
        {
            "task": given.task,
            "model": given.model,
            "recipes": given.recipes,
            "seeds": given.seeds,
            "budget": {"epochs": given.epochs, "batch_size": given.batch_size},
        }
    )
    found = estimate(plan, probe(plan, root=given.data, workers=given.workers, steps=given.steps))
    seconds, runs = truth(plan, given.data, given.workers)
    rows: dict[str, dict[str, Any]] = {"the study": {"estimate": found.here.seconds, "truth": seconds}}
    for entry, row in zip(plan.recipes, found.recipes, strict=True):
        rows[f"one run of {row.name}"] = {"estimate": row.seconds, "truth": runs[entry.configurations[0]]}
    print(f"{'':45} {'estimate':>10} {'truth':>10} {'off by':>8}")
    for name, row in rows.items():
        row["off"] = row["estimate"] / row["truth"] - 1
        print(f"{name:45} {row['estimate']:8.1f} s {row['truth']:8.1f} s {100 * row['off']:+6.1f} %")
    if given.json:
        device = torch.device("cuda" if gpu_memory() else "cpu")
        whole = {"machine": dataclasses.asdict(describe_machine(device)), "workers": found.here.workers, "rows": rows}
        given.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
