"""The copy of its plan that a study's folder holds, with a first line that says what it was when it was written.

The first line is a comment: the versions that the study's runs were done under, and a digest of the line itself and all
below it. A copy that was edited, or cut at the end of a line, is still a plan to YAML, but no longer the study's.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from attemper.errors import MissingFileError, UnreadableError
from attemper.files import atomic_write, read_bytes, read_json, read_json_object
from attemper.lab.errors import DamagedPlanError, StudyError, UnreadablePlanError
from attemper.lab.study.plan import Plan
from attemper.lab.study.planfile import dump_plan, load_plan
from attemper.lab.training.spec import HASHES, canonical
from attemper.lab.training.versions import BEFORE, Versions

FILE = "plan.yaml"
MARK = "# attemper study "
NAMES = (
    *("data.json", "settings.json", "cost.json", "summary.json", "summary.csv", "summary.md", "report.html"),
    *("runs", "work", "claims", "progress", "failures", "run.json", "checkpoint.pt"),
)
"""What else a study writes into its folder; at the end, how the folder of a run is known."""
DATA, FORMAT = "data.json", 1
"""The file beside it says, from this format on, that the plan must have its first line."""


@dataclass(frozen=True)
class HeldPlan:
    """What a folder holds."""

    plan: Plan
    versions: tuple[Versions, ...]
    """Under which its runs were done so far, first those of their keys; empty: the study has not begun."""
    text: str
    """The plan's text, without the first line."""


def read_held_plan(folder: Path) -> HeldPlan | None:
    """The plan that a folder holds; None where there is none. One that is not as it was written is refused."""
    path = folder / FILE
    try:
        whole = read_bytes(path).decode("utf-8")
    except MissingFileError:
        return None
    except UnreadableError as error:
        raise UnreadablePlanError(f"The plan of this study: {error}") from None
    except UnicodeDecodeError:
        raise DamagedPlanError(_complaint(path, "it is no text")) from None
    first, _, text = whole.partition("\n")
    if first.startswith(MARK):
        versions = _checked(path, first, text)
        return HeldPlan(load_plan(path), versions, text)
    if _format(folder) == FORMAT:
        raise DamagedPlanError(_complaint(path, "its first line is missing"))
    begun = _format(folder) is not None or any((folder / "runs").glob("*.json"))
    return HeldPlan(load_plan(path), (BEFORE,) if begun else (), whole)


def refuse_foreign(folder: Path) -> None:
    """Raise if a folder that holds no plan holds files which a study would write over."""
    there = [name for name in NAMES if (folder / name).exists()]
    if there and _format(folder) is None:
        raise StudyError(
            f"{folder} holds {', '.join(there)} of something else, and no study: it has no {FILE}. Choose another "
            "folder."
        )


def refuse_other_plan(folder: Path, plan: Plan, held: HeldPlan) -> None:
    """Raise if a plan would hide runs in this folder, or write over a plan of somebody's own."""
    if held.versions:
        _refuse_shorter(folder, plan, held.plan)
        return
    # Hashes are filled in when a study begins.
    budget = replace(plan.budget, **{name: getattr(held.plan.budget, name) for name in HASHES})
    if held.plan != replace(plan, budget=budget):
        raise StudyError(
            f"{folder / FILE} is another plan than this, and nothing of it was run. Choose another folder, or say with "
            "--change-plan that it may be changed."
        )


def _refuse_shorter(folder: Path, plan: Plan, held: Plan) -> None:
    """A longer plan may go on with a folder; one that leaves runs out would hide them."""
    there, here = held.runs(), set(plan.runs())
    left_out = [run for run in there if run not in here]
    if left_out:
        raise StudyError(
            f"{folder} holds the study of another plan: {len(left_out)} of its {len(there)} runs are not in this one, "
            f"such as {left_out[0].recipe} on {left_out[0].task} with seed {left_out[0].seed}. Choose another folder, "
            "or allow its plan to be changed; results in common are kept either way."
        )


def versions_in(folder: Path) -> tuple[Versions, ...]:
    """What is left of the versions of a study whose plan is damaged: by its first line, or by its results."""
    try:
        first = read_bytes(folder / FILE).partition(b"\n")[0].decode()
        return _versions(first)[0]
    except (UnreadableError, ValueError, KeyError, TypeError):
        pass
    for path in sorted((folder / "runs").glob("*.json")):
        try:
            spec = read_json(path)["spec"]
            return (Versions.from_dict(spec["versions"]) if "versions" in spec else BEFORE,)
        except (UnreadableError, ValueError, KeyError, TypeError):
            continue
    return ()


def write_held_plan(folder: Path, plan: Plan, versions: tuple[Versions, ...], held: HeldPlan | None) -> None:
    """Write a folder's copy, unless it is there as it should be. What people wrote into an equal plan stays."""
    text = held.text if held is not None and held.plan == plan and held.plan.keep == plan.keep else dump_plan(plan)
    header = {"versions": [each.to_dict() for each in versions]}
    first = MARK + canonical({**header, "sha256": _digest(versions, text)})
    whole = f"{first}\n{text}"
    path = folder / FILE
    if not path.exists() or read_bytes(path) != whole.encode():
        atomic_write(path, whole)


def _checked(path: Path, first: str, text: str) -> tuple[Versions, ...]:
    """The versions that the first line names, if the digest there fits."""
    try:
        versions, digest = _versions(first)
    except (ValueError, KeyError, TypeError):
        raise DamagedPlanError(_complaint(path, "its first line cannot be read")) from None
    if digest != _digest(versions, text):
        raise DamagedPlanError(_complaint(path, "its digest does not fit"))
    return versions


def _versions(first: str) -> tuple[tuple[Versions, ...], str]:
    if not first.startswith(MARK):
        raise ValueError("no first line of ours")
    header = json.loads(first.removeprefix(MARK))
    return tuple(map(Versions.from_dict, header["versions"])), str(header["sha256"])


def _digest(versions: tuple[Versions, ...], text: str) -> str:
    whole = canonical([each.to_dict() for each in versions]) + "\n" + text
    return hashlib.sha256(whole.encode()).hexdigest()


def _format(folder: Path) -> int | None:
    """The format of a study that was made ready here, 0 before there were formats; None: there is none."""
    try:
        data = read_json_object(folder / DATA)
        return int(data.get("format", 0)) if "fingerprint" in data else None
    except (UnreadableError, ValueError, TypeError):
        return None


def _complaint(path: Path, what: str) -> str:
    return (
        f"{path} was edited or cut after the study began: {what}. Put back what it was, or give the plan again with "
        f"'attemper compare PLAN --folder {path.parent} --change-plan'; results in common are kept."
    )
