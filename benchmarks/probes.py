"""What probes cost: nothing while they are off, and little every hundred steps.

In every round a training step, the same step of a twin that was diagnosed before, and one look of the recorder are
timed one after another, in an order that rotates. `off` is the twin's time over the step's, `look` that of a look over
the step's. With `probe_every=100` a step then costs 1 + look/100.

    python benchmarks/probes.py --threads 1 --clock cpu --json benchmarks/results/probes-cpu.json
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.lab.bench.machine import describe_machine, versions
from attemper.lab.bench.timing import interleaved, interval
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import InputShape
from attemper.probes.recording import IMAGES, Recorder

EVERY = 100
CASES = {
    "vit-digits, batch 64": ("vit-digits", InputShape(1, 8, 8, 10), 64),
    "vit-cifar, batch 64": ("vit-cifar", InputShape(3, 32, 32, 10), 64),
    "timm ViT-Ti/16 at 224 px, batch 32": ("timm:vit_tiny_patch16_224", InputShape(3, 224, 224, 10), 32),
}


def make_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, device: torch.device, clock: Callable[[], float], rounds: int) -> dict[str, Any]:
    text, shape, batch = CASES[name]
    torch.manual_seed(0)
    model = build_model(text, shape).to(device).train()
    x = torch.randn(batch, shape.channels, shape.height, shape.width, device=device)
    y = torch.randint(0, shape.classes, (batch,), device=device)
    twin = copy.deepcopy(model)
    attemper.diagnose(twin, x[:2])
    recorder = Recorder(twin, x, 1)
    jobs = [make_step(model, x, y), make_step(twin, x, y), lambda: recorder.after(1)]

    def seconds(job: Callable[[], Any]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = clock()
        job()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - begun

    for job in jobs:
        job()
    times, failures = interleaved([lambda job=job: seconds(job) for job in jobs], rounds)
    if failures:
        raise RuntimeError("; ".join(failures.values()))
    off, look = times[:, 1] / times[:, 0], times[:, 2] / times[:, 0]
    return {
        "case": name,
        "step_ms": round(float(np.median(times[:, 0])) * 1e3, 2),
        "off": round(float(np.median(off)), 4),
        "off_interval": [round(value, 4) for value in interval(off)],
        "look": round(float(np.median(look)), 3),
        "look_interval": [round(value, 3) for value in interval(look)],
        f"every_{EVERY}": round(1 + float(np.median(look)) / EVERY, 4),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu (default) or cuda")
    parser.add_argument("--rounds", type=int, default=15, help="measurements per model (default 15)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; torch's default unless given")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the figures here too")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time of this process")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[options.clock]
    head: dict[str, Any] = {
        "benchmark": "probes",
        "machine": describe_machine(options.device).device,
        "date": datetime.date.today().isoformat(),
        "versions": versions(("timm",)),
        "settings": {"threads": torch.get_num_threads(), "clock": options.clock, "images": IMAGES},
        "rows": [],
    }
    for name in CASES:
        row = measure(name, options.device, clock, options.rounds)
        head["rows"].append(row)
        print(row)
        if options.json is not None:
            options.json.write_text(json.dumps(head, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
