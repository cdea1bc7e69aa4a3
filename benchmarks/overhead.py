"""What tempering costs where it must cost nothing: in eval mode, and in training at rate zero.

Every round times the original model and its variants one after another, in an order that rotates from round to round,
and divides each variant's time by the original's of the same round. What slows the whole machine down for a while slows
both sides of a ratio. The figure is the median over all rounds; its interval is a bootstrap over rounds. `twin` is an
untouched copy of the original, timed like the variants: how far its ratio is from 1 says how far to trust the others.

    python benchmarks/overhead.py --rounds 200 --threads 1 --clock cpu --json benchmarks/results/overhead-cpu.json
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import attemper
from attemper.lab.bench.machine import describe_machine, versions
from attemper.lab.bench.timing import interleaved, interval

Step = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    about: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class Variant:
    label: str
    recipe: str | None
    """None: an untouched copy of the original."""
    target: float | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Variants that are timed in the same rounds."""

    mode: str
    training: bool
    variants: tuple[Variant, ...]
    share: float = 1.0
    """Of the rounds; less where a rough figure will do."""


@dataclasses.dataclass(frozen=True)
class Row:
    case: str
    mode: str
    variant: str
    original_ms: float
    """Median time of the original."""
    variant_ms: float
    ratio: float
    """Median over rounds of variant / original."""
    low: float
    """2.5 % of the bootstrapped median."""
    high: float
    """97.5 % of it."""
    target: float | None
    rounds: int


TWIN = Variant("twin", None)
EVAL, TRAINING = "eval, forward", "training, forward + backward"
GROUPS = (
    Group(EVAL, False, (TWIN, Variant("dropkey(0.1)", "dropkey(0.1)", target=1.01))),
    Group(TRAINING, True, (TWIN, Variant("dropkey(0)", "dropkey(0)", target=1.02))),
    Group(TRAINING, True, (Variant("dropkey(0.1)", "dropkey(0.1)"),), share=0.2),
)


# ------------------------------------------------------------------------------------------------------------ models
def timm_vit() -> nn.Module:
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    return model


def hf_vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def nn_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def cases(batch: int) -> list[Case]:
    def images() -> Tensor:
        return torch.randn(batch, 3, 224, 224)

    return [
        Case("timm ViT-Ti/16", f"12 blocks, width 192, 197 tokens, batch {batch}", timm_vit, images),
        Case("Transformers ViT", f"6 blocks, width 256, 197 tokens, batch {batch}", hf_vit, images),
        Case(
            "nn.TransformerEncoder",
            f"6 layers, width 256, 128 tokens, batch {batch}",
            nn_encoder,
            lambda: torch.randn(batch, 128, 256),
        ),
    ]


# ------------------------------------------------------------------------------------------------------------ timing
def as_tensor(out: Any) -> Tensor:
    tensor: Tensor = out if isinstance(out, Tensor) else out[0]
    return tensor


def make_step(model: nn.Module, x: Tensor, training: bool) -> Step:
    """One forward pass in eval mode without gradients, or one forward and backward pass in training mode."""
    model.train(training)

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    def train() -> None:
        as_tensor(model(x)).sum().backward()
        model.zero_grad(set_to_none=True)

    return train if training else evaluate


@dataclasses.dataclass(frozen=True)
class Watch:
    """Times steps: by the wall, or by the processor time that this process was given."""

    device: torch.device
    clock: Callable[[], float]
    repeats: int

    def seconds(self, step: Step) -> float:
        self.synchronize()
        start = self.clock()
        for _ in range(self.repeats):
            step()
        self.synchronize()
        return (self.clock() - start) / self.repeats

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def in_turns(self, steps: list[Step], rounds: int) -> np.ndarray:
        """(rounds, steps) seconds, the steps taking turns once they are warm."""
        for step in steps:
            for _ in range(2):
                step()
        times, failures = interleaved([lambda step=step: self.seconds(step) for step in steps], rounds)
        if failures:
            raise RuntimeError("; ".join(failures.values()))
        return times


