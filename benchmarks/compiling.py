"""Every kind of kernel, compiled for a GPU that need not be there.

Triton's interpreter runs kernels on a CPU, takes much that the compiler refuses, and cannot say what a kernel takes of
a multiprocessor. Here calls and training steps run on a CPU up to the point at which a kernel would be launched, and
there it is compiled instead. What comes out: the kernels that do not compile, and registers, local memory and shared
memory of the others. The numbers that the calls compute mean nothing.

    python benchmarks/compiling.py                                # for sm_90: ten minutes on one core
    python benchmarks/compiling.py --sm 80 --only hardmask --json kernels.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import attemper
from attemper.kernels.common import devices, direct
from attemper.methods import DropKey
from attemper.ops.stream import Stream

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Compute capability → KiB of shared memory that one program may have."""
SHAPES = [  # batch, heads, heads of k and v, queries, keys, width
    (1, 1, 1, 1, 1, 1),
    (1, 1, 1, 1, 33, 8),
    (2, 3, 3, 17, 17, 24),
    (4, 3, 3, 65, 65, 32),
    (2, 6, 6, 197, 197, 64),
    (2, 4, 2, 50, 197, 64),
    (1, 2, 2, 577, 577, 64),
    (1, 2, 2, 1025, 1100, 64),
    (2, 2, 2, 197, 197, 48),
    (2, 2, 2, 257, 257, 80),
    (2, 2, 2, 197, 197, 96),
    (1, 4, 1, 130, 1100, 128),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MASKS = ("none", "causal", "keys", "full", "bias", "learnt bias")
RECIPES = (
    "dropkey(0.1)",
    "hardmask(0.1)",
    "hardmask(0.1, k=0.2, fill=neg_inf, share=heads)",
    "blur",
    "dropattention(0.1)",
    "dropattention(0.1, rescale=normalize)",
    "dropattention(0.1, rescale=normalize, detach=true)",
    "dropattention(0.1, unit=column)",
    "drophead(0.2)",
    "dropkey(0.1, per=head)",
    "dropkey(0.1) + hardmask(0.1)",
    "hardmask(0.1) + dropkey(0.1) + drophead(0.1)",
    "dropkey(0.1, structure=block)",
    "dropkey(0.1, structure=cross)",
    "dropkey(0.1, structure=cross, share=heads) + hardmask(0.1)",
)
STEPS = (
    "explicit(v=1e-3, ff=1e-3)",
    "explicit(q=1e-3, k=1e-3, v=1e-3, av=1e-3, ff=1e-3)",
    "dropkey(0.1) + cb + explicit(v=1e-3, ff=1e-3)",
    "dropkey(learn)",
    "droppath(0.2)",
    "ffdropout(0.2) + drophead(0.2)",
    "layerdrop(0.3) + dropconnect(0.1)",
    "graying",
    "hardmask(0.1) + blur",
)


@dataclass(frozen=True)
class Build:
    """A kernel as it was compiled for one kind of arguments."""

    kernel: str
    call: str
    warps: int
    registers: int
    local: int
    """Bytes of local memory of a thread: spilled registers, and arrays that are indexed."""
    shared: int
    too_large: bool


@dataclass
class Builds:
    """All that was compiled for one generation of GPUs, and what was not."""

    sm: int
    done: list[Build] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    call: str = ""

    def add(self, compiled: Any, kernel: str) -> None:
        """Ask the compiler what a kernel takes, and keep it."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", said)}
        warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
        large = shared > 1024 * SHARED.get(self.sm, 99)
        self.done.append(Build(kernel, self.call, warps, found["REG"], found["STACK"], shared, large))


class AbsentGpu:
    """Enough of a driver for Triton to compile for a GPU that is not there."""

    def __init__(self, sm: int) -> None:
        self.target = GPUTarget("cuda", sm, 32)

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0


EMPTY = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))


def zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What makes an empty tensor, with zeros in it."""
    return lambda *given, **options: make(*given, **options).zero_()


@contextlib.contextmanager
def compiling(builds: Builds) -> Iterator[None]:
    """Inside it, a kernel is compiled when it would be launched, and CPU tensors are taken for a GPU's."""
    run, seen = JITFunction.run, {}

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool = True, **constants: Any) -> None:
        try:
            compiled = run(kernel, *arguments, grid=grid, warmup=True, **constants)
        except Exception as error:
            builds.failed.append({"kernel": kernel.__name__, "call": builds.call, "error": str(error)[-2000:]})
            return
        if id(compiled) not in seen:
            seen[id(compiled)] = compiled  # kept alive, or another could have its number
            builds.add(compiled, kernel.__name__)

    patches: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", compile_only),
        (devices, "INTERPRETED", True),
        (Stream, "_has_kernels", lambda stream: True),
        # What no kernel fills would be any number, NaN among them.
        *((owner, name, zeroed(getattr(owner, name))) for owner, name in EMPTY),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    driver.set_active(AbsentGpu(builds.sm))
    direct.forget()
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        driver._active = None  # the next one to ask finds what is there
        direct.forget()


