"""Questions about images with answers to choose from: the split, the loss, the VQA accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.lab.errors import DataError
from attemper.lab.tasks.augment import Augment
from attemper.lab.tasks.classification import Details, Metrics, averages, class_table
from attemper.lab.tasks.pictures import Picture, spread
from attemper.lab.tasks.seed_streams import generator
from attemper.lab.tasks.source import Source
from attemper.lab.tasks.vocabulary import UNKNOWN, Vocabulary, join
from attemper.lab.tasks.vqa.answers import PEOPLE, AnswerBook, best_agreement
from attemper.lab.tasks.vqa.augmenting import parse_question_augmentation
from attemper.lab.tasks.vqa.looking import draw_look, question_look
from attemper.lab.tasks.vqa.questions import Part
from attemper.lab.tasks.vqa.shape import QuestionShape
from attemper.lab.tasks.vqa.source import QuestionSource, encode, words_of
from attemper.tempering.outputs import logits_of

BATCH = 256


@dataclasses.dataclass
class QuestionTask:
    """Questions about images.

    pool: what is trained and validated on. held_out: the test part. images: the images of both, read when first asked.
    """

    name: str
    shape: QuestionShape
    fingerprint: str
    vocabulary: Vocabulary
    book: AnswerBook
    pool: Part
    held_out: Part
    images: Callable[[], tuple[Source, Source]]
    given_notes: tuple[str, ...] = ()
    samples: ClassVar[str] = "questions"

    @property
    def several(self) -> bool:
        """Whether several people answered each question, so that answers can be right in part."""
        return any(len(each.given) > 1 for each in self.pool.questions)

    @cached_property
    def primary(self) -> str:
        """The VQA accuracy, where several people answered."""
        return "vqa_accuracy" if self.several else "accuracy"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.book.answers

    @cached_property
    def kinds(self) -> list[str]:
        """What questions ask for."""
        return sorted({each.kind for part in (self.pool, self.held_out) for each in part.questions})

    # -------------------------------------------------------------------------------------------------------- samples
    @cached_property
    def _images(self) -> tuple[Source, Source]:
        return self.images()

    @cached_property
    def _training(self) -> QuestionSource:
        return self._encoded(self.pool, self._images[0])

    def _encoded(self, part: Part, images: Source) -> QuestionSource:
        return encode(part.questions, images, self.shape, self.vocabulary, self.book, self.kinds)

    def split(self, seed: int, validation: float) -> tuple[Source, Source]:
        """All questions about an image are on one side; images are divided by the seed.

        No model can learn from a question none of whose answers it knows, so training does without them.
        """
        samples = self._training
        asked = samples.image.unique()
        if len(asked) < 2:
            raise DataError(f"'{self.name}' has questions about {len(asked)} training image; it needs at least 2.")
        held = min(max(1, round(len(asked) * validation)), len(asked) - 1)
        order = torch.randperm(len(asked), generator=generator(seed, "split"))
        on_validation = torch.isin(samples.image, asked[order[:held]])
        answerable = samples.scores.sum(1) > 0
        train = (~on_validation & answerable).nonzero().flatten()
        if not len(train):
            raise DataError(f"'{self.name}': none of the training questions has one of the {len(self.book)} answers.")
        return samples.take(train), samples.take(on_validation.nonzero().flatten())

    def test(self) -> Source:
        return self._encoded(self.held_out, self._images[1])

    @cached_property
    def _by_device(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def statistics_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and deviation of every channel over all training images, from 0 to 255."""
        if device not in self._by_device:
            mean, deviation = next(iter(self._by_device.values()), None) or self._images[0].statistics()
            self._by_device[device] = mean.to(device), deviation.to(device)
        return self._by_device[device]

    def to_input(self, stored: Tensor) -> Tensor:
        """Rows of `QuestionShape.store` → rows of `join`, each channel with mean 0 and deviation 1 over all images."""
        images, words = self.shape.stored(stored)
        mean, deviation = self.statistics_on(stored.device)
        return self.shape.join((images.float() - mean[:, None, None]) / deviation[:, None, None], words)

    def augmentation(self, text: str) -> Augment:
        """Shifts of the image; what mirrors, mixes or recolours it would change answers."""
        return parse_question_augmentation(text, self.shape)

    # -------------------------------------------------------------------------------------------------------- metrics
    def loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Where each question has one answer: cross-entropy. Else, each answer may be right: binary cross-entropy,
        summed over the answers, as is usual on VQAv2.

        logits, targets: (B, answers), how right every answer is from 0 to 1.
        """
        return self._losses(logits, targets, smoothing).mean()

    def _losses(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        if self.several:
            aims = targets * (1 - smoothing) + smoothing / targets.shape[-1]
            return F.binary_cross_entropy_with_logits(logits, aims, reduction="none").sum(-1)
        return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """How right the chosen answers are, on average."""
        return chosen_scores(logits, targets).double().mean()

    @averages
    def measure(self, model: nn.Module, source: Source) -> Metrics:
        """VQA accuracy where several people answered; the share of the commonest answers that are found; the loss."""
        assert isinstance(source, QuestionSource)
        agreed, same, loss = (torch.cat(each) for each in zip(*self._measured(model, source), strict=True))
        found: Metrics = {"accuracy": float(same.double().mean()), "loss": float(loss.double().mean())}
        return {"vqa_accuracy": float(agreed.double().mean()), **found} if self.several else found

    def _measured(self, model: nn.Module, source: QuestionSource) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of every batch: how right the chosen answers are, whether they are the commonest ones, the losses."""
        at = 0
        for stored, targets in source.batches(torch.arange(len(source)), BATCH):
            logits = logits_of(model(self.to_input(stored))).float()
            commonest = source.targets[at : at + len(targets)]
            at += len(targets)
            yield chosen_scores(logits, targets), logits.argmax(-1) == commonest, self._losses(logits, targets)

    def details(self, model: nn.Module, source: Source) -> Details | None:
        """The metric by what questions ask for."""
        assert isinstance(source, QuestionSource)
        agreed, same, _ = (torch.cat(each) for each in zip(*self._measured(model, source), strict=True))
        values, kinds = (agreed if self.several else same).double().cpu(), source.kinds.cpu()
        rows = []
        for number, kind in enumerate(self.kinds):
            mine = values[kinds == number]
            if len(mine):
                rows.append((kind, len(mine), float(mine.mean())))
        return {"items": len(source), "table": class_table(self.primary, "questions", rows)}

    def pictures(self, model: nn.Module, source: Source, most: int) -> list[Picture]:
        """Where questions look: attention from the token that answers to the image, over the image."""
        assert isinstance(source, QuestionSource)
        chosen = torch.tensor(spread(len(source), most))
        ((stored, targets),) = source.batches(chosen, max(1, len(chosen)))
        inputs = self.to_input(stored)
        answers = logits_of(model(inputs)).float().argmax(-1).tolist()
        found = []
        for row, answer in enumerate(answers):
            images, words = self.shape.stored(stored[row : row + 1])
            asked = join(self.vocabulary.decode(words[0].tolist()), "word")
            highest = float(targets[row].max())
            true = self.book.answers[int(targets[row].argmax())] if highest > 0 else "none that is known"
            is_best = 0 < highest <= float(targets[row, answer])
            caption = f"{asked} {self.book.answers[answer]}" + ("" if is_best else f" (people say: {true})")
            look = question_look(model, inputs[row : row + 1])
            found.append(draw_look(images[0], look, caption))
        return found

    # ------------------------------------------------------------------------------------------------------- in words
    @property
    def notes(self) -> list[str]:
        """What a user wants to know: how many questions, images and answers there are, and what no model can answer."""
        return [*self.given_notes, *(self._about(*each) for each in (("training", self.pool), ("test", self.held_out)))]

    def _about(self, what: str, part: Part) -> str:
        images = len({each.image for each in part.questions})
        beyond = sum(not self.book.scores(each.given) for each in part.questions)
        unanswered = f"; {beyond:,} have none of the {len(self.book):,} answers" if beyond else ""
        few = sum(len(each.given) < PEOPLE for each in part.questions) if self.several else 0
        if few:
            best = sum(best_agreement(each.given) for each in part.questions) / len(part)
            unanswered += (
                f"; {few:,} have fewer than {PEOPLE} answers, so that {best:.1%} is the most a model can reach"
            )
        words = [number for each in part.questions for number in self.vocabulary.encode(words_of(each.text))]
        unknown = (
            f"; {words.count(UNKNOWN) / max(1, len(words)):.1%} of the words are unknown" if what == "test" else ""
        )
        return f"{what}: {len(part):,} questions about {images:,} images of {part.name}{unanswered}{unknown}"


def chosen_scores(logits: Tensor, targets: Tensor) -> Tensor:
    """How right the likeliest answers are, (B,)."""
    return targets.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1)
