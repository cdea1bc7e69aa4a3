"""Questions and annotations in the JSON layout of VQAv2; what is wrong with them is found at once."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attemper.errors import UnreadableError
from attemper.files import read_json_object
from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import listed, shown
from attemper.lab.tasks.faults import Fault, Faults
from attemper.lab.tasks.image_files import IMAGES
from attemper.lab.tasks.json_keys import as_key, as_text
from attemper.lab.tasks.notifications import progress
from attemper.lab.tasks.vqa.answers import commonest, spaced
from attemper.lab.tasks.vqa.questions import OTHER, Part, Question

MOST_BYTES = 2**31
"""Of a JSON file; those of VQAv2 have up to 220 MB."""
QUESTIONS, ANNOTATIONS = "_questions.json", "_annotations.json"
TRAIN, TEST = "train", "val"
"""The training part, and the one that is tested on: the answers of VQAv2's own test part are not public."""
YEAR = "2014"
"""Of VQAv2's parts."""
STEP = 20_000
LAST_DIGITS = re.compile(r"([0-9]{1,18})\.[^.]+$")

NO_NUMBER = Fault(
    "question has no question_id that is a whole number", "questions have no question_id that is a whole number"
)
SAME_NUMBER = Fault("question has the question_id of another", "questions have the question_id of another")
NO_IMAGE_NUMBER = Fault(
    "question has no image_id that is a whole number", "questions have no image_id that is a whole number"
)
NO_TEXT = Fault("question has no text", "questions have no text")
NO_FILE = Fault("question is about an image that is not there", "questions are about images that are not there")
NOT_ANNOTATED = Fault("question has no annotation", "questions have no annotation")
OTHER_IMAGE = Fault(
    "question is about another image than its annotation", "questions are about another image than their annotation"
)
NO_ANSWERS = Fault("question has no answers", "questions have no answers")
NO_TEXT_ANSWERS = Fault("question has answers that are no text", "questions have answers that are no text")
EMPTY_ANSWERS = Fault("question has answers without a word", "questions have answers without a word")
NO_QUESTION = Fault("annotation has no question", "annotations have no question")
NO_NUMBER_NOTED = Fault(
    "annotation has no question_id that is a whole number", "annotations have no question_id that is a whole number"
)
NOTED_TWICE = Fault(
    "annotation is about a question that another is about", "annotations are about a question that another is about"
)


@dataclass(frozen=True)
class Layout:
    """The two files of a part, and the folder of its images. part: such as train2014."""

    part: str
    questions: Path
    annotations: Path
    images: Path

    @cached_property
    def _numbered(self) -> dict[int, Path]:
        with os.scandir(self.images) as inside:
            names = [each.name for each in inside if each.name.lower().endswith(IMAGES.endings)]
        return by_number((self.images / name for name in names), f"COCO_{self.part}_")

    def image(self, number: int) -> Path:
        """The file of an image: COCO_train2014_000000000009.jpg, or another whose name ends with its number."""
        usual = self.images / f"COCO_{self.part}_{number:012d}.jpg"
        return self._numbered.get(number, usual)


def by_number(files: Iterable[Path], usual: str = "COCO_") -> dict[int, Path]:
    """Images by the number at the end of their names; of several, one that begins as usual, or the first."""
    found: dict[int, Path] = {}
    for file in sorted(files, key=lambda file: (not file.name.startswith(usual), file)):
        if digits := LAST_DIGITS.search(file.name):
            found.setdefault(int(digits[1]), file)
    return found


def find_layout(folder: Path, part: str) -> Layout:
    """The files of a part, such as v2_OpenEnded_mscoco_train2014_questions.json; names may have other beginnings.

    They may lie in folders of their own (Questions, Annotations), as may the images (Images/mscoco/train2014).
    """
    questions, annotations = (_one(folder, part, ending) for ending in (QUESTIONS, ANNOTATIONS))
    name = questions.name.removesuffix(QUESTIONS)
    name = name[name.rindex(part) :]
    found = next((each for each in _folders(folder, 3) if each.name == name), None)
    if found is None:
        raise DataError(f"'{folder}' has no folder '{name}' with images such as 'COCO_{name}_000000000001.jpg'.")
    return Layout(name, questions, annotations, found)


def _folders(folder: Path, depth: int) -> list[Path]:
    """Folders down to some depth, those above before those below."""
    level, found = [folder], []
    for _ in range(depth):
        below = []
        for where in level:
            with os.scandir(where) as inside:
                below += sorted(Path(each.path) for each in inside if not each.name.startswith(".") and each.is_dir())
        found += below
        level = below
    return found


def _one(folder: Path, part: str, ending: str) -> Path:
    pattern = re.compile(rf"{part}[0-9]*{ending}$")
    there = [each for where in (folder, *_folders(folder, 1)) for each in where.glob(f"*{ending}") if each.is_file()]
    found = sorted(each for each in there if pattern.search(each.name))
    if len(found) == 1:
        return found[0]
    usual = f"v2_{'OpenEnded_' if ending == QUESTIONS else ''}mscoco_{part}{YEAR}{ending}"
    if found:
        names = listed(f"'{shown(str(each.relative_to(folder)))}'" for each in found)
        raise DataError(f"'{folder}' has {len(found)} files of that kind for {part}: {names}. Keep one, as '{usual}'.")
    inside = sorted(each.name for each in folder.iterdir())
    has = f"It has: {listed(inside)}" if inside else "It is empty"
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


