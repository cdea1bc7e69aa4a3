"""From text to numbers and back: splitting into words or characters, and the words that a model knows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Level = Literal["word", "char"]

MARKS = ("<padding>", "<begin>", "<end>", "⁇")
PADDING, BEGIN, END, UNKNOWN = range(len(MARKS))
"""The numbers that every vocabulary starts with. What is unknown is written as ⁇, which no word of a text equals."""

LEAST = 2
"""A word that occurs less often in the training text is unknown: so a model learns what to do with unknown words."""

WORDS = re.compile(r"\d+(?:[.,]\d+)*|\w+(?:['’\-]\w+)*|[^\w\s]")
NO_SPACE_BEFORE = frozenset(".,;:!?%)]}…")
NO_SPACE_AFTER = frozenset("([{")


def split(text: str, level: Level) -> list[str]:
    """The words and punctuation marks of a sentence, or its characters.

    >>> split("A dog's toy, mid-air.", "word")
    ['A', "dog's", 'toy', ',', 'mid-air', '.']
    >>> split(" two  words", "char")
    ['t', 'w', 'o', ' ', 'w', 'o', 'r', 'd', 's']
    """
    return WORDS.findall(text) if level == "word" else list(" ".join(text.split()))


def join(tokens: Sequence[str], level: Level) -> str:
    """The sentence that tokens make, with punctuation where it belongs.

    >>> join(["A", "dog", "(", "brown", ")", ",", "asleep", "."], "word")
    'A dog (brown), asleep.'
    """
    if level == "char":
        return "".join(tokens)
    words: list[str] = []
    for before, token in zip(["", *tokens], tokens, strict=False):
        glued = not words or token in NO_SPACE_BEFORE or before in NO_SPACE_AFTER
        words.append(token if glued else f" {token}")
    return "".join(words)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that have a number: `MARKS` first, then words, the most frequent ones first."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, sentences: Iterable[Sequence[str]], most: int | None = None) -> Vocabulary:
        """The tokens that occur more than once, of which `most` are kept; equally frequent ones in alphabetical order.

        >>> Vocabulary.of([["a", "dog"], ["a", "cat"], ["the", "dog"]]).words[4:]
        ('a', 'dog')
        """
        counts = Counter(token for sentence in sentences for token in sentence)
        known = sorted((token for token, count in counts.items() if count >= LEAST), key=lambda t: (-counts[t], t))
        return cls((*MARKS, *known[:most]))

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Token → number; the marks are not tokens of any text."""
        return {word: number for number, word in enumerate(self.words) if number >= len(MARKS)}

    def encode(self, tokens: Sequence[str]) -> list[int]:
        return [self.numbers.get(token, UNKNOWN) for token in tokens]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The tokens before the end mark; begin and padding marks are left out."""
        tokens = []
        for number in numbers:
            if number == END:
                break
            if number not in (PADDING, BEGIN):
                tokens.append(self.words[number])
        return tokens
