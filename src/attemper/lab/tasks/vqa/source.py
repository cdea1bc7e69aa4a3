"""Questions as samples: each image is held once, however many questions are about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attemper.lab.tasks.source import Source
from attemper.lab.tasks.vocabulary import BEGIN, PADDING, Vocabulary, split
from attemper.lab.tasks.vqa.answers import AnswerBook
from attemper.lab.tasks.vqa.questions import Question
from attemper.lab.tasks.vqa.shape import QuestionShape

UNKNOWN_ANSWER = -1
"""The target of a question whose commonest answer no model can give."""


@dataclasses.dataclass
class QuestionSource:
    """Samples: a question, its image, and how right every answer is.

    images: all images of the part, each once. image: int64 (N), which of them a question is about.
    words: int32 (N, length). known, scores: (N, K), numbers of answers that are right in part, and how far; a score of
        0 fills the row up. targets: int64 (N), the commonest answer, or `UNKNOWN_ANSWER`. kinds: int64 (N).
    """

    shape: QuestionShape
    images: Source
    image: Tensor
    words: Tensor
    known: Tensor
    scores: Tensor
    targets: Tensor
    kinds: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def in_memory(self) -> bool:
        return self.images.in_memory

    def take(self, indices: Tensor) -> QuestionSource:
        return self._mapped(lambda each: each[indices.to(each.device)])

    def to(self, device: torch.device) -> QuestionSource:
        return dataclasses.replace(self._mapped(lambda each: each.to(device)), images=self.images.to(device))

    def _mapped(self, change: object) -> QuestionSource:
        assert callable(change)
        names = ("image", "words", "known", "scores", "targets", "kinds")
        return dataclasses.replace(self, **{name: change(getattr(self, name)) for name in names})

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and words as `QuestionShape.store` joins them; how right every answer is, float32 (B, answers)."""
        order = order.to(self.targets.device)
        stored = self.images.batches(self.image[order], batch_size)
        for indices, (images, _) in zip(order.split(batch_size), stored, strict=True):
            right = self.scores.new_zeros(len(indices), self.shape.classes)
            right.scatter_add_(1, self.known[indices], self.scores[indices])
            yield self.shape.store(images, self.words[indices]), right

    def statistics(self) -> tuple[Tensor, Tensor]:
        return self.images.statistics()


def words_of(text: str) -> list[str]:
    """The words of a question, in lower case."""
    return split(text.lower(), "word")


def encoded(text: str, vocabulary: Vocabulary, length: int) -> Tensor:
    """The numbers of a question's words behind the mark before them, padded; one that is longer loses its end."""
    numbers = [BEGIN, *vocabulary.encode(words_of(text))][:length]
    return torch.tensor(numbers + [PADDING] * (length - len(numbers)), dtype=torch.int32)


def encode(
    questions: Sequence[Question],
    images: Source,
    shape: QuestionShape,
    vocabulary: Vocabulary,
    book: AnswerBook,
    kinds: Sequence[str],
) -> QuestionSource:
    """Questions as samples."""
    words = torch.zeros(len(questions), shape.length, dtype=torch.int32)
    found = [book.scores(each.given) for each in questions]
    most = max([1, *map(len, found)])
    known = torch.zeros(len(questions), most, dtype=torch.int64)
    scores = torch.zeros(len(questions), most)
    for at, (question, right) in enumerate(zip(questions, found, strict=True)):
        words[at] = encoded(question.text, vocabulary, shape.length)
        known[at, : len(right)] = torch.tensor(list(right), dtype=torch.int64)
        scores[at, : len(right)] = torch.tensor(list(right.values()))
    return QuestionSource(
        shape=shape,
        images=images,
        image=torch.tensor([each.image for each in questions], dtype=torch.int64),
        words=words,
        known=known,
        scores=scores,
        targets=torch.tensor([book.number.get(each.commonest, UNKNOWN_ANSWER) for each in questions]),
        kinds=torch.tensor([kinds.index(each.kind) for each in questions], dtype=torch.int64),
    )
