"""`attemper reproduce`: the published tables, ours beside them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from attemper.errors import ParameterError
from attemper.lab.cli.compare import carry_out
from attemper.lab.cli.executor_options import ExecutorOptions
from attemper.lab.cli.options import Accept, Data, Json, Number, Text, Writable
from attemper.lab.cli.printing import console, print_json, say


@dataclass(frozen=True)
class Reproduce:
    """Run a published table as a study, its figures beside ours; without a name, list the tables.

    The list says where each table stands, how many rows it has, which data its full scale needs that are not here, and
    what that would cost on one H200. --cells shows what was printed.

    Examples
      attemper reproduce
      attemper reproduce --paper broadcasting
      attemper reproduce explicit-cifar10 --scale smoke
      attemper reproduce explicit-cifar10 --cells
      attemper reproduce cb-cifar100 --scale small --task "cifar100(train=2000, test=500)" --epochs 3
      attemper reproduce explicit-cifar10 --scale full --print-plan > plan.yaml
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = None
    """Which table; otherwise they are listed."""
    scale: Literal["smoke", "small", "full"] = "smoke"
    """smoke: about a minute on a CPU, to see that it works; small: an hour on one GPU; full: as published."""
    paper: Text = None
    """List the tables of one paper, by a part of its name."""
    cells: bool = False
    """Show the published cells and the settings, and run nothing."""
    task: Text = None
    """Run on this instead, such as a part of the data: "cifar100(train=2000, test=500)"."""
    model: Text = None
    """Run with this model instead."""
    seeds: Number = None
    """How many seeds; otherwise as the scale has it."""
    epochs: Number = None
    """Epochs of every run; otherwise as the scale has it."""
    folder: Writable = None
    """Where results are kept; otherwise runs/ and the names of table and scale."""
    print_plan: bool = False
    """Print the plan, and do nothing."""
    data: Data = None
    execution: ExecutorOptions = field(default_factory=ExecutorOptions)
    accept_versions: Accept = False
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.cli.reproduce_listing import listed, show_cells, show_tables
        from attemper.lab.study.plan import Plan
        from attemper.lab.study.planfile import dump_plan
        from attemper.lab.study.published import find_table, tables_of

        if self.name is None:
            found = tables_of(self.paper)
            if self.json:
                print_json([listed(table, self.data) for table in found])
            else:
                show_tables(console(), found, self.data)
            return 0
        if self.paper is not None:
            raise ParameterError("--paper filters the list; leave it out, or the name of the table.")
        table, screen = find_table(self.name), console(json=self.json)
        if self.cells or not table.can_run:
            show_cells(screen, table, self.scale)
            if self.cells:
                return 0
        plan = Plan.from_dict(self._changed(table.plan(self.scale)))
        if self.print_plan:
            sys.stdout.write(dump_plan(plan))
            return 0
        say(screen, table.title, f"Source: {table.source}", *(f"- {caveat}" for caveat in table.caveats), "")
        return carry_out(
            plan,
            self.folder or Path("runs") / f"{table.key}-{self.scale}",
            words=words,
            execution=self.execution,
            data=self.data,
            costs=self.scale != "smoke",  # they would take longer than the runs
            change_plan=False,
            accept_versions=self.accept_versions,
            json=self.json,
        )

    def _changed(self, plan: dict[str, object]) -> dict[str, object]:
        """The table's plan with what the command line says in its place, its settings noted anew."""
        from attemper.lab.study.reference import with_changes

        changes = {"task": self.task, "model": self.model, "seeds": self.seeds, "epochs": self.epochs}
        return with_changes(plan, {name: value for name, value in changes.items() if value is not None})
