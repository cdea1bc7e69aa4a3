"""Questions in the layout of VQAv2, in other places, by other names and with ids written otherwise: the same data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from attemper.lab.errors import DataError
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.source import Source
from attemper.lab.tasks.vqa.task import QuestionTask
from question_files import annotations_of, questions_of, write_v2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_v2(tmp_path / "v2")


def opened(folder: Path) -> QuestionTask:
    task = open_task(f"vqa:{folder}(size=16)", folder.parent)
    assert isinstance(task, QuestionTask)
    return task


def parts_of(task: QuestionTask) -> tuple[Source, Source, Source]:
    return (*task.split(0, 0.25), task.test())


@pytest.mark.parametrize("layout", ["png", "coco2017", "folders", "without years"])
def test_the_same_files_in_other_places_and_by_other_names_are_the_same_data(layout: str, folder: Path) -> None:
    wanted = [next(part.batches(torch.arange(6), 6)) for part in parts_of(opened(folder))]
    for file in sorted(folder.rglob("*.*")):
        if layout == "png" and file.suffix == ".jpg":
            with Image.open(file) as image:
                image.save(file.with_suffix(".png"))
            file.unlink()
        elif layout == "coco2017" and file.suffix == ".jpg":
            file.rename(file.with_name(file.name.rpartition("_")[2]))
        elif layout == "folders" and file.suffix == ".json":
            place = folder / ("Questions" if "questions" in file.name else "Annotations") / file.name
            place.parent.mkdir(exist_ok=True)
            file.rename(place)
        elif layout == "without years":
            file.rename(file.with_name(file.name.replace("2014", "")))
    for part in ("train2014", "val2014"):
        if layout == "folders":
            (folder / "Images" / "mscoco").mkdir(parents=True, exist_ok=True)
            (folder / part).rename(folder / "Images" / "mscoco" / part)
        elif layout == "without years":
            (folder / part).rename(folder / part.removesuffix("2014"))
    for one, part in zip(wanted, parts_of(opened(folder)), strict=True):
        for mine, other in zip(one, next(part.batches(torch.arange(6), 6)), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("written", [float, str], ids=["7.0", "'7'"])
def test_numbers_of_questions_and_images_may_be_decimals_and_texts(written: Any, folder: Path) -> None:
    wanted = opened(folder)

    for file, name in ((questions_of(folder), "questions"), (annotations_of(folder), "annotations")):
        held = json.loads(file.read_text())
        for entry in held[name]:
            entry |= {key: written(entry[key]) for key in ("question_id", "image_id")}
        file.write_text(json.dumps(held))
        assert opened(folder).pool == wanted.pool, "the other file need not be written alike"


# ------------------------------------------------------------------------------------------------------------- answers
def change(file: Path, kind: str, make: Callable[[list[Any]], None]) -> None:
    held = json.loads(file.read_text())
    make(held[kind])
    file.write_text(json.dumps(held))


def test_an_annotation_about_another_image_is_told_with_both(folder: Path) -> None:
    change(questions_of(folder), "questions", lambda each: each[3].update(image_id=7))
    with pytest.raises(DataError, match=r"about another image than its annotation: '.*' \(7, and \d there\)"):
        opened(folder)


def test_questions_that_fewer_than_ten_people_answered_are_counted_with_what_can_be_reached(folder: Path) -> None:
    assert not any("fewer than 10" in note for note in opened(folder).notes)

    def shorten(each: list[Any]) -> None:
        for note in each:
            note["answers"] = [{"answer": word} for word in ("yes", "yes", "no")]

    change(annotations_of(folder, "val2014"), "annotations", shorten)
    (note,) = [note for note in opened(folder).notes if "fewer than 10" in note]
    assert note.startswith("test: 12 questions")
    assert "12 have fewer than 10 answers, so that 44.4% is the most a model can reach" in note


class Says(torch.nn.Module):
    """Gives the same answer to every question."""

    def __init__(self, answer: int, answers: int) -> None:
        super().__init__()
        self.logits = torch.nn.functional.one_hot(torch.tensor(answer), answers).float()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(inputs), -1)


def test_captions_say_what_people_said_unless_an_answer_is_as_right_as_any(folder: Path) -> None:
    def write(each: list[Any]) -> None:
        for at, words in enumerate((["zebra"] * 10, ["red"] * 5 + ["yes"] * 5, ["red"] * 10)):
            each[at] |= {"multiple_choice_answer": words[0], "answers": [{"answer": word} for word in words]}

    change(annotations_of(folder, "val2014"), "annotations", write)
    task = opened(folder)
    assert {"red", "yes"} <= set(task.classes)
    for answer in ("red", "yes"):
        model = Says(task.classes.index(answer), len(task.classes))
        captions = [each.caption for each in task.pictures(model, task.test(), 12)]
        assert captions[0].endswith("(people say: none that is known)")
        assert "people say" not in captions[1], "half of them said either"
        assert ("people say: red" in captions[2]) == (answer == "yes")
