"""The layout of online action detection, as OadTR, TRN and LSTR have it.

A JSON file lists the videos for training and for test, and the classes. Every video has a file of targets, one row per
step and one column per class, beside its features.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from attemper.lab.errors import DataError
from attemper.lab.tasks.actions.arrays import load_array
from attemper.lab.tasks.actions.inputs import Inputs
from attemper.lab.tasks.actions.videos import AMBIGUOUS, BACKGROUND, Array, Video, of_runs
from attemper.lab.tasks.broken import Problems

TARGETS = "target_perframe"
SETS: tuple[tuple[Literal["train", "test"], str], ...] = (("train", "train_session_set"), ("test", "test_session_set"))


def info_of(content: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """The part of the JSON that is about this data set: all of it, or what stands under the data set's name."""
    if SETS[0][1] in content:
        return content
    inside = {name: part for name, part in content.items() if isinstance(part, dict) and SETS[0][1] in part}
    if len(inside) > 1:
        inside = {name: part for name, part in inside.items() if name.lower() == folder.lower()}
    return next(iter(inside.values()), None)


def read_sessions(
    file: Path, info: dict[str, Any], targets: Path, inputs: Inputs, problems: Problems
) -> tuple[list[Video], tuple[str, ...]]:
    """Videos and classes.

    problems: collects the videos whose files do not fit.

    info: with 'train_session_set' and 'test_session_set', lists of names, and 'class_index', the names of the targets'
        columns, 'Background' among them and perhaps 'Ambiguous'.
    targets: the folder of targets.
    """
    columns = _names(file, info, "class_index")
    if BACKGROUND not in columns:
        raise DataError(f"'{file}': class_index has no '{BACKGROUND}'.")
    actions = [name for name in columns if name not in (BACKGROUND, AMBIGUOUS)]
    videos = []
    for part, key in SETS:
        for name in _names(file, info, key):
            with problems.collect(name):
                found = inputs.of(name)
                if found is None:
                    continue
                features, steps = found
                given = _targets(targets / f"{name}.npy", steps, columns, file)
                chosen = given[:, [columns.index(action) for action in actions]]
                labels = np.concatenate([np.zeros((steps, 1), bool), chosen], axis=1)
                labels[:, 0] = ~labels.any(1)
                ambiguous = given[:, columns.index(AMBIGUOUS)] if AMBIGUOUS in columns else np.zeros(steps, bool)
                videos.append(Video(name, part, features, labels, ambiguous, of_runs(labels)))
    return videos, (BACKGROUND, *actions)


def _names(file: Path, info: dict[str, Any], key: str) -> list[str]:
    found = info.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
        raise DataError(f"'{file}': {key} must be a list of names.")
    return found


def _targets(target: Path, steps: int, columns: list[str], file: Path) -> Array:
    values = load_array(target)
    if values.ndim != 2 or values.shape[1] != len(columns):
        raise DataError(
            f"'{target}' has the shape {values.shape}; it must be (steps, {len(columns)}), one column per class of "
            f"class_index in '{file}'."
        )
    if len(values) != steps:
        raise DataError(f"'{target}' has {len(values)} steps, and the features of this video have {steps}.")
    found: Array = values != 0
    return found
