"""Annotations and features that do not fit: all are named at once, and what is off by a hair is clipped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from action_files import actionformer, entries, features, opened
from attemper.lab.errors import DataError
from attemper.lab.tasks.actions.videos import Annotator


@given(st.integers(1, 50), st.floats(0, 1), st.floats(1.001, 100), st.booleans())
def test_a_segment_may_reach_one_step_beyond_its_video_and_no_further(
    steps: int, little: float, much: float, before: bool
) -> None:
    def annotated(beyond: float) -> Annotator:
        annotate = Annotator(["Jump"], "f")
        segment = (-beyond, 1.0, "Jump") if before else (steps - 1.0, steps + beyond, "Jump")
        labels, _, segments = annotate("v", steps, [segment])
        assert labels[:, 1].sum() == 1
        assert segments.tolist() == [[0.0, 1.0, 0.0] if before else [steps - 1.0, steps, 0.0]]
        return annotate

    near, far = annotated(little), annotated(much)
    assert len(near.settle("refuse")) == int(segment_is_clipped(steps, little, before)), "said once, with a count"
    assert len(far.settle("skip")) == 2
    with pytest.raises(DataError, match=r"1 of 1 annotated segments of 'f' do not fit: 'v, step .*beyond its video"):
        far.settle("refuse")


def segment_is_clipped(steps: int, beyond: float, before: bool) -> bool:
    """Whether anything is left of so small an excess in floating-point numbers."""
    return -beyond < 0 if before else steps + beyond > steps


def test_a_segment_that_ends_a_hair_after_its_video_is_clipped_and_counted(tmp_path: Path) -> None:
    for beyond in (1e-9, 1e-3, 0.49):  # seconds, of a step of 0.5
        database = entries()
        database["a"]["annotations"] = [{"segment": [8.0, 10.0 + beyond], "label": "Swim", "label_id": 1}]
        folder = actionformer(tmp_path / str(beyond), database)
        task = opened(folder.parent)
        assert np.flatnonzero(task.videos.all[0].labels[:, 2]).tolist() == [16, 17, 18, 19]
        assert task.videos.all[0].segments[0, 1] == 20
        [note] = task.notes
        assert "of 4 annotated segments, 1 reach beyond their video and are clipped, and 0 lie outside" in note


def test_every_broken_video_and_segment_is_named_at_once_and_skipped_on_request(tmp_path: Path) -> None:
    database = entries()
    database["a"]["annotations"] += [
        {"segment": [9.0, 30.0], "label": "Swim", "label_id": 1},
        {"segment": [3.0], "label": "Swim"},
        {"segment": [3.0, 2.0], "label": "Swim", "label_id": 1},
    ]
    database["d"]["annotations"] += [{"segment": [1.0, 2.0], "label": "Fly"}, {"segment": [1.0, 2.0]}]
    names = ("e", "f", "g", "h")
    database |= {name: {**entries()["b"], "subset": "Validation"} for name in names}
    database["h"]["subset"] = "Other"
    folder = actionformer(tmp_path, database)
    np.save(folder / "i3d" / "e.npy", features(5, width=3))
    (folder / "i3d" / "f.npy").write_bytes(b"no array")
    np.save(folder / "i3d" / "g.npy", np.where(features(6) > 2, np.nan, features(6)))
    with pytest.raises(DataError) as caught:
        opened(tmp_path)
    assert "3 of 8 videos" in str(caught.value)
    for said in ("'e' (", "width 3", "'f' (", "not an array that can be read", "'h' (", "subset 'Other'"):
        assert said in str(caught.value)
    for name in ("e", "f", "h"):
        del database[name]
    (folder / "annotations" / "some.json").write_text(json.dumps({"database": database}))
    with pytest.raises(DataError) as caught:
        opened(tmp_path)
    assert "5 of 11 annotated segments" in str(caught.value)
    for said in (
        "'a, number 3' (it needs a segment",
        "'a, step 18 to 60' (it reaches 40 steps beyond",
        "'a, step 6 to 4' (it must not end before",
        "'d, number 2' (it needs a label",
        "'d, step 2 to 4' (its class 'Fly' is not among the 2 known",
    ):
        assert said in str(caught.value)
    task = opened(tmp_path, "broken=skip")
    assert [video.name for video in task.videos.all] == ["a", "b", "c", "d"]
    assert len(task.videos.all[0].segments) == 2, "the segment of 18 to 60 is clipped"
    assert [note.split(" of ")[0] for note in task.notes[1:]] == ["5", "1"]
    assert "'g' (The features of video 'g' hold values that are no finite numbers)" in task.notes[2]
