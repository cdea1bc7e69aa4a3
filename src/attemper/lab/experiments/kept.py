"""Finished runs of an experiment on disk, one small file each: a command that was stopped goes on where it was."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attemper.files import atomic_write, read_bytes
from attemper.lab.experiments.runs import ArmRun
from attemper.lab.folders import folder_errors, read_object


@dataclasses.dataclass(frozen=True)
class Kept:
    """The folder that finished runs lie in."""

    folder: Path
    fingerprint: str
    """Of the task's data."""

    def path(self, one: ArmRun) -> Path:
        """Named after arm, seed, and a hash of all settings: runs with other settings can lie beside it."""
        words = "-".join(re.findall(r"[a-z0-9.]+", one.arm.name.lower()))
        return self.folder / f"{words}-seed{one.seed}-{one.key(self.fingerprint)}.json"

    def working(self, one: ArmRun) -> Path:
        """Where a run has its checkpoints until it is finished."""
        return self.path(one).with_suffix("")

    def read(self, one: ArmRun) -> dict[str, Any] | None:
        """What was found, where the run is finished. A file that is damaged counts for nothing."""
        path = self.path(one)
        if not path.is_file():
            return None
        found = read_object(read_bytes(path))
        return dict(found) if found.get("key") == one.key(self.fingerprint) else None

    def write(self, one: ArmRun, found: dict[str, Any]) -> dict[str, Any]:
        """Keep what was found; the checkpoints are no longer needed."""
        whole = {"key": one.key(self.fingerprint), "arm": one.arm.name, "seed": one.seed, **found}
        with folder_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path(one), json.dumps(whole, indent=1, allow_nan=False) + "\n")
            shutil.rmtree(self.working(one), ignore_errors=True)
        return whole

    def seeds(self) -> Iterator[int]:
        """Of all files that are there, whatever their settings."""
        for path in sorted(self.folder.glob("*-seed*.json")):
            if match := re.search(r"-seed(\d{1,4})-[0-9a-f]+\.json$", path.name):
                yield int(match[1])
