"""A study's folder: one file per result, written atomically, and what belongs to runs that are not finished.

plan.yaml           the plan, every default written out; its first line has the study's versions, and a digest
data.json           the task's name and the fingerprint of its data
settings.json       how runs are watched, where that is not left to the defaults
runs/<key>.json     one result
work/<key>/         the checkpoints of a run that is not finished
weights/<key>/      the weights of a finished run that are kept, as in the folder of 'attemper train'
claims/<key>.<n>    who works on it
progress/<key>.json how far it is, for people to look at
failures/<key>.<n>.json   one attempt that went wrong
cost.json           what each recipe's training step costs
"""

import contextlib
import json
import math
import re
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from attemper.errors import AttemperError, MissingFileError, UnreadableError
from attemper.files import WEIGHTS, atomic_write, parse_json, read_bytes, read_json_object, remove_parts, set_aside
from attemper.lab.errors import UnreadableFolderError
from attemper.lab.folders import folder_errors
from attemper.lab.study.owners import identity
from attemper.lab.study.result_shape import misshapen
from attemper.lab.training.digests import DIGEST, digest_fits, with_digest
from attemper.lab.training.spec import FORMAT, RunSpec
from attemper.lab.training.versions import versions_of

Result = dict[str, Any]
PARTS_AFTER = 3600.0
"""Seconds after which a part of a file is no longer being written, even where machines disagree about the time."""
FAILURE = re.compile(r"(\w+)\.(\d+)\.json")


class Store:
    """Reads and writes the files of one study. Nothing here knows of plans or of training.

    digests: whether every result has a digest; those of studies that were begun before there were any have none.
    """

    def __init__(self, folder: Path, *, digests: bool = True) -> None:
        self.folder, self._digests = folder, digests
        self._read: dict[str, tuple[tuple[int, int, int], Result | str]] = {}
        """By key: which file it was, and what it held, or what is wrong with it."""

    def path(self, key: str) -> Path:
        """The file of a run's result."""
        return self.folder / "runs" / f"{key}.json"

    def work(self, key: str) -> Path:
        """The folder for a run's checkpoints."""
        return self.folder / "work" / key

    def result(self, key: str) -> Result | None:
        """A run's result; None if there is none, or none that can be used (see `corrupt`)."""
        path = self.path(key)
        try:
            stat = path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if key not in self._read or self._read[key][0] != stamp:
                self._read[key] = stamp, self._parse(read_bytes(path), key)
        except (FileNotFoundError, MissingFileError):
            self._read.pop(key, None)
            return None
        except OSError as error:
            # A result that is there and cannot be read is no reason to do the run again.
            raise UnreadableFolderError(f"{path} cannot be read: {error.strerror or error}.") from error
        except UnreadableError as error:
            raise UnreadableFolderError(str(error)) from error
        found = self._read[key][1]
        return None if isinstance(found, str) else found

    def _parse(self, data: bytes, key: str) -> Result | str:
        try:
            result = parse_json(data, key, finite=True)
        except UnreadableError:
            return "it is no JSON, or only a part of it is there"
        return problem_with(result, key, digests=self._digests) or result

    def corrupt(self, key: str) -> str | None:
        """What is wrong with the file of a run that holds no result of it; None where nothing is, or no file."""
        self.result(key)
        found = self._read[key][1] if key in self._read else None
        return found if isinstance(found, str) else None

    def set_aside(self, key: str) -> Path:
        """Rename a corrupt result, so that its run can be done again and somebody can look at the file."""
        self._read.pop(key, None)
        with folder_errors(self.path(key)):
            return set_aside(self.path(key), "corrupt")

    def save(self, key: str, result: Result) -> None:
        """Put a result on disk, and only then forget what the run needed while it ran."""
        result = with_digest(result)
        text = json.dumps(result, sort_keys=True, indent=1, allow_nan=False) + "\n"
        problem = problem_with(result, key)
        if problem:
            raise ValueError(f"the run returned no result: {problem}")
        with folder_errors(self.path(key)):
            atomic_write(self.path(key), text)
        self.forget(key)

    def weights(self, key: str) -> Path:
        """The folder for the weights of a finished run."""
        return self.folder / "weights" / key

    def keep_weights(self, key: str) -> None:
        """Put the weights of a run aside, before what it needed while it ran is forgotten."""
        made = self.work(key) / WEIGHTS
        if made.is_file():
            with folder_errors(self.weights(key)):
                self.weights(key).mkdir(parents=True, exist_ok=True)
                made.replace(self.weights(key) / WEIGHTS)

    def kept(self) -> set[str]:
        """The runs whose weights are there."""
        return {path.name for path in self._files("weights") if (path / WEIGHTS).is_file()}

    def drop_weights(self, key: str) -> None:
        """Remove the weights of a run, and what was made of them."""
        shutil.rmtree(self.weights(key), ignore_errors=True)

    def forget(self, key: str) -> None:
        """Remove the checkpoints, the progress and the failures of a run that has its result."""
        shutil.rmtree(self.work(key), ignore_errors=True)
        self.clear_failures(key)
        with contextlib.suppress(OSError):
            self._progress(key).unlink(missing_ok=True)

    # Progress: for people to look at, so it may get lost.

    def _progress(self, key: str) -> Path:
        return self.folder / "progress" / f"{key}.json"

    def write_progress(self, key: str, event: dict[str, Any]) -> None:
        """Write down how far a run is. A disk that is full is noticed where it matters, not here."""
        with contextlib.suppress(OSError, ValueError):
            atomic_write(self._progress(key), json.dumps({**event, "at": time.time()}), durable=False)

    def read_progress(self, key: str) -> dict[str, Any]:
        """The last event of a run."""
        try:
            return read_json_object(self._progress(key))
        except UnreadableError:
            return {}

    # Failures: each attempt that went wrong leaves one file.

    def failures(self, key: str) -> list[dict[str, Any]]:
        """The attempts at a run that went wrong, in order."""
        found = []
        for path in self._failure_files(key):
            try:
                found.append({"error": "no reason is given", "traceback": "", **read_json_object(path)})
            except UnreadableError as error:
                found.append({"error": str(error), "traceback": ""})
        return found

    def _failure_files(self, key: str) -> list[Path]:
        """In order. There may be gaps: whoever clears them can be killed on the way."""
        found = [
            path for path in self._files("failures") if FAILURE.fullmatch(path.name) and path.name.startswith(f"{key}.")
        ]
        return sorted(found, key=_number_of)

    def attempts(self) -> Counter[str]:
        """How many attempts at each run went wrong."""
        found = (FAILURE.fullmatch(path.name) for path in self._files("failures"))
        return Counter(match[1] for match in found if match)

    def add_failure(self, key: str, error: str, traceback: str = "") -> None:
        """Note an attempt that went wrong; only the owner of the run's claim does."""
        owner = identity()
        note = {"key": key, "error": error, "traceback": traceback, "host": owner["host"], "pid": owner["pid"]}
        number = max(map(_number_of, self._failure_files(key)), default=0) + 1
        path = self.folder / "failures" / f"{key}.{number}.json"
        with folder_errors(path):
            atomic_write(path, json.dumps({**note, "at": time.time()}, indent=1))

    def clear_failures(self, key: str) -> None:
        """Give a run its attempts back."""
        for path in self._failure_files(key):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def has_begun(self) -> bool:
        """Whether there is anything of a run: a result, or work on one."""
        return any(self._files(name) for name in ("runs", "work", "claims"))

    def leftovers(self) -> set[str]:
        """The runs of which something lies in the folder that a finished run no longer needs."""
        return {path.name.partition(".")[0] for name in ("work", "progress", "claims") for path in self._files(name)}

    def sweep_parts(self, older_than: float = PARTS_AFTER) -> None:
        """Remove parts of files that were being written when their process was killed."""
        remove_parts(self.folder, "*/.*.part", older_than=older_than)

    def _files(self, name: str) -> list[Path]:
        try:
            return list((self.folder / name).iterdir())
        except OSError:
            return []


