"""Made-up videos with planted actions, so that everything about actions can be tried without any file."""

from typing import Literal

import numpy as np

from attemper.lab.tasks.actions.arrays import InMemory
from attemper.lab.tasks.actions.task import ActionTask
from attemper.lab.tasks.actions.videos import AMBIGUOUS, BACKGROUND, Annotator, Array, Video, Videos

ACTIONS = ("Throw", "Jump", "Swing", "Dive", "Lift")
TRAIN, TEST = 40, 20
WIDTH = 16
SHORTEST, LONGEST = 4, 12
NOISE = 0.9
"""Deviation of the noise on every feature; the pattern of an action has a length of 2."""


def open_planted(
    name: str,
    *,
    protocol: Literal["online", "segments"] = "online",
    window: int = 16,
    stride: int = 1,
    train: int | None = None,
    test: int | None = None,
) -> ActionTask:
    """Five actions in 60 short videos, 40 of them for training and validation; the options are those of `actions:`."""
    return ActionTask(
        name=name, videos=plant(), protocol=protocol, window=window, stride=stride, train=train, test_videos=test
    )


def plant(seed: int = 0) -> Videos:
    """The videos. An action shows in noise, so that several steps show more than one.

    Two actions share their pattern. Which of them it is, a cue says that comes some steps before: only a model that
    looks back can distinguish them.
    """
    draw = np.random.default_rng(seed)
    patterns = 2 * _unit(draw.standard_normal((len(ACTIONS), WIDTH)))
    patterns[1] = patterns[0]
    cues = 4 * _unit(draw.standard_normal((2, WIDTH)))
    annotate = Annotator(ACTIONS, "planted")
    videos = []
    for number in range(TRAIN + TEST):
        steps = int(draw.integers(70, 110))
        values = NOISE * draw.standard_normal((steps, WIDTH))
        segments: list[tuple[float, float, str]] = []
        at = int(draw.integers(5, 12))
        while at + LONGEST < steps:
            end = at + int(draw.integers(SHORTEST, LONGEST + 1))
            action = int(draw.integers(len(ACTIONS)))
            values[at:end] += patterns[action]
            if action < 2:
                values[at - 3] += cues[action]
            segments.append((at, end, ACTIONS[action]))
            if draw.random() < 0.15:  # two at once
                other = int(draw.integers(2, len(ACTIONS)))
                values[at:end] += patterns[other]
                segments.append((at, end, ACTIONS[other]))
            if draw.random() < 0.2:
                segments.append((end, end + 2, AMBIGUOUS))
            at = end + int(draw.integers(6, 16))
        part: Literal["train", "test"] = "train" if number < TRAIN else "test"
        features = InMemory(values.astype(np.float32))
        videos.append(Video(f"planted {number:02}", part, features, *annotate("", steps, segments)))
    return Videos(tuple(videos), (BACKGROUND, *ACTIONS), WIDTH, np.dtype(np.float32))


def _unit(rows: Array) -> Array:
    found: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found
