"""`attemper bench ops`, `step` and `loop` as a command line sees them: a plan, and where its figures go."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attemper.errors import ParameterError
from attemper.lab.bench.options import LoopPlan, OpsPlan, StepPlan
from attemper.lab.bench.results import LoopReport, OpsReport, Report, StepReport, save
from attemper.lab.bench.terminal import progress_on, show
from attemper.lab.folders import read_object, refuse_foreign
from attemper.lab.report.page import is_page


@dataclass(frozen=True, kw_only=True)
class Ops(OpsPlan):
    """What the attention operator costs here, forward and backward, shape by shape.

    Attemper's implementations against every SDPA backend of torch with and without dropout, FlexAttention, and DropKey
    the way its paper prints it. Ratios are to the fastest of torch's own kernels without dropout, in the same run.
    """

    json: Path | None = None
    """Write the figures to this file, after every shape."""
    page: Path | None = None
    """Write an HTML page with charts to this file."""

    def run(self, words: Sequence[str] = ()) -> OpsReport:
        """Measure, show, write. words: what was typed, for the record."""
        from attemper.lab.bench.html_page import write_page
        from attemper.lab.bench.ops import bench_ops

        check_files(self.json, self.page, "ops")

        with progress_on("bench ops") as progress:
            report = bench_ops(self, command=command_line(words), progress=progress, after_shape=keeper(self.json))
        show(report)
        if self.page is not None:
            write_page(report, self.page)
        return report


@dataclass(frozen=True, kw_only=True)
class Step(StepPlan):
    """What a whole training step of a vision transformer costs here with every method, against the same without any.

    Forward, loss with everything that methods add to it, backward and optimiser: ViT-S/16 at 224 pixels in bfloat16 on
    a GPU, a small one in float32 on a CPU.
    """

    json: Path | None = None
    """Write the figures to this file."""
    page: Path | None = None
    """Write an HTML page with charts to this file."""

    def run(self, words: Sequence[str] = ()) -> StepReport:
        """Measure, show, write. words: what was typed, for the record."""
        from attemper.lab.bench.html_page import write_page
        from attemper.lab.bench.step import bench_step

        check_files(self.json, self.page, "step")
        with progress_on("bench step") as progress:
            report = bench_step(self, command=command_line(words), progress=progress)
        if self.json is not None:
            save(report, self.json)
        show(report)
        if self.page is not None:
            write_page(report, self.page)
        return report


@dataclass(frozen=True, kw_only=True)
class Loop(LoopPlan):
    """What recipes cost in ordinary training loops: several models, small batches too, eager and compiled.

    A vision transformer, a Swin transformer, an encoder and a decoder of text, and one call of attention by itself. The
    time of a step, the time of the host, the memory and the first step, each as a ratio to the same loop without any
    method. --minutes bounds how long it takes, and --cells says what is measured and in which order.
    """

    json: Path | None = None
    """Write the figures to this file, after every cell."""
    page: Path | None = None
    """Write an HTML page with charts to this file."""

    def run(self, words: Sequence[str] = ()) -> LoopReport:
        """Measure, show, write. words: what was typed, for the record."""
        from attemper.lab.bench.html_page import write_page
        from attemper.lab.bench.loop import bench_loop

        check_files(self.json, self.page, "loop")

        with progress_on("bench loop") as progress:
            report = bench_loop(self, command=command_line(words), progress=progress, after_cell=keeper(self.json))
        show(report)
        if self.page is not None:
            write_page(report, self.page)
        return report


def keeper(path: Path | None) -> Callable[[Report], None]:
    """What writes the figures so far into a file, if there is to be one."""

    def keep(report: Report) -> None:
        if path is not None:
            save(report, path)

    return keep


def command_line(words: Sequence[str]) -> str:
    """The words as one could type them again; of a path that leads out of here, only the last part is kept."""
    plain = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return shlex.join(["attemper", "bench", *plain]) if words else ""


def check_files(figures: Path | None, page: Path | None, benchmark: str) -> None:
    """Refuse files that cannot be written, or hold something else, before minutes are spent on what goes into them."""
    for path in (figures, page):
        if path is not None and path.is_dir():
            raise ParameterError(f"{path} is a folder; give the name of a file in it")
        folder = None if path is None else next(parent for parent in path.absolute().parents if parent.exists())
        if folder is not None and not folder.is_dir():
            raise ParameterError(f"{path} cannot be written: {folder} is not a folder")
    if figures is not None:
        what = f"figures of 'attemper bench {benchmark}'"
        refuse_foreign(figures, lambda data: read_object(data).get("benchmark") == benchmark, what)
    if page is not None:
        refuse_foreign(page, is_page, "a page of Attemper")
