"""Translation of a user's parallel text, measured by BLEU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.errors import DataError
from attemper.lab.tasks.augment import Augment, parse_augmentation
from attemper.lab.tasks.classification import Metrics
from attemper.lab.tasks.corpus import Corpora, Corpus, read_corpora
from attemper.lab.tasks.seed_streams import generator
from attemper.lab.tasks.source import Source, found_under
from attemper.lab.tasks.split import FIXED
from attemper.lab.tasks.text import Side, TextShape, TextSource, encode
from attemper.lab.tasks.vocabulary import UNKNOWN, Level, Vocabulary, join, split
from attemper.tempering.outputs import IGNORED, logits_of

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

BATCH = 256
SCORED = 500
TEST_SHARE = 0.2
"""How much of a data set without test files is held out as a test set, always the same sentences."""


class Translator(Protocol):
    """A model that this task can measure."""

    def translate(self, source: Tensor) -> Tensor:
        """Numbers of the source's words (B, S), padded → numbers of the translation's (B, at most T)."""
        ...


def open_translation(
    name: str,
    path: str,
    root: Path,
    *,
    source: str = "en",
    target: str = "de",
    level: Level = "word",
    length: int | None = None,
    words: int | None = None,
    test_file: str | None = None,
    scored: int = SCORED,
    train: int | None = None,
    test: int | None = None,
) -> TranslationTask:
    """The parallel text in a folder, in the layout of Multi30k (see `read_corpora`).

    path: the folder, relative to the data root or to where the program runs.
    level: whether tokens are words or characters.
    length: tokens of a sentence at most; None: those of the longest training sentence.
    words: so many of the most frequent words of each language are known; None: all that occur more than once.
    scored: validation BLEU is computed on so many sentences, since decoding takes its time; test BLEU on all.
    train, test: keep only so many pairs, always the same ones.
    """
    folder = found_under(root, path)
    corpora = read_corpora(folder, source, target, test_file)
    return make_task(
        name, corpora, level=level, length=length, words=words, scored=scored, train=train, test=test, language=target
    )


def make_task(
    name: str,
    corpora: Corpora,
    *,
    level: Level = "word",
    length: int | None = None,
    words: int | None = None,
    scored: int = SCORED,
    train: int | None = None,
    test: int | None = None,
    language: str = "",
) -> TranslationTask:
    """A task of some corpora. The training text alone decides about vocabularies and lengths."""
    make_scorer(language)  # so that a missing package is an error now, not after the first epoch
    if level not in ("word", "char"):
        raise ParameterError(f"'{name}': level is {level!r}; it must be word or char.")
    training, held = corpora.train, corpora.test
    if held is None:
        training, held = _hold_out(training, round(len(training) * TEST_SHARE), FIXED)
    training, held = _limited(name, training, train, "training"), _limited(name, held, test, "test")
    whole = len(training)
    training = _usable(name, training, level, length)
    sides = [_side(sentences, level, words) for sentences in (training.source, training.target)]
    return TranslationTask(
        name=name,
        fingerprint=corpora.fingerprint,
        source=sides[0],
        target=sides[1],
        pool=training,
        validation=corpora.validation,
        held_out=held,
        left_out=whole - len(training),
        scored=scored,
        language=language,
    )


def _hold_out(corpus: Corpus, held: int, seed: int) -> tuple[Corpus, Corpus]:
    """The pairs that are kept and the `held` pairs that are held out, each in the order of the files."""
    order = torch.randperm(len(corpus), generator=generator(seed, "split")).tolist()
    return corpus.take(sorted(order[held:])), corpus.take(sorted(order[:held]))


def _limited(name: str, corpus: Corpus, pairs: int | None, part: str) -> Corpus:
    if pairs is None or pairs == len(corpus):
        return corpus
    if pairs > len(corpus):
        raise DataError(f"'{name}' asks for {pairs:,} {part} pairs, and there are {len(corpus):,}.")
    return _hold_out(corpus, pairs, FIXED)[1]


def _usable(name: str, corpus: Corpus, level: Level, length: int | None) -> Corpus:
    """The pairs without an empty or overlong side: training on half a sentence would teach to stop in the middle."""

    def fits(sentence: str) -> bool:
        tokens = len(split(sentence, level))
        return tokens > 0 and (length is None or tokens <= length)

    kept = [i for i in range(len(corpus)) if fits(corpus.source[i]) and fits(corpus.target[i])]
    if len(kept) < 2:
        limit = "" if length is None else f" or longer than length={length}"
        raise DataError(
            f"'{name}' has {len(kept)} training pairs to use, and needs at least 2, one to train on and one to "
            f"validate on: the others of {len(corpus):,} ({corpus.name}) are empty{limit}."
        )
    return corpus.take(kept)


def _side(sentences: Sequence[str], level: Level, words: int | None) -> Side:
    tokens = [split(sentence, level) for sentence in sentences]
    return Side(Vocabulary.of(tokens, words), max(map(len, tokens)), level)


@dataclasses.dataclass
class TranslationTask:
    """Sentences to translate.

    source, target: the two languages.
    pool: what is trained on; also validated on, where `validation` is None.
    held_out: the test set.
    left_out: how many training pairs are not in the pool, since they are empty or too long.
    language: of the translations, as sacrebleu calls it.
    """

    name: str
    fingerprint: str
    source: Side
    target: Side
    pool: Corpus
    validation: Corpus | None
    held_out: Corpus
    left_out: int = 0
    scored: int = SCORED
    language: str = ""
    primary: str = "bleu"

    @property
    def shape(self) -> TextShape:
        return TextShape(
            self.source.length + 1, self.target.length + 1, len(self.source.vocabulary), len(self.target.vocabulary)
        )

    @cached_property
    def _samples(self) -> TextSource:
        return self._encoded(self.pool, self.scored)

    def _encoded(self, corpus: Corpus, scored: int | None) -> TextSource:
        return encode(corpus, self.source, self.target, scored)

    def split(self, seed: int, validation: float) -> tuple[Source, Source]:
        """Validation files as they are, where there are any; else a part of the training text, by the seed."""
        samples = self._samples
        if self.validation is not None:
            return samples, self._encoded(self.validation, self.scored)
        held = min(max(1, round(len(samples) * validation)), len(samples) - 1)
        order = torch.randperm(len(samples), generator=generator(seed, "split"))
        return samples.take(order[held:].sort().values), samples.take(order[:held].sort().values)

    def test(self) -> Source:
        return self._encoded(self.held_out, None)

    def to_input(self, stored: Tensor) -> Tensor:
        return stored.long()

    def augmentation(self, text: str) -> Augment:
        """None: what is known for images does not fit text."""
        return parse_augmentation(text, {})

    # ------------------------------------------------------------------------------------------------------- metrics
    def loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Cross-entropy, the mean over all words of the batch.

        logits: (B, T, words). targets: int64 (B, T), `IGNORED` where there is padding.
        """
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The share of words that are right, the words before them given."""
        return (logits.argmax(-1) == targets).sum().double() / targets.ne(IGNORED).sum()

    def measure(self, model: nn.Module, source: Source) -> Metrics:
        """Cross-entropy and accuracy per word, the words before given; BLEU of translations without any help."""
        assert isinstance(source, TextSource)
        device = next(model.parameters()).device
        loss = torch.zeros((), dtype=torch.float64, device=device)
        right, words = torch.zeros((2,), dtype=torch.int64, device=device).unbind()
        for stored, targets in source.batches(torch.arange(len(source)), BATCH):
            logits = logits_of(model(self.to_input(stored))).float()
            loss += F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            ).double()
            right += (logits.argmax(-1) == targets).sum()
            words += targets.ne(IGNORED).sum()
        hypotheses = self.translate(model, source, source.scored)
        return {
            "bleu": bleu(hypotheses, source.references[: len(hypotheses)], self.language),
            "accuracy": int(right) / int(words),
            "loss": float(loss) / int(words),
        }

    def translate(self, model: nn.Module, source: TextSource, most: int | None = None) -> list[str]:
        """The translations of the first `most` samples, or of all, as text."""
        samples = len(source) if most is None else min(most, len(source))
        found: list[str] = []
        for stored, _ in source.batches(torch.arange(samples), BATCH):
            numbers = cast(Translator, model).translate(self.to_input(stored[:, : self.shape.source]))
            found += [join(self.target.vocabulary.decode(row), self.target.level) for row in numbers.tolist()]
        return found

    # ------------------------------------------------------------------------------------------------------ in words
    @property
    def notes(self) -> list[str]:
        """What a user wants to know of the files: what was left out, what is cut, how much of the test is unknown."""
        without = f", {self.left_out:,} more are left out, since they are empty or too long" if self.left_out else ""
        validation = "a part of it, by the seed" if self.validation is None else self._of(self.validation)
        return [
            f"training: {len(self.pool):,} pairs of {self.pool.name}{without}",
            f"validation: {validation}",
            f"test: {self._of(self.held_out)}",
        ]

    def _of(self, corpus: Corpus) -> str:
        tokens = [split(sentence, self.source.level) for sentence in corpus.source]
        long = sum(len(sentence) > self.source.length for sentence in tokens)
        numbers = [number for sentence in tokens for number in self.source.vocabulary.encode(sentence)]
        unknown = numbers.count(UNKNOWN) / max(1, len(numbers))
        cut = f", {long:,} sources are cut to {self.source.length} tokens" if long else ""
        return f"{len(corpus):,} pairs of {corpus.name}{cut}; {unknown:.1%} of the source tokens are unknown"


def bleu(hypotheses: Sequence[str], references: Sequence[str], language: str = "") -> float:
    """sacrebleu's corpus BLEU, from 0 to 1, with its defaults for a language: case counts, its own word splitting.

    >>> bleu(["a dog sleeps in the sun"], ["a dog sleeps in the sun"])
    1.0
    """
    score = make_scorer(language).corpus_score(list(hypotheses), [list(references)])
    return min(1.0, float(score.score) / 100)


def make_scorer(language: str) -> BLEU:
    """sacrebleu's BLEU with its defaults for a language."""
    try:
        from sacrebleu.metrics.bleu import BLEU

        return BLEU(trg_lang=language, force=True)
    except ModuleNotFoundError:
        raise ParameterError(
            "Translations are measured by sacrebleu, which is missing: pip install 'attemper[text]'."
        ) from None
    except RuntimeError as error:  # it splits words of some languages by packages of their own
        raise ParameterError(f"sacrebleu cannot measure '{language}': {' '.join(str(error).split())}") from None
