"""Made-up questions: about pictures of one shape each, learnt in a minute; and noise, by which plans are measured."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attemper.lab.tasks.seed_streams import generator
from attemper.lab.tasks.split import FIXED
from attemper.lab.tasks.vqa.questions import Part, Question

SIDE = 16
IMAGES, TEST_IMAGES = 500, 150
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 210, 50)}
SHAPES = ("square", "cross", "ring")
PLACES = ("left", "right")

PEOPLE = 10
NOISE = (443_757, 214_354)
"""Training and test questions of noise: as many as VQAv2 has for training and validation."""
PER_IMAGE = 5
WORDS, TOKENS = 10_000, 14
"""Of noise: different words, and the words of a question."""


def draw(colour: str, shape: str, row: int, column: int, side: int) -> Tensor:
    """A shape of a colour on a light ground, uint8 (3, SIDE, SIDE). row, column: of its upper left corner."""
    image = torch.full((3, SIDE, SIDE), 235, dtype=torch.uint8)
    mask = torch.zeros(side, side, dtype=torch.bool)
    if shape == "square":
        mask[:] = True
    elif shape == "ring":
        mask[:] = True
        mask[1:-1, 1:-1] = False
    else:
        mask[side // 2], mask[:, side // 2] = True, True
    ground = image[:, row : row + side, column : column + side]
    ground[:, mask] = torch.tensor(COLOURS[colour], dtype=torch.uint8)[:, None]
    return image


@functools.cache
def shapes() -> tuple[Part, Tensor, Part, Tensor]:
    """Training questions and images, test questions and images; always the same ones."""
    draws = generator(FIXED, "shapes")
    parts = [_part(name, count, draws) for name, count in (("shapes", IMAGES), ("other shapes", TEST_IMAGES))]
    return *parts[0], *parts[1]


def _part(name: str, count: int, draws: torch.Generator) -> tuple[Part, Tensor]:
    images, questions = [], []

    def pick(most: int) -> int:
        return int(torch.randint(most, (), generator=draws))

    for number in range(count):
        colour, shape, place = list(COLOURS)[pick(4)], SHAPES[pick(3)], PLACES[pick(2)]
        side = 5 + 2 * pick(2)
        column = pick(SIDE // 2 - side + 1) + (SIDE // 2 if place == "right" else 0)
        images.append(draw(colour, shape, pick(SIDE - side + 1), column, side))
        other = list(COLOURS)[pick(4)]
        asked = (
            ("what color is the shape?", colour, "what color"),
            (f"what color is the {shape} in the image?", colour, "what color"),
            ("what shape is in the image?", shape, "what shape"),
            (f"is there a {other} shape?", "yes" if other == colour else "no", "is there"),
            (f"is the {colour} {shape} on the left side?", "yes" if place == "left" else "no", "is the"),
        )
        questions += [Question(number, text, answer, (answer,), kind) for text, answer, kind in asked]
    return Part(name, (), tuple(questions)), torch.stack(images)


def noise(train: int, test: int, answers: int) -> tuple[Part, Part]:
    """Questions of random words with random answers, on which all of ten people agree."""
    return _noise("noise", train, answers), _noise("more noise", test, answers)


def _noise(name: str, count: int, answers: int) -> Part:
    draws = generator(FIXED, "noise", name)
    words = torch.randint(WORDS, (count, TOKENS), generator=draws).tolist()
    said = [(f"answer {number}",) * PEOPLE for number in range(answers)]
    questions = tuple(
        Question(at // PER_IMAGE, " ".join(f"w{word}" for word in row), said[at % answers][0], said[at % answers])
        for at, row in enumerate(words)
    )
    return Part(name, (), questions)
