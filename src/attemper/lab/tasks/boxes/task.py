"""Finding objects in images: boxes with classes, measured by average precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attemper.lab.errors import DataError
from attemper.lab.tasks.augment import Augment
from attemper.lab.tasks.base import measured
from attemper.lab.tasks.boxes import matching
from attemper.lab.tasks.boxes.augmenting import box_augmentation
from attemper.lab.tasks.boxes.drawing import draw_answer
from attemper.lab.tasks.boxes.metrics import Answer, answers, average_precision
from attemper.lab.tasks.boxes.shape import CLASS, BoxShape, is_box
from attemper.lab.tasks.classification import Details, Metrics, class_table
from attemper.lab.tasks.pictures import Picture, spread
from attemper.lab.tasks.source import Source
from attemper.lab.tasks.split import FIXED, divide

BATCH = 64
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, which trained backbones expect."""


@dataclasses.dataclass(frozen=True)
class Tally:
    """What some samples add to the metrics."""

    answers: list[Answer]
    loss: float
    """The sum over the samples."""


@dataclasses.dataclass
class BoxTask:
    """Images with boxes.

    pool, held_out: load the training and the test set. apart: loads the validation set, where the data have one.
    train, test_images: keep only so many images, always the same ones.
    described: says what is in the files, for whoever checks them.
    """

    name: str
    shape: BoxShape
    fingerprint: str
    pool: Callable[[], Source]
    held_out: Callable[[], Source]
    classes: tuple[str, ...]
    apart: Callable[[], Source] | None = None
    train: int | None = None
    test_images: int | None = None
    notes: tuple[str, ...] = ()
    described: Callable[[], list[str]] = list
    primary: str = "AP"
    learning: str = "recall"
    """What `right` is."""
    samples: str = "images"
    waits: bool = True
    """The matching is made by the CPU."""

    # ---------------------------------------------------------------------------------------------------------- parts
    @cached_property
    def _training(self) -> Source:
        return self._limited(self.pool(), self.train, "training")

    def split(self, seed: int, validation: float) -> tuple[Source, Source]:
        """The validation files as they are, where there are any; else a part of the training images, by the seed.

        Stratified by what the first box of an image is; copies of an image are never separated.
        """
        source = self._training
        if self.apart is not None:
            return self._with_boxes(source, "training"), self._with_boxes(self.apart(), "validation")
        held = min(max(1, round(len(source) * validation)), len(source) - 1)
        kept, out = divide(first_class(source), held, seed, getattr(source, "groups", None))
        return self._with_boxes(source.take(kept), "training"), self._with_boxes(source.take(out), "validation")

    def test(self) -> Source:
        return self._with_boxes(self._limited(self.held_out(), self.test_images, "test"), "test")

    def _limited(self, source: Source, limit: int | None, part: str) -> Source:
        if limit is None or limit == len(source):
            return source
        if limit > len(source):
            raise DataError(f"'{self.name}' asks for {limit} {part} images, and there are {len(source)}.")
        return source.take(divide(first_class(source), limit, FIXED)[1])

    def _with_boxes(self, source: Source, part: str) -> Source:
        if not is_box(source.targets).any():
            raise DataError(f"'{self.name}': none of the {len(source)} {part} images has a box.")
        return source

    @cached_property
    def per_image(self) -> float:
        """Boxes of a training image in the mean; of all of them, so that it is the same for every split."""
        return max(1e-6, float(is_box(self._training.targets).sum()) / len(self._training))

    def verify(self) -> list[str]:
        return self.described()

    # ------------------------------------------------------------------------------------------------------- training
    def to_input(self, stored: Tensor) -> Tensor:
        return to_input(stored)

    def augmentation(self, text: str) -> Augment:
        return box_augmentation(text)

    def read_output(self, out: Any) -> Tensor:
        """The answers of all layers of a model in training, of the last one else: (B, layers, queries, …)."""
        layers: Tensor | None = out.get("layers")
        return last_layer(out)[:, None] if layers is None else layers

    def loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        return matching.loss(logits, targets, self.per_image, smoothing)

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The share of boxes that are found."""
        return matching.recall(logits, targets)

    # -------------------------------------------------------------------------------------------------------- metrics
    def measure(self, model: nn.Module, source: Source) -> Metrics:
        return measured(self, model, source)

    def tally(self, model: nn.Module, source: Source) -> Tally:
        found, loss, done = [], 0.0, 0
        for stored, targets in source.batches(torch.arange(len(source)), BATCH):
            packed = last_layer(model(self.to_input(stored))).float()
            loss += len(targets) * float(self.loss(packed[:, None], targets).detach())
            found += answers(packed, targets, sizes_of(source, self.shape)[done : done + len(targets)])
            done += len(targets)
        return Tally(found, loss)

    def score(self, tallies: Sequence[Tally]) -> Metrics:
        every = [answer for tally in tallies for answer in tally.answers]
        metrics, _ = average_precision(every)
        loss = sum(tally.loss for tally in tallies) / max(1, len(every))
        return {**metrics, "AP": metrics["AP"] or 0.0, "loss": loss}

    def details(self, model: nn.Module, source: Source) -> Details | None:
        """AP of every class."""
        tally = self.tally(model, source)
        _, by_class = average_precision(tally.answers, by_class=True)
        counts = torch.bincount(
            torch.cat([answer.true["labels"] for answer in tally.answers]), minlength=len(self.classes)
        ).tolist()
        rows = [(name, counts[at], by_class.get(at) if counts[at] else None) for at, name in enumerate(self.classes)]
        return {"items": len(source), "table": class_table("AP", "boxes", rows)}

    def pictures(self, model: nn.Module, source: Source, most: int) -> list[Picture]:
        """What is found beside what is there, and where the surest query looks."""
        chosen = torch.tensor(spread(len(source), most), dtype=torch.int64)
        found = []
        for stored, targets in source.batches(chosen, max(1, len(chosen))):
            found += draw_answer(model, self.to_input(stored), stored, targets, self.classes)
        return found


def to_input(stored: Tensor) -> Tensor:
    """uint8 (B, 4, S, S) → float32: colours as ImageNet's backbones expect them, 0 where there is no image."""
    x = stored.float() / 255
    mean, deviation = (x.new_tensor(each)[:, None, None] for each in (MEAN, DEVIATION))
    mask = x[:, 3:]
    return torch.cat([(x[:, :3] - mean) / deviation * mask, mask], 1)


def last_layer(out: Any) -> Tensor:
    """Scores and boxes of a model's answer, packed: (B, queries, classes + 1 + 4)."""
    return torch.cat([out["logits"].float(), out["boxes"].float()], -1)


def sizes_of(source: Source, shape: BoxShape) -> Tensor:
    """The sizes of the images' files; of made-up ones, that of the canvas."""
    sizes: Tensor | None = getattr(source, "facts", {}).get("size")
    return torch.full((len(source), 2), shape.size) if sizes is None else sizes


def first_class(source: Source) -> Tensor:
    """By which images are stratified: the class of their first box, −1 without any; int64 (N)."""
    return source.targets[:, 0, CLASS].long().cpu()
