"""What the host does in a training step under each recipe, on the way that a GPU takes, without a GPU.

At small batches an eager loop waits for the host: for Python, for autograd, for torch's dispatcher. Here whole steps
(forward, `tempered.loss`, backward) run on a CPU, on models so narrow that there is next to nothing to compute. CPU
tensors are taken for a GPU's, and every kernel of ours is left out at the last moment, when its compiled code would be
launched. So what is timed is what the library does on the host of a GPU, the launches themselves apart, which are
counted. The numbers that the steps compute mean nothing.

    python benchmarks/host.py --json benchmarks/results/host-cpu.json      # three minutes on one core
    python benchmarks/host.py --models vit --recipes "explicit(v=5e-4, ff=5e-4)" --profile 30

These are no figures of a GPU. torch's own operators take another time here than it takes to launch theirs, and so does
what is compared with: a ratio says where the host stands, not how long a step takes. Two trees are compared by
PYTHONPATH, one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import functools
import json
import os
import pstats
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import timm
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from triton.runtime.jit import JITFunction

import attemper
from attemper.kernels.common import devices, direct
from attemper.kernels.common.eager import is_plain
from attemper.lab.bench.default_recipes import loop_recipes
from attemper.lab.bench.machine import describe_machine
from attemper.lab.bench.timing import CLOCKS, interleaved, interval
from attemper.ops import choice, stream
from attemper.tempering import interception, kept_samples
from compiling import EMPTY, zeroed

NONE, TWIN = "none", "none, once more"
BATCH = 2
BLOCKS = 12
WIDTH = 48
HEADS = 6
TOKENS = 6
WORDS = 32
WARM_UP = 5


# ----------------------------------------------------------------------------------------------------- instead of a GPU
class Launches:
    """Stands for what a kernel is compiled to, and counts how often it is launched, and looked for by Triton."""

    function, packed_metadata = None, None

    def __init__(self) -> None:
        self.count = self.searches = 0

    def run(self, *arguments: Any) -> None:
        self.count += 1


ON_HOST = "on_host"
"""The attribute of seeds that were brought to the host, and are no GPU's."""


def brought_to_host(draws: Any) -> Tensor:
    """`kept_samples.on_host`, where the seed lies on a CPU already."""
    if draws.host_seed is None:
        draws.host_seed = draws.seed.clone()
        setattr(draws.host_seed, ON_HOST, True)
    seed: Tensor = draws.host_seed
    return seed


@contextlib.contextmanager
def as_on_gpu() -> Iterator[Launches]:
    """Inside it, CPU tensors are taken for a GPU's, and kernels are not launched, only counted."""
    launches = Launches()

    def compiled(kernel: Any, *arguments: Any, **options: Any) -> Launches:
        launches.searches += 1
        launches.run()
        return launches

    def is_half(x: Tensor) -> bool:
        return choice.autocast_dtype(x) is not None or x.dtype in (torch.bfloat16, torch.float16)

    table = tuple(row for row in choice.TABLE if "on a CPU" not in row.calls)
    patches = (
        (JITFunction, "run", compiled),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (devices, "INTERPRETED", True),
        (choice, "TABLE", table),
        (choice, "is_half", is_half),
        (interception, "is_half", is_half),
        (kept_samples, "on_host", brought_to_host),
        (stream, "_is_readable", lambda seed: hasattr(seed, ON_HOST)),
        (stream.Stream, "_has_kernels", lambda self: not hasattr(self.seed, ON_HOST) and is_plain(self.seed)),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        direct.forget()
        direct._known.clear()
        yield launches
    direct.forget()
    direct._known.clear()


@contextlib.contextmanager
def zeros_for_empty() -> Iterator[None]:
    """Inside it, what kernels would fill holds zeros, and not any number that there is, NaN among them."""
    with contextlib.ExitStack() as stack:
        for owner, name in EMPTY:
            stack.enter_context(mock.patch.object(owner, name, zeroed(getattr(owner, name))))
        yield


# -------------------------------------------------------------------------------------------------------------- models
@dataclass(frozen=True)
class Trained:
    """A model, and a loss for a batch whose sequences have one of several lengths."""

    model: nn.Module
    forward: Callable[[int], Any]
    """The output for sequences of so many tokens; images have always the same."""
    criterion: Callable[[Any], Tensor]


def vit() -> Trained:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": WIDTH, "depth": BLOCKS, "num_heads": HEADS}
    return classifier(timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes))


