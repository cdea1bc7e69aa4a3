"""`attemper compare`: from a plan, or from a few words, to a table and a page."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from attemper.lab.cli.executor_options import Where
from attemper.lab.cli.options import (
    Accept,
    Change,
    Costs,
    Data,
    Json,
    Keep,
    Number,
    Numbers,
    Parallel,
    Suites,
    Text,
    Texts,
    Trackers,
    Writable,
)
from attemper.lab.cli.printing import command_line, console, print_json, say, show_summary
from attemper.lab.errors import FolderError

if TYPE_CHECKING:
    from attemper.lab.study.plan import Plan
    from attemper.lab.study.settings import Settings
    from attemper.lab.study.summary import Summary

File = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PLAN]", help_behavior_hint="")]


@dataclass(frozen=True)
class Compare:
    """Compare recipes on one task: accuracy over seeds, whether differences are real, and what each recipe costs.

    Without anything it compares eight recipes on handwritten digits, in about three minutes on two cores. A plan is a
    small YAML or JSON file; options on the command line go before what the plan says. Every recipe gets the same data,
    the same initial weights and the same batches under one seed. Epochs and configurations are chosen on validation;
    the test set is read once per run, at its end.

    Stopped or killed, it goes on where it was when the same command is run again; several machines may share a folder.

    Examples
      attemper compare
      attemper compare --recipes "dropkey(0.1)" "dropkey(0.1, schedule=decreasing)" cb --seeds 3
      attemper compare --task cifar10 --model vit-cifar --epochs 40 --data /path/to/data
      attemper compare plan.yaml --folder runs/mine --workers 4 --track tensorboard
      attemper compare plan.yaml --executor ray --per-run "cpus=4,gpus=0.5"
      attemper compare --evaluate robustness,calibration
      torchrun --nproc-per-node 4 -m attemper compare plan.yaml
    """

    plan: File = None
    """A plan file; otherwise the embedded comparison on digits, changed by the options."""
    folder: Writable = None
    """Where results are kept; otherwise runs/ and the names of task and model."""
    task: Text = None
    """Such as digits, cifar10, cifar100, folder:PATH, audio:PATH, wds:PATH, hf:NAME, timm:NAME."""
    model: Text = None
    """Such as vit-cifar, vit-small, timm:vit_tiny_patch16_224, hf:vit."""
    recipes: Texts = ()
    """Recipes to compare, each in quotes; 'none' is always among them."""
    seeds: Number = None
    """How many seeds."""
    epochs: Number = None
    """Epochs of every run."""
    batch_size: Number = None
    """Images per step."""
    lr: Numbers = ()
    """Learning rates; of several, each recipe gets the one that is best on validation."""
    augment: Text = None
    """Augmentations joined by '+', such as crop-flip+mixup(0.8)."""
    probe_every: Number = None
    """Look at attention every so many steps, and show its entropy over training; results stay the same."""
    evaluate: Suites = ""
    keep: Keep = None
    track: Trackers = ()
    data: Data = None
    where: Where = field(default_factory=Where)
    no_costs: Costs = False
    change_plan: Change = False
    accept_versions: Accept = False
    parallel: Parallel = None
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.study.settings import Settings

        settings = Settings(self.probe_every, self.track)
        plan = self.changed(given_plan(self.plan))
        return carry_out(
            plan,
            self.folder or folder_of(plan),
            words=words,
            where=self.where,
            data=self.data,
            costs=not self.no_costs,
            change_plan=self.change_plan,
            accept_versions=self.accept_versions,
            json=self.json,
            settings=settings,
            parallel=self.parallel,
        )

    def changed(self, given: Mapping[str, Any]) -> Plan:
        """A plan with what the command line says in the place of what it said."""
        from attemper.lab.evaluation.suites import split_suites
        from attemper.lab.study.plan import Plan

        said: dict[str, Any] = {"task": self.task, "model": self.model, "recipes": list(self.recipes)}
        said |= {"seeds": self.seeds, "lr": list(self.lr), "evaluate": split_suites(self.evaluate)}
        said["keep"] = self.keep
        said = {name: value for name, value in said.items() if value not in (None, [])}
        budget = {"epochs": self.epochs, "batch_size": self.batch_size, "augment": self.augment}
        budget = {name: value for name, value in budget.items() if value is not None}
        whole = {**given, **said, "budget": {**given.get("budget", {}), **budget}}
        if self.plan is None and (said or budget):
            whole.pop("title", None)
        if self.lr:
            whole["budget"].pop("lr", None)
        if self.recipes:  # published figures belong to rows of the plan's own
            whole.pop("published", None)
        return Plan.from_dict(whole)


def given_plan(file: Path | None) -> dict[str, Any]:
    """What a plan file says, or the embedded comparison where there is none."""
    from attemper.lab.study.comparison import DEFAULT_PLAN
    from attemper.lab.study.planfile import load_plan

    return dict(DEFAULT_PLAN) if file is None else load_plan(file, pipes=True).to_dict()


def folder_of(plan: Plan) -> Path:
    """runs/<task>-<model>, in characters that every file system takes; runs that are evaluated are other runs."""
    name = f"{plan.task}-{plan.model}{'-evaluated' if plan.evaluate else ''}"
    words = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")
    return Path("runs") / (words[:80] or "study")


def carry_out(
    plan: Plan,
    folder: Path,
    *,
    words: Sequence[str],
    where: Where,
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

    told: list[int] = []
    with (
        ending_as(told),
        joined(parallel) as ranks,
        (interrupted_by if ranks.alone else noting)(signal.SIGTERM, into=told),
    ):
        screen = console(json=json, quiet=not ranks.main)
        summary = compare(
            plan,
            folder,
            executor=where.make(),
            root=data,
            view=make_view(screen),
            costs=costs,
            change_plan=change_plan,
            command=command_line(words),
            settings=settings,
            attempts=where.attempts,
            accept_versions=accept_versions,
            stop=lambda: bool(told),
        )
        if ranks.main:
            report = write_report(summary, folder / "report.html")
            show_summary(screen, summary, report)
            if (folder / "weights").is_dir():
                say(screen, f"Weights: {folder / 'weights'}; try 'attemper predict {folder} --images FOLDER'")
            if json:
                print_json(summary)
    return 0 if summary["complete"] else 1


def write_report(summary: Summary, path: Path) -> Path:
    """The page of a summary, whole or not at all."""
    from attemper.files import atomic_write
    from attemper.lab.report.study import render

    try:
        atomic_write(path, render(summary))
    except OSError as error:
        raise FolderError(f"The report {path} cannot be written: {error.strerror or error}.") from None
    return path
