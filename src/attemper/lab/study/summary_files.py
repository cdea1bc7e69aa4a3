"""Summaries of finished studies, read again: from a folder, from summary.json, or out of a page."""

import json
import re
from pathlib import Path
from typing import Any

from attemper.errors import AttemperError, MissingFileError, UnreadableError
from attemper.files import read_json_object, read_text
from attemper.lab.errors import StudyError
from attemper.lab.study.assessment import assess
from attemper.lab.study.export import how
from attemper.lab.study.study import Study
from attemper.lab.study.summary import summarise

Summary = dict[str, Any]
BLOCK = re.compile(r'<script type="application/json" id="summary">(.*?)</script>', re.DOTALL)
MOST_BYTES = 2**26
NEEDED = ("title", "metric", "plan", "recipes")
"""What a summary has had since the first page was written."""


def read_summary(path: Path, root: Path | None = None) -> Summary:
    """The summary behind a study's folder, a summary.json or a page, with today's verdict.

    root: where this machine keeps its data; needed where a folder does not know the data's fingerprint.
    """
    if not path.is_file():
        return summarise(Study(path, root=root), command=f"attemper study resume {path.name}")
    try:
        found = _in_page(path) if path.suffix == ".html" else read_json_object(path)
        return reassessed(found)
    except MissingFileError:
        raise StudyError(f"{path} is neither a study's folder, nor a summary.json, nor a page of a study.") from None
    except (UnreadableError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        if isinstance(error, AttemperError) and not isinstance(error, UnreadableError):
            raise
        raise StudyError(f"{path} holds no summary of a study: {error}") from None


def reassessed(summary: Summary) -> Summary:
    """The summary with all that follows from its numbers computed anew."""
    missing = [name for name in NEEDED if name not in summary]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    found = assess({**summary, "notes": list(summary.get("notes") or ())})
    return {**found, "reading": how(found)}


def _in_page(path: Path) -> Summary:
    block = BLOCK.search(read_text(path, most=MOST_BYTES))
    if block is None:
        raise ValueError("the page has no data of a study in it")
    found = json.loads(block[1])
    if not isinstance(found, dict):
        raise ValueError("its data are no summary")
    return found