def swin() -> Trained:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 4, "window_size": 4, "depths": (BLOCKS // 2,) * 2}
    given = {"embed_dim": WIDTH // 2, "num_heads": (3, 6), "num_classes": 10, "drop_path_rate": 0.0}
    return classifier(timm.models.swin_transformer.SwinTransformer(**sizes, **given))


def classifier(model: nn.Module) -> Trained:
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    return Trained(model, lambda tokens: model(images), lambda out: F.cross_entropy(out.float(), labels))


def bert() -> Trained:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=HEADS, num_labels=4,
        intermediate_size=2 * WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model, labels = transformers.BertForSequenceClassification(config), torch.randint(4, (BATCH,))

    def forward(tokens: int) -> Tensor:
        mask = torch.ones(BATCH, tokens, dtype=torch.long)
        mask[-1, -1] = 0
        out: Tensor = model(input_ids=torch.zeros_like(mask), attention_mask=mask).logits
        return out

    return Trained(model, forward, lambda out: F.cross_entropy(out.float(), labels))


def gpt() -> Trained:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=BLOCKS, n_head=HEADS, n_positions=1024, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)

    def forward(tokens: int) -> Tensor:
        out: Tensor = model(input_ids=torch.zeros(BATCH, tokens, dtype=torch.long)).logits
        return out

    return Trained(model, forward, lambda out: out.float().logsumexp(-1).mean())


MODELS = {"vit": vit, "swin": swin, "bert": bert, "gpt": gpt, "bert, any length": bert, "gpt, any length": gpt}
"""Of 12 blocks each. timm: a ViT, a Swin with learnt biases; Transformers: BERT with padding, GPT-2, both by SDPA."""
LONGEST = 12
"""Tokens where every step has another number of them, from 2 on: as many as `TOKENS` in the mean, nearly."""


def lengths_of(model: str) -> Callable[[], int]:
    """Gives the tokens of the next step's sequences."""
    draw = random.Random(0)
    return (lambda: draw.randint(2, LONGEST)) if "any length" in model else (lambda: TOKENS)


def make_step(model: str, recipe: str, lengths: Callable[[], int] | None = None) -> Callable[[], None]:
    """A training step without its optimiser, warm. lengths: gives the tokens of the next step's sequences."""
    torch.manual_seed(0)
    trained, lengths = MODELS[model](), lengths or lengths_of(model)
    network = trained.model.train()
    tempered = None if recipe in (NONE, TWIN) else attemper.apply(network, recipe)

    def step() -> None:
        tokens = lengths()
        with torch.autocast("cpu", torch.bfloat16):
            if tempered is None:
                loss = trained.criterion(trained.forward(tokens))
            else:
                loss = tempered.loss(lambda: trained.forward(tokens), trained.criterion)
        loss.backward()
        network.zero_grad(set_to_none=True)

    with zeros_for_empty():  # first passes look at values
        for _ in range(WARM_UP):
            step()
    return step


# ------------------------------------------------------------------------------------------------------------ measuring
@dataclass(frozen=True)
class Row:
    """What one recipe costs on one model."""

    model: str
    recipe: str
    microseconds: float = 0.0
    """Of a whole step."""
    added: float = 0.0
    """Microseconds per block beside those of `none`."""
    ratio: float = 0.0
    """To `none` in the same round; low, high: 95 % of the bootstrapped median."""
    low: float = 0.0
    high: float = 0.0
    operators: int = 0
    """Operators of torch in a step, those that others call too."""
    calls: int = 0
    """Functions that Python calls in a step, built-in ones too; on a busy machine it tells more than times do."""
    launches: int = 0
    """Kernels of ours that a GPU would be given in a step."""
    refused: str = ""
    """Why the recipe cannot act on the model."""


def operators_of(step: Callable[[], None]) -> int:
    """How many operators torch dispatches in a step."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell of its start and stop
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return sum(event.name.startswith("aten::") for event in seen.events())


def calls_of(step: Callable[[], None]) -> int:
    """How many functions Python calls in a step."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def measure(
    model: str, recipes: list[str], rounds: int, clock: Callable[[], float], launches: Launches
) -> Iterator[Row]:
    """All recipes on one model, in turns."""
    steps: dict[str, Callable[[], None]] = {}
    refused: dict[str, str] = {}
    for recipe in (NONE, TWIN, *recipes):
        try:
            steps[recipe] = make_step(model, recipe)
        except attemper.errors.AttemperError as error:
            refused[recipe] = str(error).partition(". ")[0]

    def timer(step: Callable[[], None]) -> float:
        start = clock()
        step()
        return clock() - start

    seconds, failed = interleaved([functools.partial(timer, step) for step in steps.values()], rounds)
    if failed:
        raise RuntimeError(f"{model}: {failed}")
    none = seconds[:, 0]
    for column, (recipe, step) in enumerate(steps.items()):
        before = launches.count
        step()
        launched = launches.count - before
        mine = seconds[:, column]
        low, high = interval(mine / none)
        yield Row(
            model, recipe, statistics.median(mine) * 1e6, statistics.median(mine - none) * 1e6 / BLOCKS,
            statistics.median(mine / none), low, high, operators_of(step), calls_of(step), launched,
        )  # fmt: skip
    for recipe, reason in refused.items():
        yield Row(model, recipe, refused=reason)


