"""The layout of ActionFormer: a JSON database of videos with their segments, and one feature file per video."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, TypeGuard

from attemper.lab.errors import DataError
from attemper.lab.tasks.actions.inputs import Inputs
from attemper.lab.tasks.actions.videos import AMBIGUOUS, BACKGROUND, Annotator, Video
from attemper.lab.tasks.broken import Problems

Part = Literal["train", "test"]
Annotation = tuple[float, float, str, int | None]
"""Start and end in seconds, the class, and the id of the class."""
MOST = 1e12
"""Of any number of seconds or frames."""
TRAINING, VALIDATION, TEST = ("train", "training"), ("val", "validation"), ("test", "testing")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Which part of a video each step was computed from.

    feat_stride: video frames from one step to the next; None: the steps share the duration evenly.
    num_frames: frames that one step was computed from; None: as many as feat_stride.
    """

    feat_stride: int | None = None
    num_frames: int | None = None

    def clock(self, file: Path, video: str, entry: dict[str, Any], steps: int) -> tuple[float, float]:
        """Steps per second, and the step at second 0. Step t has its middle at t + 0.5."""
        if self.feat_stride is None:
            return steps / _number(file, video, entry, "duration"), 0.0
        frames = self.feat_stride if self.num_frames is None else self.num_frames
        return _number(file, video, entry, "fps") / self.feat_stride, 0.5 - 0.5 * frames / self.feat_stride


def read_database(
    file: Path, database: dict[str, Any], inputs: Inputs, timing: Timing, problems: Problems
) -> tuple[list[Video], tuple[str, ...], Annotator]:
    """Videos, classes, and what the annotations came to.

    database: video → {"subset", "duration", "fps", "annotations": [{"segment": [start, end], "label", "label_id"}]},
        times in seconds.
    problems: collects the videos whose entries or files do not fit.
    """
    parts = _parts(file, database, problems)
    rows = {}
    unread = Problems()
    for video in list(parts):
        with problems.collect(video):
            rows[video] = _annotations(file, video, database[video], unread)
    actions = _actions(file, {video: rows[video] for video, part in parts.items() if part == "train" and video in rows})
    annotate = Annotator(actions, file)
    annotate.problems = unread
    videos = []
    for name, annotations in rows.items():
        with problems.collect(name):
            found = inputs.of(name)
            if found is None:
                continue
            features, steps = found
            entry = database[name]
            rate, zero = timing.clock(file, name, entry, steps)
            segments = [(zero + start * rate, zero + end * rate, label) for start, end, label, _ in annotations]
            until = zero + _number(file, name, entry, "duration") * rate if "duration" in entry else float(steps)
            videos.append(Video(name, parts[name], features, *annotate(name, steps, segments, (zero, until))))
    problems.total = len(database)
    return videos, (BACKGROUND, *actions), annotate


def _parts(file: Path, database: dict[str, Any], problems: Problems) -> dict[str, Part]:
    """Which videos are for training and which for test.

    THUMOS14 trains on its validation set, since its training set has other videos; ActivityNet tests on it, since its
    test set has no annotations. So where there is a test set, everything else is for training.
    """
    subsets = {}
    for video, entry in database.items():
        with problems.collect(video):
            subset = entry.get("subset") if isinstance(entry, dict) else None
            if not isinstance(subset, str):
                raise DataError(f"'{file}': video '{video}' has no subset such as 'Validation' or 'Test'.")
            if subset.lower() not in (*TRAINING, *VALIDATION, *TEST):
                raise DataError(
                    f"'{file}': video '{video}' has the subset '{subset}'; it must be Training, Validation or Test."
                )
            subsets[video] = subset.lower()
    tested = TEST if any(subset in TEST for subset in subsets.values()) else VALIDATION
    return {video: "test" if subset in tested else "train" for video, subset in subsets.items()}


def _actions(file: Path, rows: dict[str, list[Annotation]]) -> list[str]:
    """The actions of the training videos, in the order of their ids where they have any, else by name."""
    ids: dict[str, int | None] = {}
    for video, annotations in rows.items():
        for _, _, label, number in annotations:
            if ids.setdefault(label, number) != number:
                raise DataError(
                    f"'{file}': the class '{label}' has the label_id {ids[label]}, and in video '{video}' {number}."
                )
    ids.pop(AMBIGUOUS, None)
    known = [number for number in ids.values() if number is not None]
    if len(set(known)) < len(known):
        raise DataError(f"'{file}': two classes have the same label_id.")
    return sorted(ids, key=lambda label: (-1 if ids[label] is None else ids[label], label))


def _annotations(file: Path, video: str, entry: dict[str, Any], unread: Problems) -> list[Annotation]:
    """Every annotation of a video. unread: collects those that say nothing."""
    given = entry.get("annotations") or []
    if not isinstance(given, list):
        raise DataError(f"'{file}': the annotations of video '{video}' must be a list.")
    found = []
    for place, one in enumerate(given):
        segment = one.get("segment") if isinstance(one, dict) else None
        label = one.get("label") if isinstance(one, dict) else None
        if not isinstance(segment, list) or len(segment) != 2 or not all(_is_number(time) for time in segment):
            unread.found[f"{video}, number {place}"] = "it needs a segment of start and end"
        elif not isinstance(label, str):
            unread.found[f"{video}, number {place}"] = "it needs a label"
        else:
            number = one.get("label_id")
            found.append((float(segment[0]), float(segment[1]), label, number if isinstance(number, int) else None))
    unread.total += len(given) - len(found)
    return found


def _number(file: Path, video: str, entry: dict[str, Any], key: str) -> float:
    value = entry.get(key)
    if not _is_number(value) or not value > 0:
        raise DataError(f"'{file}': video '{video}' has the {key} {value!r}; it must be a number above 0.")
    return float(value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST
