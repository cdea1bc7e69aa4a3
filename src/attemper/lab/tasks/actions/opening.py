"""From a path to an action task."""

import dataclasses
from pathlib import Path
from typing import Literal

from attemper.errors import ParameterError
from attemper.lab.tasks import source as memory
from attemper.lab.tasks.actions.folders import FolderOptions, read_folder
from attemper.lab.tasks.actions.npz import read_npz
from attemper.lab.tasks.actions.task import ActionTask
from attemper.lab.tasks.actions.videos import Videos
from attemper.lab.tasks.actions.windows import read
from attemper.lab.tasks.broken import Broken, Problems, settle
from attemper.lab.tasks.source import found_under


def open_actions(
    name: str,
    path: str,
    root: Path,
    *,
    protocol: Literal["online", "segments"] = "online",
    window: int = 64,
    stride: int = 1,
    train: int | None = None,
    test: int | None = None,
    features: str | None = None,
    annotations: str | None = None,
    targets: str | None = None,
    feat_stride: int | None = None,
    num_frames: int | None = None,
    skip_missing: bool = False,
    broken: Broken = "refuse",
) -> ActionTask:
    """Videos as sequences of features, from one .npz file or from a folder with a JSON file in it.

    path: relative to the data root or to where the program runs.
    protocol, window, stride, train, test: see `ActionTask`.
    features, annotations, targets, feat_stride, num_frames, skip_missing: of folders alone, see `FolderOptions`.
    broken: what becomes of videos and segments that do not fit: refuse, or skip.
    """
    found = found_under(root, path, Path.exists, "there")
    options = FolderOptions(
        features=features,
        annotations=annotations,
        targets=targets,
        feat_stride=feat_stride,
        num_frames=num_frames,
        skip_missing=skip_missing,
        broken=broken,
    )
    if found.is_dir():
        videos = read_folder(found, options)
    else:
        given = [option for option, value in vars(options).items() if value and option != "broken"]
        if given:
            raise ParameterError(f"'{name}': {given[0]} is an option of folders, and '{found}' is a file.")
        videos = read_npz(found, broken)
    if videos.bytes <= memory.MEMORY_LIMIT:
        videos = _with_numbers(videos, found, broken)
    return ActionTask(
        name=name, videos=videos, protocol=protocol, window=window, stride=stride, train=train, test_videos=test
    )


def _with_numbers(videos: Videos, found: Path, broken: Broken) -> Videos:
    """The videos whose features are finite numbers."""
    problems = Problems()
    for video in videos.all:
        with problems.collect(video.name):
            read(video)
    notes = settle(problems.found, problems.total, f"videos of '{found}'", broken, verb="cannot be used")
    kept = tuple(video for video in videos.all if video.name not in problems.found)
    return dataclasses.replace(videos, all=kept, notes=(*videos.notes, *notes))
