"""Sentences with their translations as numbers: what a model takes, and where samples come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks.corpus import Corpus
from attemper.lab.tasks.vocabulary import BEGIN, END, MARKS, PADDING, Level, Vocabulary, split
from attemper.tempering.outputs import IGNORED


@dataclasses.dataclass(frozen=True)
class TextShape:
    """Sentences in, scores of the next word at every position of the translation out.

    source, target: tokens of the longest sentence on either side, its mark included. A sample is both, side by side.
    source_words, target_words: sizes of the vocabularies, marks included.
    """

    source: int
    target: int
    source_words: int
    target_words: int

    @property
    def classes(self) -> int:
        return self.target_words

    def __str__(self) -> str:
        return (
            f"{self.source} + {self.target} tokens at most, source and target, and of {self.source_words:,} + "
            f"{self.target_words:,} words"
        )

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        """Sentences of random words and lengths."""
        source = torch.randint(len(MARKS), self.source_words + 1, (samples, self.source)) % self.source_words
        words = torch.randint(len(MARKS), self.target_words + 1, (samples, self.target)) % self.target_words
        given = torch.cat([torch.full((samples, 1), BEGIN), words[:, :-1]], 1)
        lengths = torch.randint(1, self.target + 1, (samples, 1))
        lengths[0] = self.target
        padded = torch.arange(self.target) >= lengths
        ends = torch.randint(1, self.source + 1, (samples, 1))
        source = source.masked_fill(torch.arange(self.source) >= ends, PADDING)
        return torch.cat([source, given.masked_fill(padded, PADDING)], 1), words.masked_fill(padded, IGNORED)


@dataclasses.dataclass(frozen=True)
class Side:
    """One language of a task: how its sentences become numbers.

    length: tokens of a sentence at most, its mark not counted.
    """

    vocabulary: Vocabulary
    length: int
    level: Level

    def numbers(self, sentence: str, cut: int = END) -> list[int]:
        """A sentence with the end mark behind it; one that is too long is cut, and `cut` stands behind it."""
        tokens = split(sentence, self.level)
        return [*self.vocabulary.encode(tokens[: self.length]), END if len(tokens) <= self.length else cut]


def encode(corpus: Corpus, source: Side, target: Side, scored: int | None = None) -> TextSource:
    """A corpus as samples.

    What the model is given of the target is shifted by one against what it shall predict, and starts with a mark. Where
    a translation is cut, its end is not predicted.
    """
    inputs = [source.numbers(sentence) for sentence in corpus.source]
    wanted = [target.numbers(sentence, cut=IGNORED) for sentence in corpus.target]
    given = [[BEGIN, *sentence[:-1]] for sentence in wanted]
    tokens = torch.cat([_padded(inputs, source.length + 1, PADDING), _padded(given, target.length + 1, PADDING)], 1)
    return TextSource(tokens.int(), _padded(wanted, target.length + 1, IGNORED), corpus.target, scored)


def _padded(sentences: Sequence[Sequence[int]], width: int, filling: int) -> Tensor:
    """int64 (N, width)."""
    rows = [[*sentence, *[filling] * (width - len(sentence))] for sentence in sentences]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), width)


@dataclasses.dataclass
class TextSource:
    """Samples in memory.

    tokens: int32 (N, source + target), the sentence and what is given of its translation, side by side.
    targets: int64 (N, target), the translation with its end mark, `IGNORED` behind that.
    references: the translations as they were written.
    scored: BLEU is computed on so many of the first samples; None: on all.
    """

    tokens: Tensor
    targets: Tensor
    references: tuple[str, ...]
    scored: int | None = None
    in_memory: bool = dataclasses.field(default=True, init=False)

    def __len__(self) -> int:
        return len(self.references)

    def take(self, indices: Tensor) -> TextSource:
        references = tuple(self.references[index] for index in indices.tolist())
        return TextSource(self.tokens[indices], self.targets[indices], references, self.scored)

    def to(self, device: torch.device) -> TextSource:
        return dataclasses.replace(self, tokens=self.tokens.to(device), targets=self.targets.to(device))

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in order.to(self.targets.device).split(batch_size):
            yield self.tokens[indices], self.targets[indices]

    def statistics(self) -> tuple[Tensor, Tensor]:
        raise DataError("Words have no mean and no deviation; only images have.")
