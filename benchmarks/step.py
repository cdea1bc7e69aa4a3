"""What a whole training step costs with every method, against the same step without any, interleaved in one run.

python benchmarks/step.py --rounds 30 --json benchmarks/results/step-cpu.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

import attemper

RECIPES = [
    "none",
    "dropkey(0.1)",
    "dropkey(0.3, share=heads)",
    "dropattention(0.1)",
    "hardmask(0.1)",
    "blur",
    "dropkey(0.1) + consistency",
    "explicit(q=1e-3, ff=1e-3)",
    "explicit(v=1e-3, ff=1e-3)",
    "explicit(av=1e-3, ff=1e-3)",
    "explicit(v=1e-3, ff=1e-3, expectation=exact)",
    "arora(v=1e-3, ff=1e-3)",
    "cb",
    "cb(cb_s)",
    "graying",
    "graying(svd)",
    "skipless(mlp)",
    "drophead(0.1)",
    "layerdrop(0.1)",
    "droppath(0.1)",
    "ffdropout(0.1)",
    "dropconnect(0.1)",
]


def make_step(recipe: str, batch: int, device: str) -> Callable[[], None]:
    """One forward and backward pass of a small ViT (6 blocks, width 192, 65 tokens) under a recipe."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=192, depth=6, num_heads=6, num_classes=10
    ).to(device)
    images, labels = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    handle = attemper.apply(model, recipe)
    model.train()

    def step() -> None:
        model.zero_grad()
        handle.loss(lambda: model(images), lambda out: F.cross_entropy(out, labels)).backward()
        if device != "cpu":
            torch.cuda.synchronize()

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step in every round; within a round the steps follow one another, so that drift hits all."""
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {recipe: [] for recipe in steps}
    for _ in range(rounds):
        for recipe, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[recipe].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="how often every step is timed")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds = measure({r: make_step(r, options.batch, options.device) for r in RECIPES}, options.rounds)
    rows = []
    for recipe in RECIPES:
        ratios = [one / base for one, base in zip(seconds[recipe], seconds["none"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        row = {
            "recipe": recipe,
            "milliseconds": 1e3 * statistics.median(seconds[recipe]),
            "ratio": statistics.median(ratios),
            "quartiles": [low, high],
        }
        rows.append(row)
        print(f"{recipe:46} {row['milliseconds']:8.1f} ms  {row['ratio']:6.3f}  ({low:.3f} … {high:.3f})")
    if options.json:
        about = {
            "machine": platform.machine(),
            "device": options.device,
            "threads": options.threads,
            "batch": options.batch,
            "rounds": options.rounds,
            "torch": torch.__version__,
            "timm": timm.__version__,
            "date": datetime.date.today().isoformat(),
        }
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
