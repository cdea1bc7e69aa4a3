"""`attemper study …` and `attemper report`: what there is to do with a study's folder."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attemper.errors import ParameterError
from attemper.files import atomic_write
from attemper.lab.cli.compare import carry_out, write_report
from attemper.lab.cli.executor_options import ExecutorOptions
from attemper.lab.cli.options import Accept, Costs, Data, Folder, Json, Studies, Writable
from attemper.lab.cli.printing import command_line, console, print_json, say

if TYPE_CHECKING:
    from attemper.lab.study.live import View
    from attemper.lab.study.study import Study

WATCH = 1.0
"""Seconds between two looks at a study that others work on."""


@dataclass(frozen=True)
class Status:
    """Say how far a study is, who works on it, and what failed.

    It only looks: it may be run while others work on the folder, and where the folder cannot be written.

    Examples
      attemper study status runs/digits-vit-digits
      attemper study status runs/digits-vit-digits --json
      attemper study status runs/digits-vit-digits --watch
    """

    folder: Folder
    watch: bool = False
    """Stay, and show how it goes on until nothing is missing: the view of 'compare', wherever the runs are done."""
    data: Data = None
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.study.live import make_view, status_table
        from attemper.lab.study.status import status_of
        from attemper.lab.study.study import Study

        study = Study(self.folder, root=self.data)
        if self.watch:
            watch(study, make_view(console(json=self.json)))
        status = status_of(study)
        if self.json:
            print_json(dataclasses.asdict(status))
        else:
            console().print(status_table(status))
        return 0


def watch(study: Study, view: View) -> None:
    """Show how a study goes on until nothing is missing, or Ctrl-C. It only looks."""
    from attemper.lab.study.status import status_of

    try:
        while study.missing():
            view.show(status_of(study))
            time.sleep(WATCH)
    except KeyboardInterrupt:
        pass  # whoever has seen enough has seen enough
    finally:
        view.close()


@dataclass(frozen=True)
class Resume:
    """Go on with the study in a folder, by the plan that it holds.

    The same as running the command again that began it; --probe-every and --track are remembered. Run it on several
    machines that share the folder, and they share the runs.

    Examples
      attemper study resume runs/digits-vit-digits
      attemper study resume runs/digits-vit-digits --executor ray --address 10.0.0.1:6379
    """

    folder: Folder
    data: Data = None
    execution: ExecutorOptions = field(default_factory=ExecutorOptions)
    no_costs: Costs = False
    accept_versions: Accept = False
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.study.study import Study

        plan = Study(self.folder, root=self.data).plan
        return carry_out(
            plan,
            self.folder,
            words=words,
            execution=self.execution,
            data=self.data,
            costs=not self.no_costs,
            change_plan=False,
            accept_versions=self.accept_versions,
            json=self.json,
        )


@dataclass(frozen=True)
class Export:
    """Write a study's table as CSV, Markdown or JSON, from the results that are there.

    Examples
      attemper study export runs/digits-vit-digits --format csv --out table.csv
      attemper study export runs/digits-vit-digits --format markdown
    """

    folder: Folder
    format: Literal["csv", "markdown", "json"] = "markdown"
    """Which."""
    out: Writable = None
    """The file to write; otherwise standard output."""
    data: Data = None

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.folders import folder_errors, refuse_foreign
        from attemper.lab.study.export import is_table, to_csv, to_markdown
        from attemper.lab.study.study import Study
        from attemper.lab.study.summary import summarise

        study = Study(self.folder, root=self.data)
        if self.out is not None:
            refuse_foreign(self.out, lambda data: is_table(data, self.format), f"a table of a study as {self.format}")
        summary = summarise(study)
        if self.format == "json":
            text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
        else:
            text = to_csv(summary) if self.format == "csv" else to_markdown(summary)
        if self.out is None:
            sys.stdout.write(text)
            return 0
        with folder_errors(self.out):
            atomic_write(self.out, text)
        return 0


@dataclass(frozen=True)
class Report:
    """Write the page of a study, or of several: one HTML file that needs nothing else.

    Of several studies it shows recipes × tasks: differences with intervals, mean rank, the probability of improvement
    over none with an interval over tasks, and cost.

    Examples
      attemper report runs/digits-vit-digits
      attemper report runs/digits-vit-digits --out page.html
      attemper report runs/digits runs/cifar10 docs/results/gtzan.html --out tasks.html
    """

    studies: Studies
    out: Writable = None
    """The file to write; otherwise report.html in the study's folder, or tasks.html here for several studies."""
    data: Data = None

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.folders import folder_errors, refuse_foreign
        from attemper.lab.report.many import render
        from attemper.lab.report.page import is_page
        from attemper.lab.study.many import overview
        from attemper.lab.study.summary_files import read_summary

        if not self.studies:
            raise ParameterError("report needs at least one study: its folder, its summary.json or its page.")
        path = self.out or (self.studies[0] / "report.html" if len(self.studies) == 1 else Path("tasks.html"))
        if len(self.studies) == 1 and self.out is None and self.studies[0].is_file():
            raise ParameterError(f"{self.studies[0]} is no folder: say with --out where the page goes.")
        if self.out is not None or len(self.studies) > 1:
            refuse_foreign(path, is_page, "a page of Attemper")
        summaries = [read_summary(study, self.data) for study in self.studies]
        if len(summaries) == 1:
            write_report(summaries[0], path)
        else:
            text = render(overview(summaries, [study.name for study in self.studies]), command_line(words))
            with folder_errors(path):
                atomic_write(path, text)
        say(console(), f"Report: {path}")
        return 0
