"""Studies whose runs cost nothing, done in this process or by workers, and what they leave behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from attemper.lab.study.study import Study
from attemper.lab.training.digests import digest_fits
from study_fakes import FakeEngine, make_plan


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def results_without_timings(folder: Path) -> dict[str, str]:
    """The text of every result, in the bytes in which it lies there, without what may differ."""
    texts = {}
    for path in (folder / "runs").iterdir():
        result = json.loads(path.read_text())
        assert path.read_text() == json.dumps(result, sort_keys=True, indent=1) + "\n"
        assert digest_fits(result)
        for name in ("timing", "digest"):
            result.pop(name)
        texts[path.name] = json.dumps(result, sort_keys=True)
    return texts


def worked(folder: Path, plan: Any = None, **options: Any) -> Study:
    study = Study(folder, plan or make_plan(), engine=options.pop("engine", FakeEngine()), **options)
    study.prepare()
    study.work()
    return study


def start_worker(study: Study) -> int:
    pid = os.fork()  # faster than a new interpreter; the fake runs do not touch torch
    if pid:
        return pid
    try:
        study.work(log=lambda text: None)
    finally:
        os._exit(0)


class Recorder:
    """A view that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.closed = False

    def note(self, text: str) -> None:
        self.notes.append(text)

    def show(self, status: Any) -> None: ...

    def close(self) -> None:
        self.closed = True
