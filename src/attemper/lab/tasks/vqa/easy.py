"""easy-vqa: a package of 5,000 pictures of one shape each, with 48,248 questions about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attemper.errors import ParameterError
from attemper.lab.tasks.vqa.questions import Part, Question

KINDS = {"what color": "what color", "what is the color": "what color", "what": "what shape"}
"""How questions begin → what they ask for, the first that fits."""
ELSE = "yes or no"


def read_easy() -> tuple[Part, Part]:
    """The training and the test part of the package."""
    try:
        import easy_vqa  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ParameterError("'vqa:easy' is data of the package easy-vqa: pip install 'attemper[vqa]'.") from None
    return (
        _part("easy-vqa", easy_vqa.get_train_questions(), easy_vqa.get_train_image_paths()),
        _part("easy-vqa's test part", easy_vqa.get_test_questions(), easy_vqa.get_test_image_paths()),
    )


def _part(name: str, asked: Sequence[Sequence[Any]], paths: Mapping[int, str]) -> Part:
    texts, answers, images = asked
    numbers = {image: at for at, image in enumerate(sorted(paths))}
    questions = tuple(
        Question(numbers[image], text, answer, (answer,), kind_of(text))
        for text, answer, image in zip(texts, answers, images, strict=True)
    )
    return Part(name, tuple(Path(paths[image]) for image in numbers), questions)


def kind_of(text: str) -> str:
    """What a question asks for.

    >>> [kind_of(text) for text in ("what is the color of the circle?", "what is the blue shape?", "is it blue?")]
    ['what color', 'what shape', 'yes or no']
    """
    return next((kind for beginning, kind in KINDS.items() if text.startswith(beginning)), ELSE)
