"""What a benchmark found: dataclasses that travel as JSON."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from attemper.errors import UnreadableError
from attemper.files import atomic_write, read_json_object

FORMAT = 1
"""Raised when the meaning of a field changes."""


@dataclass(frozen=True)
class Machine:
    """What the figures were taken on."""

    device: str
    """The GPU's name, or a few words about the CPU."""
    cpu: str
    threads: int | None
    """CPU threads of torch; None: not known."""
    versions: dict[str, str]


@dataclass(frozen=True)
class Head:
    """When, where and how the figures were taken."""

    date: str
    command: str
    machine: Machine
    dtype: str
    rounds: int
    clock: str
    """What was read: "cuda events", "wall" or "cpu" (processor time of the process)."""
    note: str = ""


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention call: q, k and v are (batch, heads, tokens, width)."""

    batch: int
    heads: int
    tokens: int
    width: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(batch, heads, tokens, width)."""
        return self.batch, self.heads, self.tokens, self.width

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward and a backward pass, with no key dropped and nothing recomputed.

        Two products of N × N × e forward, five backward, two operations per multiply-add.
        """
        return 14 * self.batch * self.heads * self.tokens**2 * self.width

    def __str__(self) -> str:
        return ", ".join(map(str, self.sizes))


@dataclass(frozen=True, kw_only=True)
class OpsRow:
    """One candidate at one shape. Where `failure` is set there are no figures."""

    shape: Shape
    family: str
    """"stock" (torch's SDPA backends), "flex", "listing" (the paper's code) or "attemper"."""
    name: str
    """The backend or implementation."""
    recipe: str
    """What it regularises with: "none", "dropout(0.1)" (torch's own) or a recipe."""
    chosen: bool = False
    """Whether `impl="auto"` takes it."""
    milliseconds: float | None = None
    """Median of one forward and backward pass."""
    ratio: float | None = None
    """Median over rounds of its time ÷ that of the fastest stock kernel without dropout in the same round."""
    low: float | None = None
    """2.5 % of the bootstrapped ratio."""
    high: float | None = None
    """97.5 % of it."""
    peak_mib: float | None = None
    """Memory at the peak of a pass, beyond the inputs."""
    tflops: float | None = None
    """Of the arithmetic of attention without dropping, so that it compares across methods."""
    ceiling_share: float | None = None
    """`tflops` ÷ what a large matrix product reaches on the same machine."""
    error: float | None = None
    """Largest relative error of output and gradients against the reference in float64, same seed."""
    target: float | None = None
    """The largest ratio that we aim at, where there is an aim for this machine."""
    captured: bool = False
    """Whether it ran from a CUDA graph, so that launches do not count."""
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One recipe in one mode. Where `failure` is set there are no figures."""

    recipe: str
    mode: str
    """"eager" or "compiled"."""
    milliseconds: float | None = None
    """Median of one training step."""
    ratio: float | None = None
    """Median over rounds of its time ÷ that of `none` in the same mode and round."""
    low: float | None = None
    high: float | None = None
    samples_per_s: float | None = None
    peak_mib: float | None = None
    """Parameters, optimiser state, and what a step adds to them at its peak."""
    memory_ratio: float | None = None
    """`peak_mib` ÷ that of `none` in the same mode."""
    target: float | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoopRow:
    """One recipe in the training loop of one cell: a model, a batch and a mode. Where `failure` is set: no figures."""

    model: str
    batch: int
    mode: str
    """"eager", "compiled", "reduce-overhead" or "max-autotune"."""
    recipe: str
    milliseconds: float | None = None
    """Median of one step: forward, loss, backward, optimiser."""
    ratio: float | None = None
    """Median over rounds of its time ÷ that of `none` in the same cell and round."""
    low: float | None = None
    high: float | None = None
    host_milliseconds: float | None = None
    """Median of the time after which the host is done with a step that begins on an idle device."""
    host_ratio: float | None = None
    peak_mib: float | None = None
    """What a step takes at its peak beyond parameters, optimiser state and data."""
    memory_ratio: float | None = None
    first_seconds: float | None = None
    """The first step, with all that is compiled in it."""
    first_ratio: float | None = None
    graph_skips: int | None = None
    """How often the compiler gave up a CUDA graph; None: the mode has none."""
    target: float | None = None
    """The largest `ratio` that we aim at; of the model "call" the largest `host_ratio`."""
    failure: str | None = None

    @property
    def cell(self) -> tuple[str, int, str]:
        """The rows that are compared with each other."""
        return self.model, self.batch, self.mode

    @property
    def aimed(self) -> float | None:
        """The figure that the target is for."""
        return self.host_ratio if self.model == "call" else self.ratio


@dataclass(frozen=True, kw_only=True)
class OpsReport:
    """The attention operator, forward and backward, by shape."""

    head: Head
    ceiling_tflops: float | None
    """What a large matrix product reached in the same dtype."""
    rows: tuple[OpsRow, ...]
    benchmark: str = "ops"


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """A whole training step of a model, by recipe."""

    head: Head
    model: str
    batch: int
    rows: tuple[StepRow, ...]
    benchmark: str = "step"


@dataclass(frozen=True, kw_only=True)
class LoopReport:
    """Ordinary training loops of several models, at several batches, eager and compiled, by recipe."""

    head: Head
    models: dict[str, str]
    """What each model is."""
    rows: tuple[LoopRow, ...]
    benchmark: str = "loop"


Report = OpsReport | StepReport | LoopReport
KINDS = ("ops", "step", "loop")


def save(report: Report, path: Path) -> None:
    """Write a report, atomically."""
    text = json.dumps({"format": FORMAT} | dataclasses.asdict(report), indent=1, ensure_ascii=False)
    atomic_write(path, text + "\n")


def load(path: Path) -> Report:
    """The report that `save` wrote."""
    try:
        given = read_json_object(path)
        form, kind = given.pop("format"), given["benchmark"]
    except (UnreadableError, KeyError) as error:
        reason = f"it has no {error}." if isinstance(error, KeyError) else str(error)
        raise UnreadableError(f"{path} is no result of `attemper bench`: {reason}") from error
    if form != FORMAT or kind not in KINDS:
        raise UnreadableError(
            f"{path} holds benchmark '{kind}' in format {form}; this version reads "
            f"{', '.join(KINDS)} in format {FORMAT}"
        )
    try:
        head = given.pop("head")
        given["head"] = Head(**head | {"machine": Machine(**head["machine"])})
        rows = given.pop("rows")
        if kind == "loop":
            return LoopReport(**given, rows=tuple(LoopRow(**row) for row in rows))
        if kind == "step":
            return StepReport(**given, rows=tuple(StepRow(**row) for row in rows))
        return OpsReport(**given, rows=tuple(OpsRow(**row | {"shape": Shape(**row["shape"])}) for row in rows))
    except (KeyError, TypeError) as error:
        raise UnreadableError(f"{path} is no whole result of `attemper bench`: {error}") from error
