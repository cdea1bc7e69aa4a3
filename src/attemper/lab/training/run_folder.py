"""The folder of a run: whose it is. A folder that holds another run, or weights of somebody else, is left alone."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attemper.errors import AttemperError, MissingFileError, UnreadableError
from attemper.files import WEIGHTS, atomic_write, read_bytes, read_json, read_notes
from attemper.lab.errors import OtherRunError, StorageError, VersionsError
from attemper.lab.training.spec import PLACES, RunSpec
from attemper.lab.training.versions import Versions, listed, versions_here, versions_of

RUN, RESULT, STUDY = "run.json", "result.json", "plan.yaml"
SHOWN = 4
"""So many differences between two runs are named."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """Which run a file belongs to."""

    spec: RunSpec
    fingerprint: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Owner":
        """As `to_dict` wrote it; what cannot be read is a ValueError."""
        try:
            return cls(RunSpec.from_dict(given["spec"]), str(given["fingerprint"]))
        except (KeyError, TypeError, AttributeError, AttemperError) as error:
            raise ValueError("it does not say which run it belongs to") from error

    def to_dict(self) -> dict[str, Any]:
        return {"spec": self.spec.to_dict(), "fingerprint": self.fingerprint}

    def check_same(self, other: "Owner", folder: Path) -> None:
        """Raise unless it is the same run; versions do not count. other: whose the folder is."""
        if differences := list(_differences(other, self)):
            more = f" and {len(differences) - SHOWN} more differences" if len(differences) > SHOWN else ""
            raise OtherRunError(
                f"'{folder}' holds another run, which was left as it is: {', '.join(differences[:SHOWN])}{more}. "
                "Choose another folder, or remove this one."
            )


def take_folder(folder: Path, spec: RunSpec, fingerprint: str, *, accept_versions: bool = False) -> RunSpec:
    """Raise unless a folder is free for a run, or its own. Gives the run as it was begun there; writes nothing.

    accept_versions: go on with what was made under other versions.
    """
    own, began = Owner(spec, fingerprint), None
    if (folder / STUDY).exists():
        raise OtherRunError(f"'{folder}' holds a study, and a run needs a folder of its own. Choose another one.")
    for name, read in ((RUN, _read_json), (WEIGHTS, _read_notes), (RESULT, _read_json)):
        try:
            found = read(folder / name)
            owner = None if found is None else Owner.of(found)
        except (UnreadableError, ValueError) as error:
            if isinstance(error, UnreadableError) and (name == RUN or began is not None):
                continue  # a damaged file of this very run: it is made again
            raise OtherRunError(
                f"'{folder / name}' is there already and is of no run that could go on: {str(error).rstrip('.')}. "
                "Choose another folder, or remove this file."
            ) from None
        if owner is not None:
            own.check_same(owner, folder)
            began = began or owner.spec
        if name == RESULT and found is not None:
            check_versions(versions_of(found), folder / name, accept_versions)
    return spec if began is None else dataclasses.replace(spec, versions=began.versions)


def mark_folder(folder: Path, owner: Owner) -> None:
    """Write down whose folder it is, before there is a checkpoint."""
    text = json.dumps(owner.to_dict(), indent=1) + "\n"
    path = folder / RUN
    try:
        if not path.exists() or read_bytes(path) != text.encode():
            atomic_write(path, text, durable=False)
    except (OSError, UnreadableError) as error:
        raise StorageError(f"'{path}' could not be written: {error}.") from error


def check_versions(made_under: Sequence[Versions], path: Path, accept: bool) -> None:
    """Raise if something was made under other versions than those here, unless that is accepted."""
    here = versions_here()
    if not accept and set(made_under) != {here}:
        raise VersionsError(
            f"'{path}' was made under {listed(made_under)}, and here are {here}: the run would mix them. Use those "
            "versions, another folder, or --accept-versions to go on all the same."
        )


def _differences(there: Owner, asked: Owner) -> Iterable[str]:
    one, other = _flat(there), _flat(asked)
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            yield f"{name} is {_value(one.get(name))} there and {_value(other.get(name))} here"


def _flat(owner: Owner) -> dict[str, Any]:
    whole = owner.spec.to_dict()
    budget: dict[str, Any] = whole.pop("budget")
    whole.pop("versions", None)
    for place in PLACES:
        budget.pop(place, None)
    return whole | budget | {"the data's fingerprint": owner.fingerprint}


def _value(value: Any) -> str:
    return "none" if value is None else f"'{value}'" if isinstance(value, str) else str(value)


def _read_json(path: Path) -> Mapping[str, Any] | None:
    try:
        found = read_json(path)
    except MissingFileError:
        return None
    if not isinstance(found, dict):
        raise ValueError("it does not say which run it belongs to")
    return found


def _read_notes(path: Path) -> Mapping[str, Any] | None:
    """What the weights of a run say about it."""
    if not path.exists():
        return None
    notes = read_notes(path)
    return {**notes, "spec": json.loads(notes["spec"])} if "spec" in notes else notes
