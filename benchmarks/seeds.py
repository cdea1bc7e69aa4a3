"""What one seed for a training pass costs, against the seeds that every call drew for itself.

Two source trees are timed on the same machine, each in a process of its own, one after the other in every round and in
turns as to which comes first. A ratio is that of one round, so what slows the machine down for a while slows both of
its sides; the figure is the median over all rounds, with a bootstrap over rounds as its interval. `twin` is one more
process of the old tree: how far its ratio is from 1 says how far to trust the others.

    git worktree add ../before c78f29c
    python benchmarks/seeds.py --old ../before --threads 1 --clock cpu --json benchmarks/results/seeds-cpu.json

A step is forward and backward. "host" models are so small that a step is nearly nothing but Python and dispatch, as the
host's part of a step on a GPU; there, `--device cuda` also times what the host does until a step is launched. The cases
called "attention" need a GPU: one call captured in a CUDA graph, so that its time is that of the kernels alone, those
that make the seed and the words of the mask with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

RECIPES = (
    "dropkey(0.1)",
    "droppath(0.1)",
    "ffdropout(0.1)",
    "layerdrop(0.1)",
    "drophead(0.1)",
    "dropkey(0.1) + drophead(0.1) + droppath(0.1) + ffdropout(0.1)",
)
COMPILED = (RECIPES[0], RECIPES[-1])
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


# ----------------------------------------------------------------------------------------------------------- the models
def vit(width: int, heads: int, size: int, depth: int = 12) -> nn.Module:
    import timm

    shape = {"embed_dim": width, "depth": depth, "num_heads": heads, "img_size": size, "num_classes": 10}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **shape)
    return model


def llama(width: int, heads: int, depth: int = 6) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": depth, "vocab_size": 256}
    model: nn.Module = LlamaModel(LlamaConfig(num_attention_heads=heads, num_key_value_heads=heads, **sizes))
    return model


def images(size: int) -> Tensor:
    return torch.randn(4, 3, size, size)


def tokens(length: int) -> Tensor:
    return torch.randint(256, (4, length))


@dataclasses.dataclass(frozen=True)
class Case:
    about: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


CASES = {
    "vit": Case("ViT-Ti/16, 12 blocks, 4 images of 96 × 96", lambda: vit(192, 3, 96), lambda: images(96)),
    "gpt": Case("Llama, 6 blocks of width 192, 4 texts of 64 tokens", lambda: llama(192, 3), lambda: tokens(64)),
    "vit host": Case("the same ViT, width 12, 4 tokens", lambda: vit(12, 3, 32), lambda: images(32)),
    "gpt host": Case("the same Llama, width 12, 4 tokens", lambda: llama(12, 3), lambda: tokens(4)),
    "vit short": Case("ViT of 2 blocks, width 12, 4 tokens", lambda: vit(12, 3, 32, 2), lambda: images(32)),
    "gpt short": Case("Llama of 2 blocks, width 12, 4 tokens", lambda: llama(12, 3, 2), lambda: tokens(4)),
}
CALLS = {
    "attention 65": (512, 12, 65, 32),
    "attention 197": (256, 6, 197, 64),
    "attention 577": (64, 12, 577, 64),
    "attention 1024": (32, 12, 1024, 64),
    "attention 4096": (4, 12, 4096, 64),
}
"""Samples, heads, tokens and width of one call in bfloat16."""


# ----------------------------------------------------------------------------------------------------------- a process
def work(device: torch.device, threads: int | None, clock: Callable[[], float]) -> None:
    """Time what is asked for on stdin, and answer on stdout, until stdin ends."""
    import attemper

    if threads is not None:
        torch.set_num_threads(threads)
    steps: dict[tuple[str, str, bool], Callable[[], Tensor]] = {}
    answer({"tree": attemper.__file__})
    for line in sys.stdin:
        asked = json.loads(line)
        key = asked["case"], asked["recipe"], asked["compiled"]
        if key not in steps:
            steps = {key: make_step(*key, device)}
            for _ in range(3):
                steps[key]()
        answer(timed(steps[key], asked["repeats"], device, clock))


def answer(what: dict[str, Any]) -> None:
    print("ANSWER" + json.dumps(what), flush=True)


def make_step(case: str, recipe: str, compiled: bool, device: torch.device) -> Callable[[], Tensor]:
    """A step of a tempered model, or of one call of attention."""
    import attemper

    torch.manual_seed(0)
    if case in CALLS:
        return captured_call(CALLS[case], recipe)
    torch.compiler.reset()
    model, x = CASES[case].build().to(device).train(), CASES[case].inputs().to(device)
    attemper.apply(model, recipe)
    run: Any = torch.compile(model) if compiled else model

    def step() -> Tensor:
        out = run(x)
        loss: Tensor = (out if isinstance(out, Tensor) else out[0]).float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=False)
        return loss

    return step


def captured_call(shape: tuple[int, int, int, int], recipe: str) -> Callable[[], Any]:
    """One call, forward and backward, as a CUDA graph."""
    import attemper

    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    methods = attemper.parse(recipe)

    def run() -> None:
        torch.autograd.grad(attemper.attention(*inputs, methods=methods), inputs, grad)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(step: Callable[[], Tensor], repeats: int, device: torch.device, clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds of a step, and those until the host was done with it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    begun = clock()
    for _ in range(repeats):
        step()
    launched = clock()
    wait()
    return {"step": (clock() - begun) / repeats, "host": (launched - begun) / repeats}


# ------------------------------------------------------------------------------------------------------------ in turns
class Worker:
    """A process in which one source tree is timed."""

    def __init__(self, name: str, tree: Path, options: list[str]) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        command = [sys.executable, __file__, "--worker", *options]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        found = Path(self.read()["tree"]).resolve()
        if not found.is_relative_to(tree.resolve()):
            raise SystemExit(f"{name} runs {found}, which is not in {tree}")

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER"):
                found: dict[str, Any] = json.loads(line.removeprefix("ANSWER"))
                return found
        raise SystemExit(f"the process of {self.name} ended")

    def ask(self, **what: Any) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.read()


@dataclasses.dataclass(frozen=True)
class Row:
    case: str
    mode: str
    recipe: str
    measure: str
    """Of "step" or "host", the time until a step is launched on a GPU."""
    old_ms: float
    new_ms: float
    ratio: float
    """Median over rounds of new / old."""
    low: float
    high: float
    """2.5 and 97.5 % of the bootstrapped median."""
    twin: float
    """The same ratio of a second process of the old tree."""
    rounds: int


def compare(
    workers: list[Worker], case: str, recipe: str, compiled: bool, rounds: int, measures: list[str]
) -> list[Row]:
    """One case, timed in turns."""
    from attemper.lab.bench.timing import interval

    asked = {"case": case, "recipe": recipe, "compiled": compiled}
    first = [worker.ask(repeats=1, **asked)["step"] for worker in workers]  # builds, compiles and warms up
    repeats = max(1, round(0.03 / min(first)))
    taken: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
    for turn in range(rounds):
        for index in range(len(workers)):
            worker = workers[(turn + index) % len(workers)]
            taken[worker.name].append(worker.ask(repeats=repeats, **asked))
    rows = []
    for measure in measures:
        seconds = {name: np.array([each[measure] for each in found]) for name, found in taken.items()}
        ratios = seconds["new"] / seconds["old"]
        low, high = interval(ratios)
        medians = {name: float(np.median(values)) * 1e3 for name, values in seconds.items()}
        twin = float(np.median(seconds["twin"] / seconds["old"]))
        mode = "compiled" if compiled else "eager"
        row = Row(
            case,
            mode,
            recipe,
            measure,
            medians["old"],
            medians["new"],
            float(np.median(ratios)),
            low,
            high,
            twin,
            rounds,
        )
        print(show(row), flush=True)
        rows.append(row)
    return rows


def show(row: Row) -> str:
    return (
        f"| {row.case} | {row.mode} | `{row.recipe}` | {row.measure} | {row.old_ms:.2f} ms | {row.new_ms:.2f} ms | "
        f"{row.ratio:.3f} | {row.low:.3f} … {row.high:.3f} | {row.twin:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="the source tree to compare with")
    parser.add_argument("--new", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument(
        "--names", nargs=2, metavar=("OLD", "NEW"), help="of the trees, where git cannot tell their commits"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: the processor time of a process")
    parser.add_argument("--cases", nargs="*", choices=sorted({**CASES, **CALLS}), default=list(CASES))
    parser.add_argument("--recipes", nargs="*", help="those to time; otherwise all, and compiled two of them")
    parser.add_argument("--modes", nargs="*", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(torch.device(options.device), options.threads, CLOCKS[options.clock])
        return
    if options.old is None:
        parser.error("--old PATH: a worktree of the commit to compare with")
    given = ["--device", options.device, "--clock", options.clock]
    given += [] if options.threads is None else ["--threads", str(options.threads)]
    trees = {"old": options.old, "new": options.new, "twin": options.old}
    workers = [Worker(name, tree, given) for name, tree in trees.items()]
    if options.device != "cuda" and not CALLS.keys().isdisjoint(options.cases):
        parser.error(f"{', '.join(CALLS)} need --device cuda: they time the kernels of a GPU")
    print("| model | mode | recipe | | old | new | new / old | 95 % | twin |\n|---|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    for mode in options.modes:
        for case in options.cases:
            for recipe in options.recipes or (COMPILED if mode == "compiled" else RECIPES):
                if case in CALLS and mode == "compiled":
                    continue
                measures = ["step", "host"] if options.device == "cuda" and case in CASES else ["step"]
                rows += compare(workers, case, recipe, mode == "compiled", options.rounds, measures)
                if options.json is not None:
                    write(options, rows)


def write(options: argparse.Namespace, rows: list[Row]) -> None:
    from attemper.lab.bench.machine import describe_machine, versions

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    record = {
        "benchmark": "seeds",
        "machine": describe_machine(torch.device(options.device)).device,
        "date": datetime.date.today().isoformat(),
        "versions": versions(("timm", "transformers")),
        "settings": {"clock": options.clock, "threads": torch.get_num_threads()},
        "commits": dict(zip(("old", "new"), options.names or (commit(options.old), commit(options.new)), strict=True)),
        "models": {name: case.about for name, case in CASES.items()},
        "calls": CALLS,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    options.json.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def commit(tree: Path) -> str:
    """The commit of a tree."""
    asked = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
