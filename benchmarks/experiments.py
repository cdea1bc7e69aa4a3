"""Writes what published experiments found again, from what was kept of their runs; nothing is trained.

    python benchmarks/experiments.py

Tables and charts beside every file, and the tables of the pages between their markers; a test fails where they differ.
A marker names a file beside the page and the parts of it: <!-- experiment: skips.json arms, branches --> …
<!-- /experiment -->. Where the runs themselves are kept, they are put together anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from attemper.lab.cli.experiment import write
from attemper.lab.experiments.again import put_together
from attemper.lab.experiments.tables import sections

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
NAMES = ("skips", "graying", "gradient-variance")
FILES = [RESULTS / f"{name}.json" for name in NAMES] + [RESULTS / f"cifar10-{name}" / f"{name}.json" for name in NAMES]
PAGES = sorted({path.parent / "README.md" for path in FILES})
MARKED = re.compile(r"(<!-- experiment: (\S+) ([\w, -]+) -->\n).*?(<!-- /experiment -->)", re.DOTALL)


def found_in(path: Path) -> dict[str, Any]:
    """What an experiment found: of its runs, where they are kept, and otherwise as its file has it."""
    runs = path.parent / f"{path.stem}-runs"
    found: dict[str, Any] = put_together(path.parent) if runs.is_dir() else json.loads(path.read_text(encoding="utf-8"))
    return found


def fill(page: str, folder: Path) -> str:
    """The page with the tables of the files of its folder between its markers."""

    def tables(match: re.Match[str]) -> str:
        start, name, wanted, end = match.groups()
        parts = sections(found_in(folder / name))
        shown = "\n\n".join(parts[part.strip()] for part in wanted.split(","))
        return f"{start}\n{shown}\n\n{end}"

    return MARKED.sub(tables, page)


if __name__ == "__main__":
    for path in FILES:
        write(found_in(path), path.parent)
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), page.parent), encoding="utf-8")
