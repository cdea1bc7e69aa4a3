"""Questions and annotations in the JSON layout of VQAv2; what is wrong with them is found at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
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
        raise DataError(
            f"'{folder}' has {len(found)} files that end with '{part}{ending}': keep one, such as '{usual}'."
        )
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
    file = layout.questions.name
    notes = _annotations(layout.annotations.name, annotated, faults)
    seen = Counter(number for each in asked if (number := _number(each, "question_id")) is not None)
    for number in notes.keys() - seen.keys():
        faults.add("annotations have no question", f"{layout.annotations.name}: question_id {number}")
    images: dict[int, int] = {}
    questions = []
    for at, each in enumerate(asked):
        if at % STEP == 0:
            progress(f"reading {file}", at, len(asked))
        number = _number(each, "question_id")
        note = None if number is None else notes.get(number)
        wrong = _wrong_question(each, seen) or _wrong_annotation(each, note)
        for kind in wrong:
            faults.add(kind, _place(file, each, at))
        if not wrong:
            questions.append(_question(each, note, images))
    progress(f"reading {file}", len(asked), len(asked))
    return Part(file, tuple(map(layout.image, images)), tuple(questions))


def _question(each: Mapping[str, Any], note: Any, images: dict[int, int]) -> Question:
    """A question with its annotation, both whole. images: the numbers of those met before; a new one is added."""
    given = tuple(spaced(answer["answer"]) for answer in note["answers"])
    named = note.get("multiple_choice_answer")
    return Question(
        image=images.setdefault(each["image_id"], len(images)),
        text=each["question"],
        commonest=spaced(named) if isinstance(named, str) and named.strip() else commonest(given),
        given=given,
        kind=str(note.get("question_type") or OTHER),
    )


def _annotations(file: str, annotated: list[Any], faults: Faults) -> Mapping[int, Any]:
    """Number of a question → its annotation; those without a number and second ones are faults."""
    found: dict[int, Any] = {}
    for at, each in enumerate(annotated):
        number = _number(each, "question_id")
        if number is None:
            faults.add("annotations have no question_id that is a whole number", _place(file, each, at))
        elif number in found:
            faults.add("annotations are about a question that another is about", _place(file, each, at))
        else:
            found[number] = each
    return found


def _wrong_question(each: Any, seen: Counter[int]) -> list[str]:
    """What is wrong with a question itself."""
    number = _number(each, "question_id")
    if number is None:
        return ["questions have no question_id that is a whole number"]
    text = each.get("question")
    found = {
        "questions have the question_id of another": seen[number] > 1,
        "questions have no image_id that is a whole number": _number(each, "image_id") is None,
        "questions have no text": not isinstance(text, str) or not re.search(r"\w", text),
    }
    return [kind for kind, is_so in found.items() if is_so]


def _wrong_annotation(each: Mapping[str, Any], note: Any) -> list[str]:
    """The first thing that is wrong with what people said to a question."""
    if note is None:
        return ["questions have no annotation"]
    if note.get("image_id", each["image_id"]) != each["image_id"]:
        return ["questions are about another image than their annotation"]
    answers = note.get("answers")
    if not isinstance(answers, list) or not answers:
        return ["questions have no answers"]
    texts = [answer.get("answer") if isinstance(answer, dict) else None for answer in answers]
    if not all(isinstance(text, str) for text in texts):
        return ["questions have answers that are no text"]
    return [] if any(map(str.strip, map(str, texts))) else ["questions have answers without a word"]


def _number(each: Any, name: str) -> int | None:
    """A whole number of at least 0 under a name, if there is one."""
    value = each.get(name) if isinstance(each, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _place(file: str, each: Any, at: int) -> str:
    number = _number(each, "question_id")
    return f"{file}: number {at + 1} in the list" if number is None else f"{file}: question_id {number}"
