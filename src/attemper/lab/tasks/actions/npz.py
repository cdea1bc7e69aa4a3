"""All videos in one .npz file: features one after the other, and the segments of all."""

from pathlib import Path
from typing import Literal

import numpy as np

from attemper.lab.errors import DataError
from attemper.lab.tasks.actions.arrays import InMemory, open_npz, reading
from attemper.lab.tasks.actions.videos import AMBIGUOUS, BACKGROUND, Annotator, Array, Video, Videos
from attemper.lab.tasks.broken import Broken

NEEDED = ("features", "offsets", "names", "split", "seconds_per_step", "segments", "classes")


def read_npz(file: Path, broken: Broken = "refuse") -> Videos:
    """The videos of a file with the arrays of `NEEDED`, and with `scale` where features are stored as small integers.

    features: (steps of all videos, width). offsets: (videos + 1), where each video begins. names, split: of every
    video, the latter 'train' or 'test'. segments: (segments, 4), each the number of its video, start and end in
    seconds, and the number of its class.
    broken: what becomes of segments that do not fit.
    """
    with reading(file, "an .npz file"), open_npz(file) as inside:
        missing = [name for name in NEEDED if name not in inside]
        if missing:
            raise DataError(f"'{file}' has no array '{missing[0]}'; it needs {', '.join(NEEDED)}.")
        features, offsets, segments = (inside[name] for name in ("features", "offsets", "segments"))
        names, split, classes = (_words(inside[name]) for name in ("names", "split", "classes"))
        seconds = float(inside["seconds_per_step"])
        scale = inside["scale"].astype(np.float32) if "scale" in inside else None
        _check(file, features, offsets, segments, names, split, scale, seconds)
    actions = [name for name in classes if name not in (BACKGROUND, AMBIGUOUS)]
    annotate = Annotator(actions, file)
    videos = []
    for index, name in enumerate(names):
        begin, end = int(offsets[index]), int(offsets[index + 1])
        mine = segments[segments[:, 0] == index].astype(np.float64)
        given = []
        for _, first, last, label in mine:
            if (known := _class(label, classes)) is None:
                segment = f"{name}, step {first / seconds:g} to {last / seconds:g}"
                about = f"its class is {label:g}; there are {len(classes)} classes, counted from 0"
                annotate.problems.found[segment] = about
                annotate.problems.total += 1
            else:
                given.append((first / seconds, last / seconds, known))
        part: Literal["train", "test"] = "train" if split[index] == "train" else "test"
        values = InMemory(features[begin:end])
        videos.append(Video(name, part, values, *annotate(name, end - begin, given)))
    return Videos(
        all=tuple(videos),
        classes=(BACKGROUND, *actions),
        width=features.shape[1],
        dtype=features.dtype,
        scale=scale,
        notes=annotate.settle(broken),
    )


def _words(array: Array) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else str(value) for value in array.tolist()]


def _class(number: float, classes: list[str]) -> str | None:
    """The name of a class; None: there is none of this number."""
    return classes[int(number)] if 0 <= number < len(classes) and number == int(number) else None


def _check(
    file: Path,
    features: Array,
    offsets: Array,
    segments: Array,
    names: list[str],
    split: list[str],
    scale: Array | None,
    seconds: float,
) -> None:
    """Raise unless the arrays fit together."""
    wrong = None
    if features.ndim != 2 or features.dtype.kind not in "fiu":
        wrong = f"features of {features.dtype} and the shape {features.shape}; they must be numbers (steps, width)"
    elif len(offsets) != len(names) + 1 or len(split) != len(names):
        wrong = f"{len(names)} names, {len(split)} entries in split and {len(offsets)} offsets, which needs one more"
    elif offsets[0] != 0 or offsets[-1] != len(features) or (np.diff(offsets) < 1).any():
        wrong = f"offsets that do not rise from 0 to {len(features)}, the number of steps"
    elif set(split) - {"train", "test"}:
        wrong = f"'{(set(split) - {'train', 'test'}).pop()}' in split; it must be 'train' or 'test'"
    elif segments.ndim != 2 or segments.shape[1] != 4:
        wrong = f"segments of the shape {segments.shape}; they must be (segments, 4)"
    elif segments.dtype.kind not in "fiu" or not np.isfinite(segments).all():
        wrong = "segments that are not all finite numbers"
    elif len(segments) and not ((segments[:, 0] >= 0) & (segments[:, 0] < len(names))).all():
        wrong = f"segments of videos that are not there; there are {len(names)}, counted from 0"
    elif scale is not None and scale.shape != (features.shape[1],):
        wrong = f"features of width {features.shape[1]} and a scale of the shape {scale.shape}"
    elif not seconds > 0:
        wrong = f"{seconds:g} seconds per step"
    if wrong:
        raise DataError(f"'{file}' has {wrong}.")