# -------------------------------------------------------------------------------------------------------------- calls
def attend(
    recipe: str, shape: tuple[int, ...], dtype: torch.dtype, mask: str, **options: Any
) -> None:  # fmt: skip
    """A call of attention, forward and backward."""
    batch, heads, kv_heads, nq, nk, width = shape
    sizes = ((batch, heads, nq, width), (batch, kv_heads, nk, width), (batch, kv_heads, nk, width))
    q, k, v = (torch.randn(size, dtype=dtype).requires_grad_() for size in sizes)
    given = {
        "keys": torch.arange(nk) < torch.randint(1, nk + 1, (batch, 1, 1, 1)),
        "full": torch.rand(batch, 1, nq, nk) < 0.7,
        "bias": torch.randn(1, heads, nq, nk, dtype=dtype),
        "learnt bias": torch.randn(1, heads, nq, nk, dtype=dtype).requires_grad_(),
    }.get(mask)
    out = attemper.attention(
        q, k, v, attn_mask=given, is_causal=mask == "causal", methods=on_images(recipe, nk), seed=3, impl="triton",
        **options,
    )  # fmt: skip
    out.float().sum().backward()


def on_images(recipe: str, keys: int) -> list[Any]:
    """The methods of a recipe; the largest square image that the keys have room for, where one asks for an image."""
    side = math.isqrt(keys)
    methods = attemper.parse(recipe)
    return [method.on_grid((side, side), keys - side**2) if method.seeks_grid else method for method in methods]


def attend_documents(recipe: str, dtype: torch.dtype, causal: bool) -> None:
    """Packed documents."""
    q, k, v = (torch.randn(1, 4, 300, 64, dtype=dtype).requires_grad_() for _ in range(3))
    ends = torch.tensor([0, 40, 41, 300], dtype=torch.int32)
    attemper.attention(
        q, k, v, cu_seqlens=ends, is_causal=causal, methods=attemper.parse(recipe), seed=3, impl="triton"
    ).sum().backward()


