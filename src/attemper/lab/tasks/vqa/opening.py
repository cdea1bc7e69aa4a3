"""From the text behind 'vqa:' to questions about images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from attemper.errors import ParameterError
from attemper.lab.counting import counted
from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import Broken
from attemper.lab.tasks.faults import UNREADABLE, Faults
from attemper.lab.tasks.fingerprint import of_parts, of_tensors
from attemper.lab.tasks.image_files import examine
from attemper.lab.tasks.noise import NoiseSource, noise_images
from attemper.lab.tasks.notifications import note
from attemper.lab.tasks.seed_streams import generator
from attemper.lab.tasks.source import MemorySource, Source, found_under
from attemper.lab.tasks.split import FIXED
from attemper.lab.tasks.vocabulary import Vocabulary
from attemper.lab.tasks.vqa import made_up
from attemper.lab.tasks.vqa.answers import AnswerBook
from attemper.lab.tasks.vqa.easy import read_easy
from attemper.lab.tasks.vqa.images import ImageFiles
from attemper.lab.tasks.vqa.questions import Part
from attemper.lab.tasks.vqa.shape import MOST_WORDS, QuestionShape
from attemper.lab.tasks.vqa.source import words_of
from attemper.lab.tasks.vqa.task import QuestionTask
from attemper.lab.tasks.vqa.v2 import read_parts

ANSWERS = 3129
"""Of VQAv2, as most models for it have."""
SIZE = 224
"""Side of images in a folder."""
SIZES = {"easy": 64, "shapes": made_up.SIDE, "noise": SIZE}


@dataclasses.dataclass(frozen=True)
class _Data:
    """Both parts, how to get their images, and what to know of them."""

    train: Part
    test: Part
    images: Callable[[], tuple[Source, Source]]
    fingerprint: str
    notes: tuple[str, ...] = ()


def open_vqa(
    name: str,
    path: str,
    root: Path,
    *,
    size: int | None = None,
    answers: int | None = None,
    length: int | None = None,
    broken: Broken = "refuse",
    train: int | None = None,
    test: int | None = None,
) -> QuestionTask:
    """Questions about images: easy-vqa ('easy'), made-up shapes ('shapes'), noise, or a folder in the layout of VQAv2.

    path: easy, shapes, noise, or the folder, relative to the data root or to where the program runs.
    size: side of the images in pixels; None: 64 for easy, 16 for shapes, 224 for noise and a folder.
    answers: a model chooses from so many of the most frequent answers; None: from all, and at most 3,129.
    length: words of a question at most; None: those of the longest training question.
    broken: what becomes of questions that cannot be used, or whose image cannot: refuse, or skip.
    train, test: keep only so many questions, always the same ones, all about an image together.
    """
    if path in SIZES:
        if size not in (None, SIZES[path]) and path == "shapes":
            raise ParameterError(f"'{name}': size is {size}; made-up shapes are drawn at {SIZES[path]}.")
        if broken != "refuse":
            raise ParameterError(f"'{name}' has no files of yours that could be broken; leave broken out.")
    side = SIZES.get(path, SIZE) if size is None else size
    data = _data(path, root, side, broken, train, test, answers)
    for each in data.notes:
        note(each)
    pool, held = _limited(name, data.train, train, "training"), _limited(name, data.test, test, "test")
    vocabulary = Vocabulary.of(words_of(each.text) for each in pool.questions)
    if len(vocabulary) > MOST_WORDS:
        vocabulary = Vocabulary(vocabulary.words[:MOST_WORDS])
    book = AnswerBook.of((each.commonest for each in pool.questions), ANSWERS if answers is None else answers)
    if len(book) < 2:
        raise DataError(f"'{name}' has {counted(len(book), 'answer')} to choose from; it needs at least 2.")
    words = length or max(len(words_of(each.text)) for each in pool.questions)
    return QuestionTask(
        name=name,
        shape=QuestionShape(3, side, side, words=len(vocabulary), length=words + 1, classes=len(book)),
        fingerprint=of_parts(data.fingerprint, str(train), str(test), str(side)),
        vocabulary=vocabulary,
        book=book,
        pool=pool,
        held_out=held,
        images=data.images,
        given_notes=data.notes,
    )


def _data(
    path: str, root: Path, side: int, broken: Broken, train: int | None, test: int | None, answers: int | None
) -> _Data:
    if path == "shapes":
        return _shapes()
    if path == "easy":
        return _of_files(*read_easy(), side, ())
    if path == "noise":
        usual = zip((train, test, answers), (*made_up.NOISE, ANSWERS), strict=True)
        return _noise(side, *(given or count for given, count in usual))
    return _folder(path, root, side, broken)


def _noise(side: int, train: int, test: int, answers: int) -> _Data:
    parts = made_up.noise(train, test, answers)
    pool = noise_images(3, side)

    def images() -> tuple[Source, Source]:
        first, second = (NoiseSource(pool, torch.arange(1 + part.questions[-1].image)) for part in parts)
        return first, second

    return _Data(*parts, images, of_parts("noise", *map(str, (side, train, test, answers))))


def _shapes() -> _Data:
    train, images, test, others = made_up.shapes()
    return _Data(
        train,
        test,
        lambda: (MemorySource(images, torch.arange(len(images))), MemorySource(others, torch.arange(len(others)))),
        of_parts(train.fingerprint, test.fingerprint, of_tensors(images, others)),
    )


def _folder(path: str, root: Path, size: int, broken: Broken) -> _Data:
    folder = found_under(root, path)
    faults = Faults()
    parts = read_parts(folder, faults)
    kept = []
    for part in parts:
        problems = examine(part.files, root).problems
        for number, why in problems.items():
            faults.add(UNREADABLE, str(part.files[number].relative_to(folder)), why)
        kept.append(part.without(list(problems)))
    notes = faults.settle(f"'{folder}'", broken)
    for part in kept:
        if not len(part):
            raise DataError(f"'{folder}' has no question in '{part.name}' that can be used.")
    return _of_files(kept[0], kept[1], size, tuple(notes))


def _of_files(train: Part, test: Part, size: int, notes: tuple[str, ...]) -> _Data:
    """Images that no question is about any more are not read."""
    train, test = _without_unasked(train), _without_unasked(test)
    pair = ImageFiles(train.files, size), ImageFiles(test.files, size)
    print_of = of_parts(train.fingerprint, test.fingerprint, *(each.fingerprint() for each in pair))
    return _Data(train, test, lambda: (pair[0].source, pair[1].source), print_of, notes)


def _without_unasked(part: Part) -> Part:
    asked = sorted({each.image for each in part.questions})
    number = {image: at for at, image in enumerate(asked)}
    questions = tuple(dataclasses.replace(each, image=number[each.image]) for each in part.questions)
    return Part(part.name, tuple(part.files[image] for image in asked), questions)


def _limited(name: str, part: Part, most: int | None, what: str) -> Part:
    """So many of the questions: those about the first images of an order that is always the same."""
    if most is None or most == len(part):
        return part
    if most > len(part):
        raise DataError(f"'{name}' asks for {most:,} {what} questions, and there are {len(part):,}.")
    count = 1 + max(each.image for each in part.questions)
    rank = torch.randperm(count, generator=generator(FIXED, "split")).tolist()
    order = sorted(range(len(part)), key=lambda at: (rank[part.questions[at].image], at))[:most]
    return Part(part.name, part.files, tuple(part.questions[at] for at in sorted(order)))
