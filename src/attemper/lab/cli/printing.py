"""What commands print: tables for people on a terminal, JSON for scripts."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console(*, json: bool = False, quiet: bool = False) -> Console:
    """Where people read: standard output, or standard error where standard output is for a script.

    quiet: nowhere, as in all processes but one of those that train together.
    """
    from rich.console import Console

    return Console(stderr=json, highlight=False, quiet=quiet)


def say(screen: Console, *lines: str) -> None:
    """Lines as they are, without markup, and without breaking what was meant as one."""
    from rich.text import Text

    for line in lines:
        screen.print(Text(line), soft_wrap=True)


def print_json(value: Any) -> None:
    """A value for scripts."""
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def command_line(words: Sequence[str]) -> str:
    """The words as one could type them again."""
    return shlex.join(["attemper", *words])


def show_summary(screen: Console, summary: dict[str, Any], report: Path | None) -> None:
    """The final table of a study, its verdict, and where the page is."""
    from attemper.lab.study.beside_table import beside_lines, beside_table
    from attemper.lab.study.evaluations import evaluation_table
    from attemper.lab.study.live import summary_table

    screen.print()
    for caution in summary.get("cautions", ()):
        say(screen, f"! {caution}")
    screen.print(summary_table(summary))
    if found := evaluation_table(summary):
        screen.print()
        screen.print(found)
    if beside := beside_table(summary):
        screen.print()
        screen.print(beside)
        say(screen, *beside_lines(summary))
    say(screen, "", summary["verdict"], *(f"note: {note}" for note in summary["notes"]))
    if report is not None:
        say(screen, "", f"Report: {report}")
