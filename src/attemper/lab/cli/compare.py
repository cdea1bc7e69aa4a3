"""`attemper compare`: from a plan, or from a few words, to a table and a page."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attemper.lab.cli.executor_options import ExecutorOptions
from attemper.lab.cli.options import (
    Accept,
    Change,
    Costs,
    Json,
    Keep,
    Number,
    Numbers,
    Parallel,
    Points,
    Real,
    Suites,
    Text,
    Trackers,
    Until,
    Writable,
)
from attemper.lab.cli.plan_options import PlanOptions
from attemper.lab.cli.printing import command_line, console, print_json, say, show_summary
from attemper.lab.folders import study_folder

if TYPE_CHECKING:
    from attemper.lab.study.plan import Plan
    from attemper.lab.study.settings import Settings
    from attemper.lab.study.summary import Summary


@dataclass(frozen=True)
class Compare(PlanOptions):
    """Compare recipes on one task: accuracy over seeds, whether differences are real, and what each recipe costs.

    Without anything it compares eight recipes on handwritten digits, in about three minutes on two cores. For other
    tasks, image size, optimiser, length and augmentation follow from the model, the number of samples and whether
    weights are fine-tuned; what was chosen is printed, and options change it. A plan is a small YAML or JSON file;
    options on the command line go before what the plan says. Every recipe gets the same data, the same initial weights
    and the same batches under one seed. Epochs and configurations are chosen on validation; the test set is read once
    per run, at its end.

    Stopped or killed, it goes on where it was when the same command is run again; several machines may share a folder.

    Examples
      attemper compare
      attemper compare --recipes "dropkey(0.1)" "dropkey(0.1, schedule=decreasing)" cb --seeds 3
      attemper compare --task cifar10 --model vit-cifar --epochs 40 --data /path/to/data
      attemper compare --task folder:photos --model "timm:vit_tiny_patch16_224(pretrained=true)" --seeds 3
      attemper compare --task my_data:flowers --model my_models:small --recipes "dropkey(0.1)" cb
      attemper compare plan.yaml --folder runs/mine --workers 4 --track tensorboard
      attemper compare plan.yaml --executor ray --per-run "cpus=4,gpus=0.5"
      attemper compare --evaluate robustness,calibration
      attemper compare --until decided --max-seeds 40
      torchrun --nproc-per-node 4 -m attemper compare plan.yaml
    """

    folder: Writable = None
    """Where results are kept; otherwise runs/ and the names of task and model."""
    init: Text = None
    """Weights to fine-tune: a .safetensors or .pt file, or the folder of a finished run."""
    keep_head: bool = False
    """Fine-tune the last layer of those weights too, where it has as many classes; otherwise it is made anew."""
    freeze: Text = None
    """What is not trained: none, stem (all before the first block) or backbone (all but the last layer)."""
    layer_decay: Real = None
    """The learning rate of a block is that of the block behind it times this."""
    size: Number = None
    """Side of images in pixels; otherwise what the model was made for."""
    optimizer: Text = None
    """adam or adamw."""
    warmup_epochs: Real = None
    """Epochs over which the learning rate rises; otherwise at most a fifth of all."""
    validation: Real = None
    """Share of the training set that is held out to choose epochs and configurations."""
    lr: Numbers = ()
    """Learning rates; of several, each recipe gets the one that is best on validation."""
    probe_every: Number = None
    """Look at attention every so many steps, and show its entropy over training; results stay the same."""
    evaluate: Suites = ""
    keep: Keep = None
    margin: Points = None
    until: Until = None
    max_seeds: Number = None
    """With --until decided: no recipe gets more; otherwise 40."""
    track: Trackers = ()
    execution: ExecutorOptions = field(default_factory=ExecutorOptions)
    no_costs: Costs = False
    change_plan: Change = False
    accept_versions: Accept = False
    parallel: Parallel = None
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.study.settings import Settings

        settings = Settings(self.probe_every, self.track)
        plan = self.planned()
        return carry_out(
            plan,
            self.folder or folder_of(plan),
            words=words,
            execution=self.execution,
            data=self.data,
            costs=not self.no_costs,
            change_plan=self.change_plan,
            accept_versions=self.accept_versions,
            json=self.json,
            settings=settings,
            parallel=self.parallel,
        )

    def _merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        from attemper.lab.call_syntax import parse_call, render_call

        merged = super()._merged(given)
        if self.size is not None:
            name, options = parse_call(str(merged.get("task", "digits")))
            merged["task"] = render_call(name, {**options, "size": self.size})
        return merged


def folder_of(plan: Plan) -> Path:
    """Where a plan's results go unless somebody says."""
    return study_folder(plan.task, plan.model, evaluated=bool(plan.evaluate))


def carry_out(
    plan: Plan,
    folder: Path,
    *,
    words: Sequence[str],
    execution: ExecutorOptions,
    data: Path | None,
    costs: bool,
    change_plan: bool,
    accept_versions: bool,
    json: bool,
    settings: Settings | None = None,
    parallel: Literal["ddp", "fsdp"] | None = None,
) -> int:
    """Run a plan with a view on the terminal, then show the table and write the page; 1 if runs are missing.

    settings: how runs are watched; none: as the folder remembers it.
    parallel: under a launcher, how its processes share a run.
    """
    from attemper.lab.study.comparison import compare
    from attemper.lab.study.live import make_view
    from attemper.lab.training.leaving import ending_as, interrupted_by, noting
    from attemper.lab.training.ranks import joined

    signals: list[int] = []
    with (
        ending_as(signals),
        joined(parallel) as ranks,
        (interrupted_by if ranks.alone else noting)(signal.SIGTERM, into=signals),
    ):
        screen = console(json=json, quiet=not ranks.main)
        summary = compare(
            plan,
            folder,
            executor=execution.make(),
            root=data,
            view=make_view(screen),
            costs=costs,
            change_plan=change_plan,
            command=command_line(words),
            settings=settings,
            attempts=execution.attempts,
            accept_versions=accept_versions,
            stop=lambda: bool(signals),
        )
        if ranks.main:
            report = write_report(summary, folder / "report.html")
            show_summary(screen, summary, report)
            if (folder / "weights").is_dir():
                say(screen, f"Weights: {folder / 'weights'}; try '{_next_command(folder)}'")
            if json:
                print_json(summary)
    return 0 if summary["complete"] else 1


def _next_command(folder: Path) -> str:
    """What somebody may do with the weights of a study: only classifiers of images predict."""
    from attemper.errors import UnreadableError
    from attemper.files import read_notes, weights_in

    try:
        predicts = any("inputs" in read_notes(weights_in(each)) for each in sorted((folder / "weights").iterdir())[:1])
    except UnreadableError:
        predicts = False
    return f"attemper predict {folder} --images FOLDER" if predicts else f"attemper evaluate {folder}"


def write_report(summary: Summary, path: Path) -> Path:
    """The page of a summary, whole or not at all."""
    from attemper.lab.from_python import write_page

    return write_page(summary, path)
