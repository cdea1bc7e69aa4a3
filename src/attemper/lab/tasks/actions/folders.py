"""Folders of features, one file per video, with a JSON file that says what happens in them.

Two layouts are known by what their JSON holds: that of online action detection (OadTR, TRN, LSTR), with lists of
sessions and a target file per video, and that of ActionFormer, with a database of segments.
"""

import dataclasses
from pathlib import Path
from typing import Any

from attemper.lab.errors import DataError
from attemper.lab.tasks.actions.actionformer import Timing, read_database
from attemper.lab.tasks.actions.arrays import load_json
from attemper.lab.tasks.actions.inputs import Inputs
from attemper.lab.tasks.actions.sessions import TARGETS, info_of, read_sessions
from attemper.lab.tasks.actions.videos import Videos
from attemper.lab.tasks.broken import Broken, Problems, settle


@dataclasses.dataclass(frozen=True)
class FolderOptions:
    """What cannot be read from a folder itself.

    features: the folder of features inside of it; several joined by '+' stand side by side, such as RGB and flow.
    annotations: the JSON file inside of it. Neither is needed where there is only one that it can be.
    targets: the folder of per-step targets, in the layout of OadTR.
    feat_stride, num_frames: see `Timing`, in the layout of ActionFormer.
    skip_missing: leave out videos without features, with a count, instead of refusing.
    broken: what becomes of videos and segments that do not fit: refuse, or skip.
    """

    features: str | None = None
    annotations: str | None = None
    targets: str | None = None
    feat_stride: int | None = None
    num_frames: int | None = None
    skip_missing: bool = False
    broken: Broken = "refuse"


def read_folder(folder: Path, options: FolderOptions) -> Videos:
    """The videos of a folder in either layout."""
    file = _annotation_file(folder, options.annotations)
    content = load_json(file)
    targets = folder / (options.targets or TARGETS)
    inputs = Inputs(folder, options.features, beside=(targets.name, "annotations"), skip_missing=options.skip_missing)
    problems, annotate = Problems(), None
    if isinstance(content.get("database"), dict):
        _refuse(file, "ActionFormer", targets=options.targets)
        timing = Timing(options.feat_stride, options.num_frames)
        videos, classes, annotate = read_database(file, content["database"], inputs, timing, problems)
    elif (info := info_of(content, folder.name)) is not None:
        _refuse(file, "OadTR", feat_stride=options.feat_stride, num_frames=options.num_frames)
        videos, classes = read_sessions(file, info, targets, inputs, problems)
    else:
        raise DataError(
            f"'{file}' has neither a 'database' of videos, as ActionFormer's, nor a 'train_session_set', as OadTR's."
        )
    notes = settle(problems.found, problems.total, f"videos of '{file}'", options.broken, verb="cannot be used")
    notes += [] if annotate is None else annotate.settle(options.broken)
    notes += inputs.settle()
    if inputs.width is None:
        raise DataError(f"'{folder}' has features of none of the videos that '{file}' names.")
    return Videos(tuple(videos), classes, inputs.width, inputs.dtype, notes=tuple(notes))


def _refuse(file: Path, layout: str, **options: Any) -> None:
    odd = next((name for name, value in options.items() if value is not None), None)
    if odd:
        raise DataError(f"{odd} does not belong to the layout of {layout}, which '{file}' has.")


def _annotation_file(folder: Path, named: str | None) -> Path:
    if named is not None:
        return folder / named
    found = sorted([*folder.glob("*.json"), *(folder / "annotations").glob("*.json")])
    if len(found) != 1:
        listed = f": {', '.join(file.name for file in found)}" if found else ""
        raise DataError(
            f"'{folder}' has {len(found)} JSON files in it or in 'annotations'{listed}; there must be one, or "
            "annotations= must name it."
        )
    return found[0]
