"""Action tasks from files: the .npz file, the folders of OadTR and ActionFormer, and what is wrong with broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from action_files import STEPS, WIDTH, actionformer, entries, features, npz, opened
from attemper.errors import AttemperError, ParameterError
from attemper.lab.errors import DataError
from attemper.lab.tasks import source as memory
from attemper.lab.tasks.registry import verify


# ----------------------------------------------------------------------------------------------------------------- npz
def test_an_npz_file_opens_with_its_split_labels_and_segments(tmp_path: Path) -> None:
    npz(tmp_path)
    task = opened(tmp_path, name="data.npz")
    assert str(task.shape) == "4 tokens × 6 features and of 3 classes"
    assert task.videos.classes == ("Background", "Jump", "Swim")
    assert [video.part for video in task.videos.all] == ["train", "train", "train", "test"]
    assert np.flatnonzero(task.videos.all[3].labels[:, 2]).tolist() == [10, 11, 12, 13, 14]
    assert task.videos.all[3].segments.tolist() == [[10.0, 15.0, 1.0]]
    assert task.notes == ()
    assert next(task.test().batches(torch.arange(2), 2))[0].dtype == torch.int8


def test_annotations_outside_a_video_are_clipped_and_verify_says_how_many(tmp_path: Path) -> None:
    outside = [[0, 1.0, 3.0, 0], [1, 8.0, 14.0, 1], [2, 12.0, 13.0, 0], [3, 5.0, 7.5, 1], [2, 0.0, 1.0, 0]]
    npz(tmp_path, segments=np.array(outside, np.float32))
    with pytest.raises(
        DataError, match=r"2 of 5 annotated segments .*'b, step 16 to 28' \(.*'c, step 24 to 26' \(.*skip"
    ):
        opened(tmp_path, name="data.npz")
    lines = verify("actions:data.npz(window=4, broken=skip)", tmp_path)
    assert "60 training samples and 20 test samples" in lines[0]
    assert (
        "data.npz': of 5 annotated segments, 1 reach beyond their video and are clipped, and 1 lie outside" in lines[1]
    )
    assert "2 of 5 annotated segments" in lines[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segments": None}, "has no array 'segments'"),
        ({"segments": np.array([[0, 1.0, 3.0, 7]])}, r"'a, step 2 to 6' \(its class is 7; there are 2 classes"),
        ({"segments": np.array([[0, 3.0, 1.0, 0]])}, r"'a, step 6 to 2' \(it must not end before it starts"),
        ({"segments": np.array([[9, 1.0, 3.0, 0]])}, "segments of videos that are not there; there are 4"),
        ({"segments": np.zeros((2, 3))}, r"segments of the shape \(2, 3\)"),
        ({"offsets": np.arange(5) * 7}, "offsets that do not rise from 0 to 80"),
        ({"split": np.array([b"train", b"val", b"train", b"test"])}, "'val' in split; it must be 'train' or 'test'"),
        ({"scale": np.ones(3, np.float32)}, r"features of width 6 and a scale of the shape \(3,\)"),
        ({"names": np.array([b"a"])}, "1 names, 4 entries in split and 5 offsets"),
        ({"seconds_per_step": np.float32(0)}, "0 seconds per step"),
    ],
)
def test_an_npz_file_that_does_not_fit_together_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    file = npz(tmp_path, **changes)
    with pytest.raises(DataError, match=message) as caught:
        opened(tmp_path, name="data.npz")
    assert str(file) in str(caught.value)


def test_a_file_that_is_no_npz_file_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(DataError, match=r"text\.npz' is not an \.npz file"):
        opened(tmp_path, name="text.npz")
    with pytest.raises(DataError, match="'nothing' is not there, neither under the data root"):
        opened(tmp_path, name="nothing")
    npz(tmp_path)
    with pytest.raises(ParameterError, match="feat_stride is an option of folders"):
        opened(tmp_path, "feat_stride=4", name="data.npz")


# -------------------------------------------------------------------------------------------------------- ActionFormer
def test_actionformers_layout_opens_with_classes_in_the_order_of_their_ids(tmp_path: Path) -> None:
    actionformer(tmp_path)
    task = opened(tmp_path)
    assert task.videos.classes == ("Background", "Jump", "Swim")
    assert [video.part for video in task.videos.all] == ["train", "train", "train", "test"]
    assert np.flatnonzero(task.videos.all[0].labels[:, 2]).tolist() == [2, 3, 4, 5]
    assert np.flatnonzero(task.videos.all[0].ambiguous).tolist() == [12, 13]
    assert task.videos.all[3].segments.tolist() == [[10.0, 15.0, 0.0]]
    stored, _ = next(task.test().batches(torch.tensor([19]), 1))
    assert np.array_equal(stored[0].numpy(), features(3)[16:])


def test_stride_and_frames_say_when_a_step_was(tmp_path: Path) -> None:
    actionformer(tmp_path)
    task = opened(tmp_path, "feat_stride=15, num_frames=30")
    # Step t is computed from frames 15 t to 15 t + 30, so that its middle is at (t + 1) / 2 seconds.
    assert np.flatnonzero(task.videos.all[3].labels[:, 1]).tolist() == [9, 10, 11, 12, 13]
    assert task.videos.all[3].segments.tolist() == [[9.5, 14.5, 0.0]]
    assert task.notes == (), "a segment that begins with the video is not outside of it"


def test_compressed_features_are_read_too(tmp_path: Path) -> None:
    folder = actionformer(tmp_path)
    (folder / "i3d" / "d.npy").unlink()
    np.savez_compressed(folder / "i3d" / "d.npz", features=features(3), other=np.zeros(3))
    stored, _ = next(opened(tmp_path).test().batches(torch.tensor([19]), 1))
    assert np.array_equal(stored[0].numpy(), features(3)[16:])


def test_where_there_is_no_test_set_the_validation_set_is_it(tmp_path: Path) -> None:
    database = entries()
    for name, subset in zip("abcd", ("training", "training", "training", "validation"), strict=True):
        database[name]["subset"] = subset
    actionformer(tmp_path, database)
    assert [video.part for video in opened(tmp_path).videos.all] == ["train", "train", "train", "test"]


def test_videos_without_features_are_refused_or_left_out_with_a_count(tmp_path: Path) -> None:
    folder = actionformer(tmp_path)
    (folder / "i3d" / "b.npy").unlink()
    with pytest.raises(DataError, match=r"1 of 4 videos have no features in '.*i3d' .*: 'b'\. With skip_missing=true"):
        opened(tmp_path)
    task = opened(tmp_path, "skip_missing=true")
    assert [video.name for video in task.videos.all] == ["a", "c", "d"]
    assert task.notes == ("1 of 4 videos have no features and are left out: 'b'.",)


def broken(name: str, key: str, value: Any) -> dict[str, Any]:
    database = entries()
    database[name][key] = value
    return database


@pytest.mark.parametrize(
    ("database", "message"),
    [
        (broken("d", "annotations", [{"segment": [1, 2], "label": "Jmp"}]), "class 'Jmp'.*Did you mean 'Jump'"),
        (
            broken("a", "annotations", [{"segment": [1], "label": "Jump"}]),
            "'a, number 0'.*needs a segment of start and end",
        ),
        (broken("a", "annotations", [{"segment": [1, 2]}]), "needs a label"),
        (broken("a", "annotations", "none"), "annotations of video 'a' must be a list"),
        (broken("a", "annotations", [{"segment": [3, 1], "label": "Jump", "label_id": 0}]), "must not end before"),
        (
            broken("a", "annotations", [{"segment": [1, 2], "label": "Jump", "label_id": 5}]),
            "'Jump' has the label_id 5",
        ),
        (broken("a", "duration", 0), "video 'a' has the duration 0; it must be a number above 0"),
        (broken("a", "subset", "Extra"), "video 'a' has the subset 'Extra'"),
        (broken("a", "subset", None), "video 'a' has no subset"),
    ],
)
def test_a_wrong_annotation_is_refused_with_file_and_video(
    tmp_path: Path, database: dict[str, Any], message: str
) -> None:
    actionformer(tmp_path, database)
    with pytest.raises(DataError, match=message) as caught:
        opened(tmp_path)
    assert "some.json" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{not json", "is no JSON, or damaged"),
        ("[1, 2]", "holds a JSON list; it must be an object"),
        ('{"videos": {}}', "has neither a 'database' of videos.*nor a 'train_session_set'"),
    ],
)
def test_a_json_that_is_not_one_is_named(tmp_path: Path, text: str, message: str) -> None:
    folder = actionformer(tmp_path)
    (folder / "annotations" / "some.json").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        opened(tmp_path)
    assert str(folder / "annotations" / "some.json") in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (features(0, width=5), r"c\.npy' has features of width 5, and '.*a\.npy' of width 6"),
        (np.zeros(4), r"c\.npy' has the shape \(4,\)"),
        (np.array([["a", "b"]]), r"c\.npy' holds <U1; features must be numbers"),
        (None, r"c\.npy' is not an array that can be read"),
    ],
)
def test_features_that_do_not_fit_are_refused_by_file(tmp_path: Path, values: Any, message: str) -> None:
    folder = actionformer(tmp_path)
    file = folder / "i3d" / "c.npy"
    file.write_bytes(b"nothing") if values is None else np.save(file, values)
    with pytest.raises(DataError, match=message):
        opened(tmp_path)


@pytest.mark.parametrize("limit", [memory.MEMORY_LIMIT, 100])
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MEMORY_LIMIT", limit)
    folder = actionformer(tmp_path)
    values = features(2)
    values[3, 3] = np.nan
    np.save(folder / "i3d" / "c.npy", values)
    with pytest.raises(DataError, match="video 'c' hold values that are no finite numbers"):
        first_inputs(tmp_path)


def first_inputs(root: Path) -> torch.Tensor:
    task = opened(root)
    return task.to_input(next(task.test().batches(torch.arange(1), 1))[0])


def test_what_cannot_be_told_from_the_folder_is_asked_for(tmp_path: Path) -> None:
    folder = actionformer(tmp_path)
    (folder / "other").mkdir()
    np.save(folder / "other" / "a.npy", features(0))
    with pytest.raises(DataError, match=r"has 2 folders of \.npy or \.npz files: i3d, other.*features="):
        opened(tmp_path)
    assert opened(tmp_path, "features=i3d").videos.width == WIDTH
    with pytest.raises(DataError, match="i3dd' is not a folder"):
        opened(tmp_path, "features=i3dd")
    (folder / "second.json").write_text("{}")
    with pytest.raises(DataError, match=r"has 2 JSON files .*second\.json"):
        opened(tmp_path, "features=i3d")
    assert opened(tmp_path, "features=i3d, annotations='annotations/some.json'").videos.width == WIDTH
    with pytest.raises(DataError, match="targets does not belong to the layout of ActionFormer"):
        opened(tmp_path, "features=i3d, annotations='annotations/some.json', targets=other")


# --------------------------------------------------------------------------------------------------------------- OadTR
CLASSES = ["Background", "Jump", "Swim", "Ambiguous"]


def sessions(root: Path, **changes: Any) -> Path:
    folder = root / "data"
    for name in ("rgb_some", "flow_some", "target_perframe"):
        (folder / name).mkdir(parents=True)
    for number, name in enumerate("abcd"):
        np.save(folder / "rgb_some" / f"{name}.npy", features(number, width=4))
        np.save(folder / "flow_some" / f"{name}.npy", features(number + 10, width=2))
        target = np.zeros((STEPS, 4))
        target[:, 0] = 1
        target[5:9] = [0, 1, 0, 0]
        target[8:12] = [0, 0, 1, 0]
        target[8, 1] = 1
        target[15:17] = [0, 0, 0, 1]
        np.save(folder / "target_perframe" / f"{name}.npy", target)
    info = {"train_session_set": ["a", "b", "c"], "test_session_set": ["d"], "class_index": CLASSES, **changes}
    (folder / "data_info.json").write_text(json.dumps({"DATA": info, "OTHER": {"train_session_set": ["x"]}}))
    return folder


def test_oadtrs_layout_opens_with_rgb_and_flow_side_by_side(tmp_path: Path) -> None:
    sessions(tmp_path)
    task = opened(tmp_path)
    assert task.videos.classes == ("Background", "Jump", "Swim")
    stored, _ = next(task.test().batches(torch.tensor([19]), 1))
    assert np.array_equal(stored[0].numpy(), np.concatenate([features(3, width=4), features(13, width=2)], axis=1)[16:])
    video = task.videos.all[0]
    assert np.flatnonzero(video.labels[:, 1]).tolist() == [5, 6, 7, 8]
    assert np.flatnonzero(video.labels[:, 2]).tolist() == [8, 9, 10, 11]
    assert np.flatnonzero(video.ambiguous).tolist() == [15, 16]
    assert video.segments.tolist() == [[5.0, 9.0, 0.0], [8.0, 12.0, 1.0]]


def test_the_order_of_named_feature_folders_is_obeyed(tmp_path: Path) -> None:
    sessions(tmp_path)
    task = opened(tmp_path, "features='flow_some+rgb_some'")
    stored, _ = next(task.test().batches(torch.tensor([19]), 1))
    assert np.array_equal(stored[0, :, :2].numpy(), features(13, width=2)[16:])


def test_both_streams_are_read_from_files_where_memory_does_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions(tmp_path)
    held = next(opened(tmp_path).test().batches(torch.arange(STEPS), STEPS))
    monkeypatch.setattr(memory, "MEMORY_LIMIT", 100)
    streamed = opened(tmp_path).test()
    assert not streamed.in_memory
    streamed.workers = 0  # type: ignore[attr-defined]
    read = next(streamed.batches(torch.arange(STEPS), STEPS))
    assert all(torch.equal(one, other) for one, other in zip(held, read, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"class_index": ["Jump", "Swim"]}, r"data_info\.json': class_index has no 'Background'"),
        ({"class_index": [*CLASSES, "Dive"]}, r"a\.npy' has the shape \(20, 4\); it must be \(steps, 5\)"),
        ({"class_index": None}, "class_index must be a list of names"),
        ({"test_session_set": "d"}, "test_session_set must be a list of names"),
        ({"test_session_set": ["e"]}, "have no features .*: 'e'"),
    ],
)
def test_a_data_info_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    sessions(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        opened(tmp_path)


def test_streams_and_targets_of_different_lengths_are_refused_by_file(tmp_path: Path) -> None:
    folder = sessions(tmp_path)
    np.save(folder / "target_perframe" / "b.npy", np.zeros((STEPS - 1, 4)))
    with pytest.raises(DataError, match=r"frame/b\.npy' has 19 steps, and the features of this video have 20"):
        opened(tmp_path)
    np.save(folder / "flow_some" / "a.npy", features(0, steps=3, width=2))
    with pytest.raises(DataError, match=r"flow_some/a\.npy' has 3 steps and '.*rgb_some/a\.npy' 20"):
        opened(tmp_path)
    (folder / "target_perframe" / "a.npy").unlink()
    np.save(folder / "flow_some" / "a.npy", features(0, width=2))
    with pytest.raises(DataError, match=r"target_perframe/a\.npy' is not there"):
        opened(tmp_path)


def test_options_of_the_other_layout_are_refused(tmp_path: Path) -> None:
    sessions(tmp_path)
    with pytest.raises(AttemperError, match="feat_stride does not belong to the layout of OadTR"):
        opened(tmp_path, "feat_stride=4")
