"""Action tasks: windows, splits by video, what counts and what does not, both protocols, and learning."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.errors import DataError
from attemper.lab.tasks import source as memory
from attemper.lab.tasks.actions.arrays import FeatureFiles, InMemory
from attemper.lab.tasks.actions.task import ActionTask
from attemper.lab.tasks.actions.videos import AMBIGUOUS, BACKGROUND, Annotator, Video, Videos
from attemper.lab.tasks.actions.windows import MemoryWindows, StreamedWindows
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec

MODEL = "encoder(width=32, heads=4, token=last)"
SHORT = Budget(epochs=1, batch_size=32, lr=3e-3, warmup_epochs=0.0)
BUDGET = Budget(epochs=4, batch_size=64, lr=3e-3, warmup_epochs=0.5)


def made(labelled: list[list[tuple[float, float, str]]], steps: int = 20, tests: int = 1) -> Videos:
    """Videos whose feature at step t of video v is (v, t); the last ones are for test."""
    annotate = Annotator(["Jump", "Swim"], "made")
    videos = []
    for number, segments in enumerate(labelled):
        values = np.stack([np.full(steps, number), np.arange(steps)], axis=1).astype(np.float32)
        part = "train" if number < len(labelled) - tests else "test"
        videos.append(Video(f"v{number}", part, InMemory(values), *annotate(f"v{number}", steps, segments)))
    return Videos(tuple(videos), (BACKGROUND, "Jump", "Swim"), 2, np.dtype(np.float32))


SEGMENTS: list[list[tuple[float, float, str]]] = [
    [(2.0, 6.0, "Jump"), (4.0, 9.0, "Swim"), (12.0, 14.0, AMBIGUOUS)],
    [(0.0, 5.0, "Swim")],
    [(3.0, 4.0, "Jump")],
    [(5.0, 15.0, "Swim"), (1.0, 3.0, "Jump"), (17.0, 19.0, AMBIGUOUS)],
]


def task_of(**options: object) -> ActionTask:
    return ActionTask(name="made", videos=made(SEGMENTS), window=4, **options)  # type: ignore[arg-type]


class Oracle(nn.Module):
    """Knows the labels of every step; its score is as sure as it is told."""

    def __init__(self, task: ActionTask, sure: float = 8.0) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.tables = torch.stack([torch.from_numpy(video.labels) for video in task.videos.all]).float() * sure
        self.factor, self.shift = task._normalisation_on(torch.device("cpu"))

    def forward(self, x: Tensor) -> Tensor:
        video, step = ((x[:, -1] + self.shift) / self.factor).round().long().unbind(-1)
        return self.tables[video, step]


# ------------------------------------------------------------------------------------------------------------- windows
def test_a_window_ends_with_the_current_step_and_begins_with_the_first_one_repeated() -> None:
    source = task_of().test()
    stored, targets = next(source.batches(torch.tensor([0, 2, 10]), 3))
    assert stored[:, :, 1].tolist() == [[0, 0, 0, 0], [0, 0, 1, 2], [7, 8, 9, 10]]
    assert (stored[:, :, 0] == 3).all(), "a window never reaches into another video"
    assert targets.tolist() == [0, 1, 2]


def test_windows_have_the_models_shape_and_inputs_are_centred() -> None:
    task = task_of()
    assert isinstance(task, Task)
    train, validation = task.split(0, 0.3)
    stored = torch.cat([x for part in (train, validation) for x, _ in part.batches(torch.arange(len(part)), 99)])
    inputs = task.to_input(stored)
    assert inputs.shape[1:] == (task.shape.tokens, task.shape.features)
    whole = task.to_input(torch.cat([torch.from_numpy(v.features.read()) for v in task.videos.part("train")]))
    assert torch.allclose(whole.mean(0), torch.zeros(2), atol=1e-5)
    assert whole.square().mean().item() == pytest.approx(1.0, abs=1e-4)


def test_stored_integers_are_multiplied_by_their_scale() -> None:
    videos = made(SEGMENTS)
    coarse = tuple(dataclasses.replace(v, features=InMemory(v.features.read().astype(np.int8))) for v in videos.all)
    scale = np.array([3.0, 0.5], dtype=np.float32)
    scaled = tuple(dataclasses.replace(v, features=InMemory(v.features.read() * scale)) for v in videos.all)
    small = ActionTask("int8", dataclasses.replace(videos, all=coarse, dtype=np.dtype(np.int8), scale=scale), window=4)
    large = ActionTask("float", dataclasses.replace(videos, all=scaled), window=4)
    first, second = (task.to_input(next(task.test().batches(torch.arange(9), 9))[0]) for task in (small, large))
    assert torch.allclose(first, second, atol=1e-5)


# -------------------------------------------------------------------------------------------------------------- labels
def test_a_step_has_the_actions_that_its_middle_lies_in_and_background_where_there_is_none() -> None:
    labels, ambiguous, _ = Annotator(["Jump", "Swim"], "f")("v", 6, [(0.6, 2.5, "Jump"), (1.0, 3.0, "Swim")])
    assert labels.tolist() == [
        [True, False, False],
        [False, True, True],
        [False, False, True],
        [True, False, False],
        [True, False, False],
        [True, False, False],
    ]
    assert not ambiguous.any()


def test_a_segment_too_short_for_any_middle_gives_its_action_to_the_step_it_lies_in() -> None:
    labels, _, segments = Annotator(["Jump"], "f")("v", 4, [(2.6, 2.9, "Jump")])
    assert labels[:, 1].tolist() == [False, False, True, False]
    assert segments.tolist() == [[2.6, 2.9, 0.0]]


def test_annotations_outside_the_video_are_clipped_and_counted() -> None:
    annotate = Annotator(["Jump"], "some.json")
    given = [(-1.0, 2.0, "Jump"), (3.0, 9.0, "Jump"), (7.0, 9.0, "Jump"), (1.0, 1.0, "Jump"), (0.0, 5.0, "Jump")]
    _, _, segments = annotate("v", 5, given)
    assert segments.tolist() == [[0.0, 2.0, 0.0], [3.0, 5.0, 0.0], [0.0, 5.0, 0.0]]
    [note] = annotate.notes
    assert "'some.json': of 5 annotated segments, 2 reach beyond their video and are clipped, and 2 lie outside" in note
    assert Annotator(["Jump"], "f").notes == ()
    assert annotate.settle("skip")[1].startswith(
        "2 of 5 annotated segments of 'some.json' do not fit and are skipped: "
    )
    with pytest.raises(DataError) as caught:
        annotate.settle("refuse")
    for said in ("'v, step 3 to 9' (it reaches 4 steps beyond", "'v, step 7 to 9' (it reaches 4 steps beyond"):
        assert said in str(caught.value)


def test_overlapping_actions_are_both_positive_and_share_the_training_target() -> None:
    task = task_of()
    both = int(task.sets.of(task.videos.all[0])[4])
    assert both >= task.shape.classes
    assert task.sets.table[both].tolist() == [False, True, True]
    logits = torch.tensor([[0.3, 1.0, -0.5]])
    expected = -logits.log_softmax(-1)[0, 1:].mean()
    assert torch.allclose(task.loss(logits, torch.tensor([both])), expected)
    assert task.right(torch.tensor([[0.0, 0.0, 9.0], [9.0, 0.0, 0.0]]), torch.tensor([both, both])).item() == 0.5


# --------------------------------------------------------------------------------------------------------------- split
def videos_of(source: MemoryWindows | StreamedWindows) -> set[str]:
    timeline = source.timeline
    return {timeline.videos[number].name for number in timeline.video_of[source.current].tolist()}


@pytest.mark.parametrize("seed", range(5))
def test_no_video_has_windows_on_both_sides_of_the_split(seed: int) -> None:
    task = open_task("planted")
    train, validation = task.split(seed, 0.3)
    names = [videos_of(part) for part in (train, validation, task.test())]
    assert [len(part) for part in names] == [28, 12, 20]
    assert not names[0] & names[1]
    assert not (names[0] | names[1]) & names[2]
    again, _ = task.split(seed, 0.3)
    other, _ = task.split(seed + 1, 0.3)
    assert videos_of(again) == names[0] != videos_of(other)


def test_ambiguous_steps_are_not_trained_on_and_every_other_step_is() -> None:
    task = open_task("planted")
    train, validation = task.split(0, 0.3)
    assert not (train.targets == task.sets.ambiguous).any()
    assert (validation.targets == task.sets.ambiguous).any()
    trained = [video for video in task.videos.part("train") if video.name in videos_of(train)]
    assert len(train) == sum(int((~video.ambiguous).sum()) for video in trained)


def test_a_stride_thins_out_training_and_nothing_else() -> None:
    dense, thin = open_task("planted"), open_task("planted(stride=4)")
    (train, validation), (fewer, same) = dense.split(0, 0.3), thin.split(0, 0.3)
    assert len(train) / 4.3 < len(fewer) < len(train) / 3.7
    assert len(same) == len(validation)
    assert len(thin.test()) == len(dense.test())


def test_fewer_videos_are_the_same_for_every_seed() -> None:
    task = open_task("planted(train=10, test=5)")
    parts = [videos_of(part) for part in task.split(0, 0.3)]
    others = [videos_of(part) for part in task.split(1, 0.3)]
    assert parts[0] | parts[1] == others[0] | others[1]
    assert [len(part) for part in (*parts, videos_of(task.test()))] == [7, 3, 5]


# ----------------------------------------------------------------------------------------------------------- measuring
def test_a_model_that_knows_the_labels_has_the_highest_map_in_both_protocols() -> None:
    online = task_of()
    found = online.measure(Oracle(online), online.test())
    assert found["mAP"] == pytest.approx(1.0)
    assert found["accuracy"] == 1.0
    segments = task_of(protocol="segments")
    found = segments.measure(Oracle(segments), segments.test())
    assert found["mAP"] == pytest.approx(1.0)
    assert [name for name in found if "@" in name] == [f"mAP@{overlap}" for overlap in (0.3, 0.4, 0.5, 0.6, 0.7)]
    assert found["per-frame mAP"] == pytest.approx(1.0)


def test_ambiguous_steps_count_neither_in_the_metric_nor_in_the_loss() -> None:
    task = task_of()
    oracle = Oracle(task)
    before = task.measure(oracle, task.test())
    oracle.tables[3, 17:19] = torch.tensor([-9.0, 9.0, 0.0])  # sure of an action where nobody can tell
    assert task.measure(oracle, task.test()) == before
    oracle.tables[3, 16] = torch.tensor([-9.0, 9.0, 0.0])
    assert task.measure(oracle, task.test()) != before


def test_background_is_not_in_the_mean_over_actions() -> None:
    task = task_of()
    oracle = Oracle(task)
    oracle.tables[..., 0] = torch.randn(oracle.tables.shape[:2]) * 0.1 - 30  # background is never found
    found = task.measure(oracle, task.test())
    assert found["mAP"] == pytest.approx(1.0)
    accuracy = found["accuracy"]
    assert accuracy is not None
    assert accuracy < 0.9


def test_per_frame_map_of_a_task_is_scikit_learns_mean() -> None:
    from sklearn.metrics import average_precision_score

    task = open_task("planted")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, 6))
    source = task.test()
    with torch.no_grad():
        found = task.measure(model, source)
        scores = [model(task.to_input(x)).softmax(-1) for x, _ in source.batches(torch.arange(len(source)), 200)]
    kept = np.concatenate([~video.ambiguous for video in task.videos.part("test")])
    labels = np.concatenate([video.labels for video in task.videos.part("test")])[kept]
    rows = torch.cat(scores).numpy()[kept]
    expected = np.mean([average_precision_score(labels[:, c], rows[:, c]) for c in range(1, 6)])
    assert found["mAP"] == pytest.approx(expected, abs=1e-6)


def test_segments_are_looked_for_in_whole_videos_even_where_some_steps_are_asked_for() -> None:
    task = task_of(protocol="segments")
    train, _ = task.split(0, 0.3)
    some = task.measure(Oracle(task), train.take(torch.arange(0, len(train), 7)))
    assert some == task.measure(Oracle(task), train)


# ------------------------------------------------------------------------------------------------------------ learning
@pytest.mark.parametrize("protocol", ["online", "segments"])
def test_planted_actions_are_learnt_in_seconds(protocol: str) -> None:
    text = f"planted(protocol={protocol})"
    result = run(RunSpec(task=text, model=MODEL, recipe="none", seed=0, budget=BUDGET), open_task(text), device="cpu")
    first, last = result["curve"][0]["validation"]["mAP"], result["validation"]["mAP"]
    assert result["metric"] == "mAP"
    assert last > (0.7 if protocol == "online" else 0.3)
    assert last > first + 0.2
    assert result["test"]["mAP"] > 0.5 * last


def test_a_run_probes_attention_and_records_the_metric() -> None:
    spec = RunSpec(
        task="planted", model=MODEL, recipe="dropkey(0.2)", seed=0, budget=dataclasses.replace(BUDGET, epochs=1)
    )
    result = run(spec, open_task("planted"), device="cpu", probe_every=20)
    assert {probe["block"] for probe in result["probes"]} == {0, 1}
    assert all(probe["entropy"] is not None for probe in result["probes"])


def test_a_task_has_one_fingerprint_and_other_data_another() -> None:
    assert open_task("planted").fingerprint == open_task("planted(window=8)").fingerprint
    task, videos = task_of(), made(SEGMENTS)
    first = videos.all[0]
    other = dataclasses.replace(first, features=InMemory(first.features.read() + 1))
    relabelled = dataclasses.replace(first, labels=np.roll(first.labels, 1, axis=0))
    prints = {task.fingerprint, task_of().fingerprint}
    assert len(prints) == 1
    for changed in (other, relabelled):
        prints.add(ActionTask("made", dataclasses.replace(videos, all=(changed, *videos.all[1:]))).fingerprint)
    assert len(prints) == 3


# --------------------------------------------------------------------------------------------------------------- files
def filed(folder: Path, count: int, steps: int, width: int) -> Videos:
    """Large videos in files, each with one action."""
    annotate, videos = Annotator(["Jump"], "made"), []
    for number in range(count):
        file = folder / f"{number}.npy"
        np.save(file, np.random.default_rng(number).random((steps, width), dtype=np.float32))
        part = "train" if number < count - 2 else "test"
        videos.append(Video(str(number), part, FeatureFiles((file,)), *annotate(str(number), steps, [(3, 9, "Jump")])))
    return Videos(tuple(videos), (BACKGROUND, "Jump"), width, np.dtype(np.float32))


def test_windows_read_from_files_are_those_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    videos = filed(tmp_path, count=6, steps=30, width=5)
    held = ActionTask("held", videos, window=8)
    whole = [held.split(0, 0.3), held.test(), held._normalisation_on(torch.device("cpu"))]
    monkeypatch.setattr(memory, "MEMORY_LIMIT", 100)
    streamed = ActionTask("streamed", videos, window=8)
    read = [streamed.split(0, 0.3), streamed.test(), streamed._normalisation_on(torch.device("cpu"))]
    assert isinstance(read[1], StreamedWindows)
    assert not read[1].in_memory
    for one, other in [*zip(whole[0], read[0], strict=True), (whole[1], read[1])]:
        other.workers = 0
        order = torch.randperm(len(one))[:40]
        for (x, y), (x_read, y_read) in zip(one.batches(order, 16), other.batches(order, 16), strict=True):
            assert torch.equal(x, x_read)
            assert torch.equal(y, y_read)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole[2], read[2], strict=True))


@pytest.mark.parametrize("protocol", ["online", "segments"])
def test_a_run_is_the_same_whether_features_are_held_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: Literal["online", "segments"]
) -> None:
    videos = filed(tmp_path, count=6, steps=30, width=5)
    spec = RunSpec(task="filed", model="encoder(width=8, heads=2)", recipe="dropkey(0.2)", seed=0, budget=SHORT)
    held = run(spec, ActionTask("filed", videos, protocol, window=8), device="cpu")
    monkeypatch.setattr(memory, "MEMORY_LIMIT", 100)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # no worker processes
    streamed = ActionTask("filed", videos, protocol, window=8)
    assert not streamed.in_memory
    read = run(spec, streamed, device="cpu")
    assert [read[part] for part in ("curve", "train", "validation", "test")] == [
        held[part] for part in ("curve", "train", "validation", "test")
    ]


def test_memory_is_bounded_by_one_video_where_features_are_read_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MEMORY_LIMIT", 100)
    steps, width = 600, 256
    task = ActionTask("large", filed(tmp_path, count=12, steps=steps, width=width), window=8)
    video = steps * width * 8  # in float64, as the statistics have it
    tracemalloc.start()
    try:
        train, _ = task.split(0, 0.3)
        train.workers = 0
        task._normalisation_on(torch.device("cpu"))
        for _ in train.batches(torch.randperm(len(train))[:200], 50):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * video, "of twelve"


# ----------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("planted(protocol=offline)", "protocol is 'offline'; it must be 'online' or 'segments'"),
        ("planted(window=0)", "window is 0; it must be a whole number"),
        ("planted(windw=3)", "no option 'windw'. Did you mean 'window'"),
    ],
)
def test_a_wrong_option_is_refused(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        open_task(text)


def test_too_many_videos_are_refused() -> None:
    with pytest.raises(DataError, match="asks for 41 train videos, and there are 40"):
        open_task("planted(train=41)").split(0, 0.3)
    with pytest.raises(DataError, match=r"has 2 training videos; a share of 0\.1"):
        open_task("planted(train=2)").split(0, 0.1)


def test_a_set_without_any_action_is_refused() -> None:
    with pytest.raises(DataError, match="'made' has no action in its test videos"):
        ActionTask("made", made([[(1, 3, "Jump")], []]))


def test_augmentations_of_images_are_refused() -> None:
    with pytest.raises(ParameterError, match="no augmentation 'crop-flip'"):
        open_task("planted").augmentation("crop-flip")


def test_the_test_set_is_not_opened_before_it_is_asked_for() -> None:
    task = task_of()
    task.split(0, 0.3)
    assert "_held_out" not in vars(task)
