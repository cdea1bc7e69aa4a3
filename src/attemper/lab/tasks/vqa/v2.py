"""Questions and annotations in the JSON layout of VQAv2; what is wrong with them is found at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attemper.errors import UnreadableError
from attemper.files import read_json_object
from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import listed
from attemper.lab.tasks.faults import Faults
from attemper.lab.tasks.notifications import progress
from attemper.lab.tasks.vqa.answers import commonest, spaced
from attemper.lab.tasks.vqa.questions import OTHER, Part, Question

MOST_BYTES = 2**31
"""Of a JSON file; those of VQAv2 have up to 220 MB."""
QUESTIONS, ANNOTATIONS = "_questions.json", "_annotations.json"
TRAIN, TEST = "train2014", "val2014"
"""The training part, and the one that is tested on: the answers of VQAv2's own test part are not public."""
STEP = 20_000


@dataclass(frozen=True)
class Layout:
    """The two files of a part, and where its images are."""

    folder: Path
    part: str
    questions: Path
    annotations: Path

    def image(self, number: int) -> Path:
        """The file of an image."""
        return self.folder / self.part / f"COCO_{self.part}_{number:012d}.jpg"


def find_layout(folder: Path, part: str) -> Layout:
    """The files of a part, such as v2_OpenEnded_mscoco_train2014_questions.json; names may have other beginnings."""
    found = [_one(folder, part, ending) for ending in (QUESTIONS, ANNOTATIONS)]
    if not (folder / part).is_dir():
        raise DataError(f"'{folder}' has no folder '{part}' with images such as 'COCO_{part}_000000000001.jpg'.")
    return Layout(folder, part, *found)


def _one(folder: Path, part: str, ending: str) -> Path:
    found = sorted(each for each in folder.glob(f"*{part}{ending}") if each.is_file())
    if len(found) == 1:
        return found[0]
    usual = f"v2_OpenEnded_mscoco_{part}{ending}" if ending == QUESTIONS else f"v2_mscoco_{part}{ending}"
    if found:
        raise DataError(f"'{folder}' has {len(found)} files that end with '{part}{ending}': keep one, such as '{usual}'.")
    there = sorted(each.name for each in folder.iterdir())
    has = f"It has: {listed(there)}" if there else "It is empty"
    raise DataError(f"'{folder}' has no '{usual}', as VQAv2 has it. {has}.")


def read_parts(folder: Path, faults: Faults) -> list[Part]:
    """The training and the test part; what is wrong with single questions goes into the faults."""
    wrong, layouts = [], []
    for part in (TRAIN, TEST):
        try:
            layouts.append(find_layout(folder, part))
        except DataError as error:
            wrong.append(str(error))
    held = []
    for layout in layouts:
        for file, name in ((layout.questions, "questions"), (layout.annotations, "annotations")):
            try:
                held.append(_records(file, name))
            except (DataError, UnreadableError) as error:
                wrong.append(str(error))
    if wrong:
        raise DataError("\n  ".join([f"'{folder}' is not in the layout of VQAv2:", *wrong]) if wrong[1:] else wrong[0])
    return [_read(layout, held[2 * at], held[2 * at + 1], faults) for at, layout in enumerate(layouts)]


def _records(file: Path, name: str) -> list[Any]:
    """The list under a name in a JSON file."""
    whole = read_json_object(file, most=MOST_BYTES)
    found = whole.get(name)
    if not isinstance(found, list):
        has = ", ".join(map(str, list(whole)[:8])) or "nothing"
        raise DataError(f"'{file}' has no list '{name}', as VQAv2 has it; it has: {has}.")
    if not found:
        raise DataError(f"'{file}' has no {name}: its list is empty.")
    return found


