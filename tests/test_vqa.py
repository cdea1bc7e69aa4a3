"""Questions about images: files read as they are, answers scored, runs that go on and are shared like all others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attemper.errors import ParameterError
from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.tasks import source as sources
from attemper.lab.tasks.base import Illustrated, Task
from attemper.lab.tasks.registry import open_task, verify
from attemper.lab.tasks.vocabulary import BEGIN, PADDING, UNKNOWN
from attemper.lab.tasks.vqa.answers import vqa_accuracy
from attemper.lab.tasks.vqa.source import UNKNOWN_ANSWER, QuestionSource
from attemper.lab.tasks.vqa.task import QuestionTask
from attemper.lab.training import loop
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from endings import assert_same_end, timeless
from question_files import annotations_of, questions_of, write_v2

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = "vqa:shapes(train=300, test=60)"
MODEL = "two-stream(width=16, heads=2, depth=1, image_depth=1)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_v2(tmp_path / "v2")


def opened(folder: Path, options: str = "size=16") -> QuestionTask:
    task = open_task(f"vqa:{folder}({options})")
    assert isinstance(task, QuestionTask)
    return task


def parts_of(task: Task, seed: int = 0) -> list[QuestionSource]:
    parts = [*task.split(seed, 0.3), task.test()]
    assert all(isinstance(part, QuestionSource) for part in parts)
    return parts  # type: ignore[return-value]


def change(file: Path, name: str, how: Callable[[list[Any]], Any]) -> None:
    """Change the list under a name in a JSON file."""
    whole = json.loads(file.read_text())
    how(whole[name])
    file.write_text(json.dumps(whole))


# -------------------------------------------------------------------------------------------------------------- files
def test_a_folder_in_the_layout_of_vqav2_becomes_a_task(folder: Path) -> None:
    task = opened(folder)
    assert isinstance(task, Task)
    assert isinstance(task, Illustrated)
    assert task.primary == "vqa_accuracy"
    assert set(task.classes) == {"red", "green", "blue", "yes", "no"}
    train, validation, test = parts_of(task)
    assert len(train) + len(validation) == 24
    assert len(test) == 12
    assert verify(f"vqa:{folder}(size=16)")[0].endswith("24 training samples and 12 test samples of " + str(task.shape))


def test_answers_that_agree_in_part_are_right_in_part(folder: Path) -> None:
    task = opened(folder)
    test = parts_of(task)[2]
    ((_, scores),) = test.batches(torch.arange(len(test)), len(test))
    for question, row in zip(task.held_out.questions, scores, strict=True):
        wanted = [vqa_accuracy(answer, question.given) for answer in task.classes]
        torch.testing.assert_close(row, torch.tensor(wanted))
    assert {round(float(score), 2) for score in scores.flatten()} == {0.0, 1.0}


def test_all_of_an_image_is_kept_and_stored_pixels_and_words_come_back(folder: Path) -> None:
    task = opened(folder, "size=8")
    test = parts_of(task)[2]
    ((stored, _),) = test.batches(torch.arange(2), 2)
    images, words = task.shape.stored(stored)
    assert images.shape == (2, 3, 8, 8)
    assert images[0].flatten(1).amax(1).tolist() == images[0].flatten(1).amin(1).tolist()  # one colour, no border
    assert words[0, 0] == BEGIN
    assert task.vocabulary.decode(words[0].tolist()) == ["what", "color", "is", "it", "?"]
    again, same = task.shape.parted(task.to_input(stored))
    assert torch.equal(same, words)
    assert again.shape == images.shape


def test_word_numbers_of_two_bytes_are_stored_whole() -> None:
    shape = open_task("vqa:shapes").shape
    words = torch.tensor([[1, 255, 256, 65_535] + [0] * (shape.length - 4)])
    images = torch.randint(256, (1, 3, 16, 16), dtype=torch.uint8)
    again = shape.stored(shape.store(images, words))
    assert torch.equal(again[0], images)
    assert torch.equal(again[1], words)
    assert torch.equal(shape.parted(shape.join(images.float(), words))[1], words)


def test_all_questions_about_an_image_are_on_one_side_by_the_seed(folder: Path) -> None:
    first, again, other = (parts_of(opened(folder), seed) for seed in (0, 0, 1))
    for train, validation, _ in (first, other):
        assert not set(train.image.tolist()) & set(validation.image.tolist())
    assert torch.equal(first[1].image, again[1].image)
    assert not torch.equal(first[1].image, other[1].image)


def test_the_vocabulary_and_the_answers_come_from_the_training_questions_alone(folder: Path) -> None:
    change(questions_of(folder, "val2014"), "questions", lambda all_: all_[0].update(question="zebra zebra ?"))
    change(
        annotations_of(folder, "val2014"),
        "annotations",
        lambda all_: all_[0].update(multiple_choice_answer="zebra", answers=[{"answer": "zebra"}] * 10),
    )
    task = opened(folder)
    assert "zebra" not in task.vocabulary.words
    assert "zebra" not in task.classes
    test = parts_of(task)[2]
    assert test.words[0, :4].tolist()[1:3] == [UNKNOWN, UNKNOWN]
    assert test.targets[0] == UNKNOWN_ANSWER
    assert float(test.scores[0].sum()) == 0
    assert any("1 have none of the 5 answers" in note for note in task.notes)


def test_a_model_chooses_from_the_most_frequent_answers_and_learns_from_no_other_question(folder: Path) -> None:
    task = opened(folder, "size=16, answers=2")
    assert task.shape.classes == 2
    train, validation, test = parts_of(task)
    assert (train.scores.sum(1) > 0).all()
    assert len(test) == 12
    assert len(train) + len(validation) < 24
    with pytest.raises(DataError, match="has 1 answer to choose from; it needs at least 2"):
        opened(folder, "answers=1")


def test_long_questions_are_cut_and_short_ones_padded(folder: Path) -> None:
    task = opened(folder, "size=16, length=2")
    assert task.shape.length == 3
    assert parts_of(task)[2].words.shape == (12, 3)
    longest = parts_of(opened(folder))[2].words
    assert longest.shape[1] == 6
    assert longest[1, -1] == PADDING


def test_fewer_questions_are_the_same_ones_for_everybody(folder: Path) -> None:
    one, other = (parts_of(opened(folder, "size=16, train=10, test=4"), seed) for seed in (0, 1))
    assert len(one[0]) + len(one[1]) == len(other[0]) + len(other[1]) == 10
    assert torch.equal(one[2].words, other[2].words)
    with pytest.raises(DataError, match="asks for 99 training questions, and there are 24"):
        opened(folder, "train=99")


def test_the_fingerprint_follows_questions_answers_and_images(folder: Path) -> None:
    seen = [opened(folder).fingerprint, opened(folder, "size=8").fingerprint, opened(folder, "train=8").fingerprint]
    change(questions_of(folder), "questions", lambda all_: all_[0].update(question="What colour is it?"))
    seen.append(opened(folder).fingerprint)
    change(annotations_of(folder), "annotations", lambda all_: all_[0]["answers"][0].update(answer="pink"))
    seen.append(opened(folder).fingerprint)
    image = folder / "val2014" / "COCO_val2014_000000000001.jpg"
    image.write_bytes((folder / "val2014" / "COCO_val2014_000000000002.jpg").read_bytes())
    seen.append(opened(folder).fingerprint)
    assert len(set(seen)) == len(seen)
    assert opened(folder).fingerprint == seen[-1]


def test_images_that_do_not_fit_into_memory_are_the_same_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def batches() -> list[torch.Tensor]:
        train = parts_of(opened(folder))[0]
        assert train.in_memory == (sources.MEMORY_LIMIT > 0)
        return [each for pair in train.batches(torch.arange(len(train)).flip(0), 5) for each in pair]

    held = batches()
    monkeypatch.setattr(sources, "MEMORY_LIMIT", 0)
    for one, other in zip(held, batches(), strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------------------------------ what is wrong
def spoil(folder: Path) -> None:
    """One of everything that can be wrong with a question or its answers."""

    def questions(all_: list[Any]) -> None:
        all_[0]["question"] = " ? "
        all_[1]["question_id"] = "eleven"
        all_[2]["image_id"] = None
        all_[3]["image_id"] = 1
        all_[4]["question_id"] = all_[5]["question_id"]
        all_.append({"image_id": 1, "question": "Who?", "question_id": 999})
        all_.append("no object")

    def annotations(all_: list[Any]) -> None:
        all_[8]["answers"] = []
        all_[9]["answers"][3] = {"answer": 4}
        all_[10]["answers"] = [{"answer": " "}] * 10
        all_.append({**all_[0]})
        all_.append({"question_id": None})

    change(questions_of(folder), "questions", questions)
    change(annotations_of(folder), "annotations", annotations)
    (folder / "train2014" / "COCO_train2014_000000000007.jpg").write_bytes(b"no image at all")
    (folder / "train2014" / "COCO_train2014_000000000008.jpg").unlink()


FAULTS = (
    "1 question has no text",
    "2 questions have no question_id that is a whole number",
    "1 question has no image_id that is a whole number",
    "1 question is about another image than its annotation",
    "1 question has the question_id of another",
    "1 question has no annotation: 'v2_OpenEnded_mscoco_train2014_questions.json: question_id 999'",
    "1 question has no answers",
    "1 question has answers that are no text",
    "1 question has answers without a word",
    "1 annotation is about a question that another is about",
    "1 annotation has no question_id that is a whole number",
    "2 annotations have no question",
    "2 images cannot be read: 'train2014/COCO_train2014_000000000007.jpg' (it is no image that Pillow knows)",
)


def test_everything_that_is_wrong_is_told_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(folder)
    with pytest.raises(DataError) as caught:
        opened(folder)
    for fault in FAULTS:
        assert fault in str(caught.value), fault
    assert "broken=skip" in str(caught.value)
    assert main(["data", "verify", f"vqa:{folder}"]) == 2
    assert all(fault in capsys.readouterr().err for fault in FAULTS[:1])


def test_what_is_wrong_can_be_left_out_and_is_named(folder: Path) -> None:
    spoil(folder)
    with pytest.warns(UserWarning, match="cannot be read"):
        task = opened(folder, "size=16, broken=skip")
    left = sum(map(len, parts_of(task)[:2]))
    assert left == 24 - 5 - 1 - 3 - 4  # spoilt questions, the other of a pair, spoilt answers, lost images
    assert sum(" question" in note.partition(": ")[2] for note in task.notes) >= 8


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: questions_of(folder).unlink(), "has no 'v2_OpenEnded_mscoco_train2014_questions.json'"),
        (lambda folder: questions_of(folder).write_text("[1, 2"), "is no JSON, or damaged"),
        (lambda folder: questions_of(folder).write_text('{"images": []}'), "has no list 'questions'.*it has: images"),
        (lambda folder: questions_of(folder).write_text('{"questions": []}'), "its list is empty"),
        (lambda folder: annotations_of(folder, "val2014").write_text("[]"), "it must be an object"),
        (lambda folder: (folder / "copy_train2014_questions.json").touch(), "2 files of that kind for train"),
        (lambda folder: (folder / "val2014").rename(folder / "test"), "has no folder 'val2014' with images"),
    ],
)
def test_another_layout_is_refused_with_what_would_be_right(damage: Any, message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises((DataError, Exception), match=message) as caught:
        opened(folder)
    assert isinstance(caught.value, DataError)


def test_all_files_of_another_layout_are_named_at_once(folder: Path) -> None:
    annotations_of(folder).write_text('{"annotations": 3}')
    questions_of(folder, "val2014").write_text("")
    with pytest.raises(DataError) as caught:
        opened(folder)
    assert "train2014_annotations.json" in str(caught.value)
    assert "val2014_questions.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vqa:shapes(size=32)", "made-up shapes are drawn at 16"),
        ("vqa:shapes(broken=skip)", "has no files of yours"),
        ("vqa:nowhere", "is not a folder"),
        ("vqa:shapes(normalise=imagenet)", "has no images in bytes that could be normalised"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, message: str) -> None:
    with pytest.raises((ParameterError, DataError), match=message):
        open_task(name)


def test_augmentations_that_would_change_answers_are_refused_and_shifts_leave_questions_alone() -> None:
    task = open_task(SHAPES)
    assert isinstance(task, QuestionTask)
    with pytest.raises(ParameterError, match="There is no augmentation 'crop-flip'"):
        task.augmentation("crop-flip")
    ((stored, targets),) = task.test().batches(torch.arange(8), 8)
    moved, aims = task.augmentation("shift(3)")(stored, targets, classes=9, to_input=task.to_input, seed=1)
    before, after = (task.shape.parted(x) for x in (task.to_input(stored), moved))
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])
    assert torch.equal(aims, targets)


# ------------------------------------------------------------------------------------------------------------ metrics
class Fixed(torch.nn.Module):
    """Answers with what it was given, whatever is asked."""

    def __init__(self, answers: torch.Tensor) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(()))
        self.answers, self.at = answers, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        chosen = self.answers[self.at : self.at + len(inputs)]
        self.at += len(inputs)
        return torch.nn.functional.one_hot(chosen, int(self.answers.max()) + 1).float() * 9


def test_metrics_and_tables_are_what_the_evaluation_of_vqav2_gives(folder: Path) -> None:
    task = opened(folder, "size=8")
    test = parts_of(task)[2]
    answers = torch.arange(len(test)) % task.shape.classes
    answers[0] = task.shape.classes - 1
    found = task.measure(Fixed(answers).eval(), test)
    said = [task.classes[answer] for answer in answers.tolist()]
    by_hand = [vqa_accuracy(*each) for each in zip(said, (q.given for q in task.held_out.questions), strict=True)]
    exact = [answer == q.commonest for answer, q in zip(said, task.held_out.questions, strict=True)]
    assert found["vqa_accuracy"] == pytest.approx(sum(by_hand) / 12)
    assert found["accuracy"] == pytest.approx(sum(exact) / 12)
    details = task.details(Fixed(answers).eval(), test)
    assert details is not None
    rows = {row["name"]: row for row in details["table"]["rows"]}
    assert rows["what color"]["count"] == rows["is it"]["count"] == 6
    assert rows["what color"]["value"] == pytest.approx(sum(by_hand[::2]) / 6)


def test_the_loss_of_several_people_is_binary_and_of_one_a_choice(folder: Path) -> None:
    logits, targets = torch.randn(3, 5), torch.rand(3, 5)
    chances = logits.sigmoid()
    wanted = -(targets * chances.log() + (1 - targets) * (1 - chances).log()).sum(1).mean()
    torch.testing.assert_close(opened(folder).loss(logits, targets), wanted)
    single = torch.eye(5)[:3]
    task = open_task(SHAPES)
    torch.testing.assert_close(task.loss(logits, single), -(logits.log_softmax(1) * single).sum(1).mean())


# --------------------------------------------------------------------------------------------------------------- runs
def spec(recipe: str = "dropkey(0.2)", model: str = MODEL, **budget: Any) -> RunSpec:
    given = {"epochs": 3, "batch_size": 30, "lr": 3e-3, "warmup_epochs": 1, "augment": "shift(1)", **budget}
    return RunSpec(task=SHAPES, model=model, recipe=recipe, seed=3, budget=Budget(**given))


def test_shapes_are_learnt_in_seconds_with_tables_and_pictures() -> None:
    budget = Budget(epochs=3, batch_size=50, lr=3e-3, warmup_epochs=0.5)
    model = "two-stream(width=32, depth=1, image_depth=1)"
    task = open_task("vqa:shapes")
    result = run(RunSpec(task=task.name, model=model, recipe="none", seed=0, budget=budget), task)
    assert result["test"]["accuracy"] > 0.6  # the commonest answer to each kind of question gives 45 %
    details = result["test_details"]
    assert [row["name"] for row in details["table"]["rows"]] == ["is the", "is there", "what color", "what shape"]
    assert len(details["pictures"]) == 4
    assert "?" in details["pictures"][0]["caption"]


class StopError(Exception):
    pass


def test_a_run_that_is_stopped_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)
    whole = run(spec(), open_task(SHAPES), folder=tmp_path / "whole")

    def stop(event: dict[str, Any]) -> None:
        if event["validation"] is not None and event["epoch"] == 2:
            raise StopError

    with pytest.raises(StopError):
        run(spec(), open_task(SHAPES), folder=tmp_path / "cut", progress=stop)
    again = run(spec(), open_task(SHAPES), folder=tmp_path / "cut")
    assert timeless(again) == timeless(whole)
    assert_same_end(tmp_path / "whole", tmp_path / "cut")