def gather(keys: int) -> None:
    """Keys that all queries share."""
    q, k, v = (torch.randn(2, 4, keys, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    attemper.attention(q, k, v, methods=[DropKey(0.3, share="queries")], seed=3, impl="gather").sum().backward()


def train(recipe: str, kind: str, dtype: torch.dtype) -> None:
    """A training step of a small model."""
    model, inputs = MODELS[kind]()
    handle = attemper.apply(model, recipe, impl="auto" if kind in WRITTEN else "triton")
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        for _ in range(2):
            out = model(*inputs)
            out = getattr(out, "last_hidden_state", out)
            (out.float().square().mean() + handle.penalty()).backward()


def _vit() -> tuple[Any, tuple[Tensor, ...]]:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)
    return model, (torch.randn(2, 3, 64, 64),)


def _swin() -> tuple[Any, tuple[Tensor, ...]]:
    import timm

    options = {"img_size": 56, "window_size": 7, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 32}
    return timm.create_model("swin_tiny_patch4_window7_224", num_classes=10, **options), (torch.randn(2, 3, 56, 56),)


def _bert() -> tuple[Any, tuple[Tensor, ...]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
        attn_implementation="eager",
    )  # fmt: skip
    return BertModel(config), (torch.randint(0, 50, (2, 21)),)


def _encoder() -> tuple[Any, tuple[Tensor, ...]]:
    layer = torch.nn.TransformerEncoderLayer(64, 2, 96, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2), (torch.randn(1, 33, 64),)


MODELS: dict[str, Callable[[], tuple[Any, tuple[Tensor, ...]]]] = {
    "timm ViT": _vit,
    "timm Swin": _swin,
    "eager BERT": _bert,
    "nn.TransformerEncoder": _encoder,
}


WRITTEN = ("timm Swin", "eager BERT")
"""Models that write attention out: there, kernels serve the softmax only."""


def everything() -> Iterator[tuple[str, Callable[[], None]]]:
    """Each call's name, and what makes it."""
    masks, recipes = itertools.cycle(MASKS), itertools.cycle(RECIPES)
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        yield _call(next(recipes), shape, dtype, next(masks))
    for recipe, mask in itertools.product(RECIPES, MASKS):
        yield _call(recipe, (2, 3, 3, 65, 65, 32), torch.bfloat16, mask)
    for recipe, dtype, causal in itertools.product(RECIPES[:2], DTYPES, (False, True)):
        yield f"documents, {recipe}, {_short(dtype)}", lambda r=recipe, d=dtype, c=causal: attend_documents(r, d, c)
    for keys in (65, 3000):
        yield f"shared keys, {keys}", lambda n=keys: gather(n)
    for (kind, recipe), dtype in zip(itertools.product(MODELS, STEPS), itertools.cycle(DTYPES)):
        yield f"{kind}, {recipe}, {_short(dtype)}", lambda r=recipe, k=kind, d=dtype: train(r, k, d)


def _call(recipe: str, shape: tuple[int, ...], dtype: torch.dtype, mask: str) -> tuple[str, Callable[[], None]]:
    return f"{recipe}, {shape}, {_short(dtype)}, mask: {mask}", lambda: attend(recipe, shape, dtype, mask)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------------- report
def compile_all(sm: int, only: str = "", said: Any = sys.stderr) -> tuple[Builds, list[str]]:
    """All kernels of all calls whose names have `only` in them; and the calls that were refused or broke, and why."""
    builds, broken = Builds(sm), []
    for name, make in everything():
        if only not in name:
            continue
        builds.call, start = name, time.perf_counter()
        torch.manual_seed(0)
        try:
            with compiling(builds):
                make()
        except Exception as error:
            broken.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        print(f"{len(builds.done):5d} kernels, {time.perf_counter() - start:5.1f} s: {name}", file=said, flush=True)
    return builds, broken


def summary(builds: Builds) -> Iterator[str]:
    """A line for every kernel: how often it was compiled, and the most that it takes."""
    yield f"{'kernel':26s} compiled  registers  local bytes  shared KiB  spilling"
    for name, count in sorted(Counter(build.kernel for build in builds.done).items()):
        mine = [build for build in builds.done if build.kernel == name]
        most = [max(getattr(build, part) for build in mine) for part in ("registers", "local", "shared")]
        spilling = sum(build.local > 0 for build in mine)
        yield f"{name:26s} {count:8d}  {most[0]:9d}  {most[1]:11d}  {most[2] / 1024:10.1f}  {spilling:8d}"


def main() -> int:
    """Exit status 1: something did not compile, or does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sm", type=int, default=90, help="compute capability, such as 80, 90 or 100 (default: 90)")
    parser.add_argument("--only", default="", help="calls that have this in their names")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    given = parser.parse_args()
    builds, broken = compile_all(given.sm, given.only)
    print("\n".join(summary(builds)))
    for line in broken:
        print("did not run:", line)
    for failure in builds.failed:
        print(f"does not compile: {failure['kernel']} in {failure['call']}:\n{failure['error']}")
    large = [build for build in builds.done if build.too_large]
    for build in large:
        print(f"too large: {build.kernel} in {build.call}: {build.shared} bytes of shared memory")
    if given.json:
        head = {"sm": given.sm, "torch": torch.__version__, "triton": triton.__version__}
        record = {**head, "builds": [asdict(build) for build in builds.done], "failed": builds.failed, "broken": broken}
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(bool(builds.failed or large or broken))


if __name__ == "__main__":
    sys.exit(main())