def measure(case: Case, group: Group, watch: Watch, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    original = case.build().to(watch.device)
    x = case.inputs().to(watch.device)
    steps = [make_step(original, x, group.training)]
    for variant in group.variants:
        model = copy.deepcopy(original)
        if variant.recipe is not None:
            attemper.apply(model, variant.recipe)
        steps.append(make_step(model, x, group.training))
    rounds = max(2, round(rounds * group.share))
    times = watch.in_turns(steps, rounds)
    rows = []
    for column, variant in enumerate(group.variants, start=1):
        ratios = times[:, column] / times[:, 0]
        low, high = interval(ratios)
        rows.append(
            Row(
                case=case.name,
                mode=group.mode,
                variant=variant.label,
                original_ms=round(float(np.median(times[:, 0])) * 1e3, 3),
                variant_ms=round(float(np.median(times[:, column])) * 1e3, 3),
                ratio=round(float(np.median(ratios)), 4),
                low=round(low, 4),
                high=round(high, 4),
                target=variant.target,
                rounds=rounds,
            )
        )
    return rows


# ------------------------------------------------------------------------------------------------- added microseconds
class Nothing(nn.Module):
    """Looks like attention and computes nothing, so that all of its time is the price of calling it."""

    def forward(self, x: Tensor | None) -> Tensor | None:
        return x if x is None else F.scaled_dot_product_attention(x, x, x)


def added_microseconds(recipe: str, training: bool, clock: Callable[[], float], modules: int = 50) -> float:
    """What one call of a tempered attention module takes longer than one of the original, both at their fastest."""
    original = nn.Sequential(*(Nothing() for _ in range(modules))).train(training)
    tempered = copy.deepcopy(original)
    attemper.apply(tempered, recipe)
    watch = Watch(torch.device("cpu"), clock, repeats=4)
    times = watch.in_turns([lambda: original(None), lambda: tempered(None)], rounds=1000)
    return float(times[:, 1].min() - times[:, 0].min()) / modules * 1e6


# ------------------------------------------------------------------------------------------------------------ report
def table(rows: list[Row]) -> str:
    cells = [["model", "mode", "variant", "original", "variant", "ratio", "95 %", "target", ""]]
    for row in rows:
        verdict = "" if row.target is None else "within" if row.ratio <= row.target else "above"
        cells.append(
            [
                row.case,
                row.mode,
                row.variant,
                f"{row.original_ms:.2f} ms",
                f"{row.variant_ms:.2f} ms",
                f"{row.ratio:.3f}",
                f"{row.low:.3f} … {row.high:.3f}",
                "" if row.target is None else f"≤ {row.target:.2f}",
                verdict,
            ]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu (default) or cuda")
    parser.add_argument("--rounds", type=int, default=60, help="paired measurements per model and mode (default 60)")
    parser.add_argument("--repeats", type=int, default=1, help="steps per measurement; more on a fast device")
    parser.add_argument("--batch", type=int, default=4, help="samples per batch (default 4)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; torch's default unless given")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the figures here too")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu counts the processor time of this process, for a CPU that others use too (with --threads 1)",
    )
    options = parser.parse_args()
    if options.clock == "cpu" and options.device.type != "cpu":
        parser.error("--clock cpu cannot time another device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    watch = Watch(options.device, {"wall": time.perf_counter, "cpu": time.process_time}[options.clock], options.repeats)

    settings = {name: getattr(options, name) for name in ("rounds", "repeats", "batch", "clock")}
    head: dict[str, Any] = {
        "benchmark": "overhead",
        "machine": describe_machine(options.device).device,
        "date": datetime.date.today().isoformat(),
        "versions": versions(("timm", "transformers")),
        "settings": settings | {"threads": torch.get_num_threads()},
        "models": {case.name: case.about for case in cases(options.batch)},
    }
    print(f"{head['machine']}, threads: {torch.get_num_threads()}, clock: {options.clock}, {head['date']}")
    print(", ".join(f"{name} {version}" for name, version in versions(("timm", "transformers")).items()))
    for name, about in head["models"].items():
        print(f"{name}: {about}")
    head["added_microseconds_per_module"] = {
        "eval": round(added_microseconds("dropkey(0.1)", False, watch.clock), 3),
        "training, dropkey(0)": round(added_microseconds("dropkey(0)", True, watch.clock), 3),
    }
    added = ", ".join(f"{value:.2f} µs in {name}" for name, value in head["added_microseconds_per_module"].items())
    print(f"added to one call of one attention module: {added}")
    rows: list[Row] = []
    for case in cases(options.batch):
        for group in GROUPS:
            print(f"{case.name}, {group.mode} …", file=sys.stderr, flush=True)
            rows += measure(case, group, watch, options.rounds)
            if options.json is not None:  # after every group: a long run that is stopped loses little
                write(options.json, head, rows)
    print(f"\n{table(rows)}")


def write(path: Path, head: dict[str, Any], rows: list[Row]) -> None:
    text = json.dumps(head | {"rows": [dataclasses.asdict(row) for row in rows]}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
