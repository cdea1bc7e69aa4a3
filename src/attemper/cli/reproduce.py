"""`attemper reproduce`: the published tables, ours beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from attemper.cli.compare import carry_out
from attemper.cli.options import Data, Json, Workers, Writable
from attemper.cli.show import console, say
from attemper.study import Plan, dump_plan

__all__ = ["Reproduce"]


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
    workers: Workers = None
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.study import published

        raise NotImplementedError(published, carry_out, console, say, Plan, dump_plan)
