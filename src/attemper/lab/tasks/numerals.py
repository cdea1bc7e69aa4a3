"""English number words and their German translation: a language that is learnt in seconds, without any files."""

import functools
from collections.abc import Callable

import torch

from attemper.lab.tasks.corpus import Corpora, Corpus
from attemper.lab.tasks.seed_streams import generator
from attemper.lab.tasks.split import FIXED
from attemper.lab.tasks.translation import TranslationTask, make_task

BELOW = 1_000_000
TRAINING_PAIRS, TEST_PAIRS = 3000, 500

ENGLISH = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
ENGLISH_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
GERMAN = [
    "null", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
]  # fmt: skip
GERMAN_TENS = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def english(number: int) -> str:
    """A number below a million.

    >>> english(40_321)
    'forty thousand three hundred twenty one'
    """
    return _in_words(number, "thousand", "hundred", lambda n: _below_hundred(n, ENGLISH, ENGLISH_TENS, "{tens} {ones}"))


def german(number: int) -> str:
    """The same, with every part a word of its own; the ones stand before the tens.

    >>> german(40_321)
    'vierzig tausend drei hundert ein und zwanzig'
    """
    return _in_words(
        number, "tausend", "hundert", lambda n: _below_hundred(n, GERMAN, GERMAN_TENS, "{ones} und {tens}")
    )


def _in_words(number: int, thousand: str, hundred: str, small: Callable[[int], str]) -> str:
    parts: list[str] = []
    for rest, unit in ((number // 1000, thousand), (number % 1000, "")):
        if rest >= 100:
            parts += [small(rest // 100), hundred]
        if rest % 100:
            parts.append(small(rest % 100))
        if rest and unit:
            parts.append(unit)
    return " ".join(parts) or small(0)


def _below_hundred(number: int, small: list[str], tens: list[str], order: str) -> str:
    if number < len(small):
        return small[number]
    ten, one = tens[number // 10 - 2], number % 10
    return order.format(tens=ten, ones=small[one]) if one else ten


def open_numerals(name: str, *, train: int | None = None, test: int | None = None) -> TranslationTask:
    """Numbers below a million in English, to be said in German: 3,000 for training and validation, 500 for test.

    Word by word it cannot be done: German says the ones before the tens, with a word between them.
    """
    return make_task(name, _corpora(), train=train, test=test, language="de")


@functools.cache
def _corpora() -> Corpora:
    """Always the same numbers, none of them twice."""
    drawn = torch.randperm(BELOW, generator=generator(FIXED, "numerals"))[: TRAINING_PAIRS + TEST_PAIRS].tolist()
    train, test = drawn[:TRAINING_PAIRS], drawn[TRAINING_PAIRS:]
    return Corpora(_corpus(train, "numbers"), None, _corpus(test, "other numbers"))


def _corpus(numbers: list[int], name: str) -> Corpus:
    return Corpus(name, tuple(map(english, numbers)), tuple(map(german, numbers)))
