"""Answers of people, and how far one more answer agrees with them: the VQA accuracy, as VQAv2's evaluation has it.

Goyal et al., Making the V in VQA Matter, 2017, section 4 (Antol et al., 2015, of whom the metric is).
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    )
} | {"none": "0"}
ARTICLES = frozenset({"a", "an", "the"})
MARKS = ';/[]"{}()=+\\_-><@`,?!'
"""What is taken out of an answer, or becomes a space. Apostrophes and colons stay."""
LOOSE_PERIOD = re.compile(r"\.(?!\d)")
"""Also behind a digit: '3.' is three. The evaluation's own pattern looks back for one, and never finds it."""
THOUSANDS = re.compile(r"\d,\d")
PEOPLE = 10
"""Who answer a question of VQAv2."""
ENOUGH = 3
"""Whoever agrees with so many people is right."""

_CONTRACTED = """
ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's isn't it'd
it'll ma'am mightn't might've mustn't must've needn't not've o'clock oughtn't shan't should've shouldn't somebody'll
somebody's someone'd someone'll someone's something'd something'll that's there'd there're there's they'd they'll
they're they've 'twas wasn't we've weren't what'll what're what's what've when's where'd where's where've who'd who'll
who's who've why'll why're why's won't would've wouldn't y'all you'd you'll you're you've couldn't've hadn't've he'd've
it'd've mightn't've she'd've shouldn't've somebody'd've someone'd've something'd've there'd've they'd've we'd've
who'd've wouldn't've y'all'll you'd've 'ow's'at y'all'd've
"""


def _contractions() -> dict[str, str]:
    """Words with one apostrophe left out → the words; and one that the evaluation has the other way round."""
    found = {"somebody'd": "somebodyd"}
    for word in _CONTRACTED.split():
        places = [at for at, sign in enumerate(word) if sign == "'"]
        found |= {word[:at] + word[at + 1 :]: word for at in places}
    return found


CONTRACTIONS = _contractions()


@functools.lru_cache(maxsize=100_000)
def normalised(answer: str) -> str:
    """An answer as VQAv2's evaluation compares it: without articles and punctuation, with digits for number words.

    >>> normalised("The two dogs."), normalised("dont know"), normalised("1,000"), normalised("black/white")
    ('2 dogs', "don't know", '1000', 'black white')
    """
    spaceless = THOUSANDS.search(answer) is not None
    text = answer
    for mark in MARKS:
        loose = f"{mark} " in answer or f" {mark}" in answer
        text = text.replace(mark, "" if loose or spaceless else " ")
    words = [NUMBERS.get(word, word) for word in LOOSE_PERIOD.sub("", text).lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def spaced(answer: str) -> str:
    """An answer on one line, without spaces round it."""
    return answer.replace("\n", " ").replace("\t", " ").strip()


def comparable(given: Sequence[str]) -> tuple[list[str], bool]:
    """Answers of people in the form in which they are compared, and whether that is the normalised one.

    Where all of them say the same, word by word, they are left as they are; so it is in VQAv2's evaluation.
    """
    plain = [spaced(answer) for answer in given]
    if len(set(plain)) == 1:
        return plain, False
    return [normalised(answer) for answer in plain], True


def agreement(agreeing: int, people: int) -> float:
    """The VQA accuracy of an answer that so many of some people gave: min(others / 3, 1), each person left out in turn.

    A single person's answer is right or wrong.

    >>> [round(agreement(n, 10), 2) for n in (0, 1, 2, 3, 4, 10)]
    [0.0, 0.3, 0.6, 0.9, 1.0, 1.0]
    """
    if people == 1:
        return float(agreeing)
    without = agreeing * min(1.0, (agreeing - 1) / ENOUGH) if agreeing else 0.0
    return (without + (people - agreeing) * min(1.0, agreeing / ENOUGH)) / people


def vqa_accuracy(answer: str, given: Sequence[str]) -> float:
    """How far an answer agrees with those of people, from 0 to 1.

    >>> vqa_accuracy("Two.", ["2"] * 3 + ["three"] * 7)
    0.9
    """
    forms, normal = comparable(given)
    plain = spaced(answer)
    return agreement(forms.count(normalised(plain) if normal else plain), len(forms))


def best_agreement(given: Sequence[str]) -> float:
    """The VQA accuracy of the answer that agrees best with people's; below 1 where few people agree.

    >>> best_agreement(["yes"] * 10), best_agreement(["yes", "yes", "no"])
    (1.0, 0.4444444444444444)
    """
    forms, _ = comparable(given)
    return max(agreement(agreeing, len(forms)) for agreeing in Counter(forms).values())


@dataclass(frozen=True)
class AnswerBook:
    """The answers that a model chooses from, the most frequent ones first."""

    answers: tuple[str, ...]

    @classmethod
    def of(cls, commonest: Iterable[str], most: int | None = None) -> AnswerBook:
        """The `most` most frequent of the answers that questions have, None: all; equally frequent ones by alphabet.

        >>> AnswerBook.of(["yes", "no", "yes", "a dog"], 2).answers
        ('yes', 'a dog')
        """
        counts = Counter(commonest)
        return cls(tuple(sorted(counts, key=lambda answer: (-counts[answer], answer))[:most]))

    def __len__(self) -> int:
        return len(self.answers)

    @cached_property
    def number(self) -> dict[str, int]:
        """Answer → its number."""
        return {answer: number for number, answer in enumerate(self.answers)}

    @cached_property
    def _alike(self) -> dict[str, list[int]]:
        """Normalised answer → the numbers of all that are normalised to it."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for number, answer in enumerate(self.answers):
            found[normalised(answer)].append(number)
        return dict(found)

    def scores(self, given: Sequence[str]) -> dict[int, float]:
        """The VQA accuracy of every known answer that agrees with one of people's; of all others it is 0."""
        forms, normal = comparable(given)
        found: dict[int, float] = {}
        for form, agreeing in Counter(forms).items():
            known = self._alike.get(form, []) if normal else [self.number[form]] if form in self.number else []
            score = agreement(agreeing, len(forms))
            found |= {number: score for number in known if score}
        return found


def commonest(given: Sequence[str]) -> str:
    """The answer that most people gave, the first of equals."""
    plain = [spaced(answer) for answer in given]
    counts = Counter(plain)
    return max(plain, key=lambda answer: counts[answer])