COLUMNS = ("model", "recipe", "step", "added per block", "ratio to none", "95 %", "operators", "calls", "launches")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def shown(row: Row) -> str:
    if row.refused:
        return f"| {row.model} | `{row.recipe}` | refused: {row.refused} {'| ' * (len(COLUMNS) - 2)}|"
    return (
        f"| {row.model} | `{row.recipe}` | {row.microseconds / 1e3:.2f} ms | {row.added:.0f} µs | {row.ratio:.2f} | "
        f"{row.low:.2f} … {row.high:.2f} | {row.operators} | {row.calls} | {row.launches} |"
    )


def show_profile(model: str, recipe: str, lines: int) -> None:
    """Where Python's time goes in twenty steps."""
    step = make_step(model, recipe)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(20):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--recipes", nargs="*", default=[], help="default: those of attemper bench loop")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu", help="cpu: the processor time of a process")
    parser.add_argument("--profile", type=int, metavar="LINES", help="show where the time of each recipe goes instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # what no kernel fills may hold them
    recipes, rows = loop_recipes(options.recipes), []
    with as_on_gpu() as launches:
        if options.profile is not None:
            for model in options.models:
                for recipe in recipes or [NONE]:
                    print(f"{model}, {recipe}")
                    show_profile(model, recipe, options.profile)
            return
        print(HEAD)
        for model in options.models:
            for row in measure(model, recipes, options.rounds, CLOCKS[options.clock], launches):
                print(shown(row), flush=True)
                rows.append(row)
            if options.json is not None:
                write(options.json, options, rows)


def write(path: Path, options: argparse.Namespace, rows: list[Row]) -> None:
    """All figures so far."""
    record = {
        "benchmark": "host",
        "machine": asdict(describe_machine(torch.device("cpu"))),
        "date": datetime.date.today().isoformat(),
        "settings": {"clock": options.clock, "rounds": options.rounds, "batch": BATCH, "blocks": BLOCKS},
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