def _read(layout: Layout, asked: list[Any], annotated: list[Any], faults: Faults) -> Part:
    """One part. Each question needs a text, one annotation about the same image, and answers."""
    notes = _annotations(layout.annotations.name, annotated, faults)
    numbers: dict[int, int] = {}
    questions, answered = [], set()
    seen = Counter(each.get("question_id") for each in asked if isinstance(each, dict) and _whole(each.get("question_id")))
    for at, each in enumerate(asked):
        if at % STEP == 0:
            progress(f"reading {layout.questions.name}", at, len(asked))
        place = _place(layout.questions.name, each, at)
        if isinstance(each, dict) and _whole(each.get("question_id")):
            answered.add(each["question_id"])
        note = _paired(each, place, notes, seen, faults)
        if note is None:
            continue
        given = tuple(spaced(answer["answer"]) for answer in note["answers"])
        named = note.get("multiple_choice_answer")
        questions.append(
            Question(
                image=numbers.setdefault(each["image_id"], len(numbers)),
                text=each["question"],
                commonest=spaced(named) if isinstance(named, str) and named.strip() else commonest(given),
                given=given,
                kind=str(note.get("question_type") or OTHER),
            )
        )
    progress(f"reading {layout.questions.name}", len(asked), len(asked))
    for number in notes.keys() - answered:
        faults.add("annotations have no question", f"{layout.annotations.name}: question_id {number}")
    files = tuple(layout.image(number) for number in numbers)
    return Part(layout.questions.name, files, tuple(questions))


def _annotations(file: str, annotated: list[Any], faults: Faults) -> Mapping[int, Any]:
    """Number of a question → its annotation; those without a number and second ones are faults."""
    found: dict[int, Any] = {}
    for at, each in enumerate(annotated):
        place = _place(file, each, at)
        if not isinstance(each, dict) or not _whole(each.get("question_id")):
            faults.add("annotations have no question_id that is a whole number", place)
        elif each["question_id"] in found:
            faults.add("annotations are about a question that another is about", place)
        else:
            found[each["question_id"]] = each
    return found


def _paired(each: Any, place: str, notes: Mapping[int, Any], seen: Counter[Any], faults: Faults) -> Any:
    """The annotation of a question, if both are whole; otherwise what is wrong goes into the faults."""
    before = sum(1 for _ in _wrong_question(each, place, seen, faults))
    if before:
        return None
    note = notes.get(each["question_id"])
    if note is None:
        faults.add("questions have no annotation", place)
        return None
    if "image_id" in note and note["image_id"] != each["image_id"]:
        faults.add("questions are about another image than their annotation", place, _images(each, note))
        return None
    answers = note.get("answers")
    if not isinstance(answers, list) or not answers:
        faults.add("questions have no answers", place)
        return None
    texts = [answer.get("answer") if isinstance(answer, dict) else None for answer in answers]
    if not all(isinstance(text, str) for text in texts):
        faults.add("questions have answers that are no text", place)
        return None
    if not any(text.strip() for text in texts):
        faults.add("questions have answers without a word", place)
        return None
    return note


def _images(question: Mapping[str, Any], note: Mapping[str, Any]) -> str:
    return f"{question['image_id']} and {note['image_id']}"


def _wrong_question(each: Any, place: str, seen: Counter[Any], faults: Faults) -> Iterator[None]:
    """One item for everything that is wrong with a question itself."""
    if not isinstance(each, dict) or not _whole(each.get("question_id")):
        faults.add("questions have no question_id that is a whole number", place)
        yield
        return
    if seen[each["question_id"]] > 1:
        faults.add("questions have the question_id of another", place)
        yield
    if not _whole(each.get("image_id")):
        faults.add("questions have no image_id that is a whole number", place)
        yield
    text = each.get("question")
    if not isinstance(text, str) or not re.search(r"\w", text):
        faults.add("questions have no text", place)
        yield


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _place(file: str, each: Any, at: int) -> str:
    number = each.get("question_id") if isinstance(each, dict) else None
    return f"{file}: question_id {number}" if _whole(number) else f"{file}: number {at + 1} in the list"