def read_questions(file: Path, faults: Faults) -> list[tuple[int, int, str]]:
    """The numbers and texts of questions without answers: question, image, text. What is wrong goes to the faults."""
    asked = _records(file, "questions")
    seen = _numbers_of(asked)
    found = []
    for at, each in enumerate(asked):
        for kind in (wrong := _wrong_question(each, seen)):
            faults.add(kind, _place(file.name, each, at))
        number, image = _number(each, "question_id"), _number(each, "image_id")
        if not wrong and number is not None and image is not None:
            found.append((number, image, each["question"]))
    return found


def _numbers_of(asked: list[Any]) -> Counter[int]:
    return Counter(number for each in asked if (number := _number(each, "question_id")) is not None)


def _read(layout: Layout, asked: list[Any], annotated: list[Any], faults: Faults) -> Part:
    """One part. Each question needs a text, one annotation about the same image, and answers."""
    file = layout.questions.name
    notes = _annotations(layout.annotations.name, annotated, faults)
    seen = _numbers_of(asked)
    for unasked in notes.keys() - seen.keys():
        faults.add(NO_QUESTION, f"{layout.annotations.name}: question_id {unasked}")
    images: dict[int, int] = {}
    questions = []
    for at, each in enumerate(asked):
        if at % STEP == 0:
            progress(f"reading {file}", at, len(asked))
        number = _number(each, "question_id")
        note = None if number is None else notes.get(number)
        wrong = _wrong_question(each, seen) or _wrong_annotation(each, note)
        for kind in wrong:
            faults.add(kind, _place(file, each, at), _two_images(each, note) if note and kind == OTHER_IMAGE else "")
        if not wrong:
            questions.append(_question(each, note, images))
    progress(f"reading {file}", len(asked), len(asked))
    return Part(file, tuple(map(layout.image, images)), tuple(questions))


def _question(each: Mapping[str, Any], note: Any, images: dict[int, int]) -> Question:
    """A question with its annotation, both whole. images: the numbers of those met before; a new one is added."""
    image = _number(each, "image_id")
    assert image is not None, "a question without one was a fault"
    given = tuple(spaced(answer["answer"]) for answer in note["answers"])
    named = as_text(note.get("multiple_choice_answer"))
    return Question(
        image=images.setdefault(image, len(images)),
        text=each["question"],
        commonest=spaced(named) if named and named.strip() else commonest(given),
        given=given,
        kind=as_text(note.get("question_type")) or OTHER,
    )


def _annotations(file: str, annotated: list[Any], faults: Faults) -> Mapping[int, Any]:
    """Number of a question → its annotation; those without a number and second ones are faults."""
    found: dict[int, Any] = {}
    for at, each in enumerate(annotated):
        number = _number(each, "question_id")
        if number is None:
            faults.add(NO_NUMBER_NOTED, _place(file, each, at))
        elif number in found:
            faults.add(NOTED_TWICE, _place(file, each, at))
        else:
            found[number] = each
    return found


def _wrong_question(each: Any, seen: Counter[int]) -> list[Fault]:
    """What is wrong with a question itself."""
    number = _number(each, "question_id")
    if number is None:
        return [NO_NUMBER]
    text = as_text(each.get("question"))
    found = {
        SAME_NUMBER: seen[number] > 1,
        NO_IMAGE_NUMBER: _number(each, "image_id") is None,
        NO_TEXT: text is None or not re.search(r"\w", text),
    }
    return [kind for kind, is_so in found.items() if is_so]


def _wrong_annotation(each: Mapping[str, Any], note: Any) -> list[Fault]:
    """The first thing that is wrong with what people said to a question."""
    if note is None:
        return [NOT_ANNOTATED]
    if "image_id" in note and _number(note, "image_id") != _number(each, "image_id"):
        return [OTHER_IMAGE]
    answers = note.get("answers")
    if not isinstance(answers, list) or not answers:
        return [NO_ANSWERS]
    texts = [as_text(answer.get("answer")) if isinstance(answer, dict) else None for answer in answers]
    if None in texts:
        return [NO_TEXT_ANSWERS]
    return [] if any(map(str.strip, map(str, texts))) else [EMPTY_ANSWERS]


def _two_images(each: Mapping[str, Any], note: Mapping[str, Any]) -> str:
    return f"{each['image_id']!r}, and {note['image_id']!r} there"[:60]


def _number(each: Any, name: str) -> int | None:
    """A whole number of at least 0 under a name, if there is one. Some programs write 7 as 7.0 or as "7"."""
    value = each.get(name) if isinstance(each, dict) else None
    value = as_key(value)
    return value if isinstance(value, int) and value >= 0 else None


def _place(file: str, each: Any, at: int) -> str:
    number = _number(each, "question_id")
    return f"{file}: number {at + 1} in the list" if number is None else f"{file}: question_id {number}"
