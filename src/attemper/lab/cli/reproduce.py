"""`attemper reproduce`: the published tables, ours beside them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from attemper.lab.cli.compare import carry_out
from attemper.lab.cli.executor_options import Where
from attemper.lab.cli.options import Accept, Data, Json, Writable
from attemper.lab.cli.printing import console, say


@dataclass(frozen=True)
class Reproduce:
    """Run a published table as a study, its figures beside ours; without a name, list the tables.

    Examples
      attemper reproduce
      attemper reproduce explicit-cifar10 --scale smoke
      attemper reproduce explicit-cifar10 --scale full --print-plan > plan.yaml
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = None
    """Which table; otherwise they are listed."""
    scale: Literal["smoke", "small", "full"] = "smoke"
    """smoke: about a minute on a CPU, to see that it works; small: an hour on one GPU; full: as published."""
    folder: Writable = None
    """Where results are kept; otherwise runs/ and the names of table and scale."""
    print_plan: bool = False
    """Print the plan, and do nothing."""
    data: Data = None
    where: Where = field(default_factory=Where)
    accept_versions: Accept = False
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.study.plan import Plan
        from attemper.lab.study.planfile import dump_plan
        from attemper.lab.study.published import find_table

        if self.name is None:
            _list()
            return 0
        table = find_table(self.name)
        plan = Plan.from_dict(table.plan(self.scale))
        if self.print_plan:
            sys.stdout.write(dump_plan(plan))
            return 0
        say(
            console(json=self.json),
            table.title,
            f"Source: {table.source}",
            *(f"- {caveat}" for caveat in table.caveats),
            "",
        )
        return carry_out(
            plan,
            self.folder or Path("runs") / f"{table.key}-{self.scale}",
            words=words,
            where=self.where,
            data=self.data,
            costs=self.scale != "smoke",  # they would take longer than the runs
            change_plan=False,
            accept_versions=self.accept_versions,
            json=self.json,
        )


def _list() -> None:
    from rich.table import Table as Grid

    from attemper.lab.study.published import SCALES, catalogue

    where = console()
    tables = Grid(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "table", "rows", "source"):
        tables.add_column(title, no_wrap=title == "name", overflow="fold")
    for table in catalogue():
        tables.add_row(table.key, table.title, str(len(table.rows)), table.source)
    where.print(tables)
    say(where, "", *(f"--scale {name}: {line}" for name, line in SCALES.items()))
