"""Questions with their images and answers, as files have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attemper.lab.tasks.fingerprint import of_parts

OTHER = "other"


@dataclass(frozen=True)
class Question:
    """One question.

    image: number of its image among those of its part. commonest: the answer that counts where only one can.
    given: the answers of all people who were asked. kind: what is asked for, such as "what color"; for tables.
    """

    image: int
    text: str
    commonest: str
    given: tuple[str, ...]
    kind: str = OTHER


@dataclass(frozen=True)
class Part:
    """The questions of a training or test set, and the files of their images.

    name: where they come from, for people.
    """

    name: str
    files: tuple[Path, ...]
    questions: tuple[Question, ...]

    def __len__(self) -> int:
        return len(self.questions)

    def without(self, images: Sequence[int]) -> Part:
        """The questions about other images than these."""
        bad = set(images)
        return Part(self.name, self.files, tuple(each for each in self.questions if each.image not in bad))

    @property
    def fingerprint(self) -> str:
        """Of questions, answers and names of images."""
        return of_parts(
            *(f"{each.image} {each.text} {each.kind} {each.commonest} {each.given}" for each in self.questions),
            *(file.name for file in self.files),
        )