def _number_of(failure: Path) -> int:
    match = FAILURE.fullmatch(failure.name)
    return int(match[2]) if match else 0


def problem_with(result: Any, key: str, *, digests: bool = True) -> str | None:
    """What is wrong with a result of the run `key`, in words; None if nothing is. digests: whether it must have one."""
    if not isinstance(result, dict):
        return "it is no JSON object"
    if (digests or DIGEST in result) and not digest_fits(result):
        return "its digest does not fit: it was edited, or a part of it is missing"
    if result.get("format") != FORMAT:
        return f"its format is {result.get('format')!r}, not {FORMAT}"
    if result.get("status") not in ("finished", "diverged"):
        return f"its status is {result.get('status')!r}"
    try:
        if result["key"] != key or RunSpec.from_dict(result["spec"]).key(result["fingerprint"]) != key:
            return "it belongs to another run"
        values = [result[part][result["metric"]] for part in ("train", "validation", "test")]
        versions_of(result)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, AttemperError) as error:
        return f"a part of it is missing or wrong ({error!r})"
    if not all(value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in values):
        return "its metrics are no numbers"
    if _has_old_corruptions(result.get("evaluation")):
        return "it was evaluated by an earlier version, whose corruptions are not the published ones"
    return misshapen(result) if isinstance(result.get("curve"), list) else "it has no curve"


def _has_old_corruptions(evaluation: Any) -> bool:
    """Whether images were corrupted before the published constants were used, which are named since."""
    if not isinstance(evaluation, dict) or "corruption_constants" in evaluation:
        return False
    found = evaluation.get("robustness")
    return isinstance(found, dict) and bool(found.get("corruptions"))
