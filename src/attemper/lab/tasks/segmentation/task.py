"""The task: which class every pixel of an image is of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.lab.counting import counted
from attemper.lab.errors import DataError
from attemper.lab.tasks.augment import Augment
from attemper.lab.tasks.base import measured
from attemper.lab.tasks.broken import listed
from attemper.lab.tasks.classification import Details, Metrics, class_table
from attemper.lab.tasks.normalising import NORMALISATIONS, Normalisation
from attemper.lab.tasks.pictures import Picture, spread
from attemper.lab.tasks.segmentation.augment import parse_mask_augmentation
from attemper.lab.tasks.segmentation.canvas import classes_from_canvas, place_of
from attemper.lab.tasks.segmentation.drawing import draw
from attemper.lab.tasks.segmentation.scores import class_ious, make_metric, mean_iou, pixel_accuracy
from attemper.lab.tasks.segmentation.sources import MaskSource
from attemper.lab.tasks.source import Source
from attemper.lab.tasks.split import FIXED, divide
from attemper.tempering.outputs import IGNORED, logits_of

SHOWN = 40
"""Up to so many classes are named; of more, the first few."""
LOGITS_AT_ONCE = 2**24
"""Numbers of logits in a batch that is measured on: 64 MB as float32."""


@dataclasses.dataclass(frozen=True)
class MaskShape:
    """Images in, scores of classes for every pixel out: (B, channels, height, width) → (B, height, width, classes)."""

    channels: int
    height: int
    width: int
    classes: int

    def __str__(self) -> str:
        return f"{self.channels} × {self.height} × {self.width} with a class for every pixel, of {self.classes} classes"

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        """Noise, and stripes of all classes; the last row of pixels is not labelled."""
        rows = torch.arange(self.height)[:, None] + torch.arange(self.width)
        targets = (torch.arange(samples)[:, None, None] + rows) % self.classes
        targets[:, -1] = IGNORED
        return torch.randn(samples, self.channels, self.height, self.width), targets


@dataclasses.dataclass(frozen=True)
class Tally:
    """What a part of a set comes to.

    matrix: int64 (classes, classes), pixels of the files by their class and by what they were taken for.
    loss: the sum over the labelled pixels of the canvases, of which there are so many pixels.
    """

    matrix: Tensor
    loss: float
    pixels: int


def kept_of(name: str, there: int, limit: int | None, part: str, groups: Tensor | None = None) -> Tensor | None:
    """Which of so many images stay under a limit, always the same ones; None: all of them."""
    if limit is None or limit == there:
        return None
    if limit > there:
        raise DataError(f"'{name}' asks for {limit} {part} images, and there are {there}.")
    return divide(torch.zeros(there, dtype=torch.int64), limit, FIXED, groups)[1]


@dataclasses.dataclass
class SegmentationTask:
    """Images with a class for every pixel.

    pool: what is trained on; validated on, too, where `validation` is None. held_out: the test set.
    classes: their names, and numbers: which number in a mask's file each of them is, in the same order.
    groups: which samples of the pool must not be separated, int64 (N); None: none of them.
    train, test_images: keep only so many images, always the same ones.
    """

    samples: ClassVar[str] = "images"

    name: str
    shape: MaskShape
    fingerprint: str
    pool: Callable[[], MaskSource]
    held_out: Callable[[], MaskSource]
    classes: tuple[str, ...]
    numbers: tuple[int, ...]
    validation: Callable[[], MaskSource] | None = None
    groups: Tensor | None = None
    train: int | None = None
    test_images: int | None = None
    normalise: Normalisation = dataclasses.field(default=NORMALISATIONS["imagenet"], kw_only=True)
    notes: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    primary: str = dataclasses.field(default="mIoU", init=False)

    def __post_init__(self) -> None:
        make_metric(self.shape.classes)  # so that a missing package is an error now, not after the first epoch

    # ----------------------------------------------------------------------------------------------------------- data
    @cached_property
    def _training(self) -> tuple[MaskSource, Tensor | None]:
        """The pool, and the groups in it."""
        source = self.pool()
        kept = kept_of(self.name, len(source), self.train, "training", self.groups)
        if kept is None:
            return source, self.groups
        return cast(MaskSource, source.take(kept)), None if self.groups is None else self.groups[kept]

    def split(self, seed: int, validation: float) -> tuple[Source, Source]:
        """Validation images as the files have them, where there are any; else a part of training, by the seed."""
        source, groups = self._training
        if self.validation is not None:
            return source, self.validation()
        if len(source) < 2:
            raise DataError(
                f"'{self.name}' has {counted(len(source), 'training image')}; it needs at least 2, one to train on and "
                "one to validate on."
            )
        held = min(max(1, round(len(source) * validation)), len(source) - 1)
        kept, held_out = divide(torch.zeros(len(source), dtype=torch.int64), held, seed, groups)
        return source.take(kept), source.take(held_out)

    def test(self) -> Source:
        source = self.held_out()
        kept = kept_of(self.name, len(source), self.test_images, "test")
        return source if kept is None else source.take(kept)

    def to_input(self, stored: Tensor) -> Tensor:
        """uint8 (B, 3, H, W) → float32, normalised."""
        return self.normalise(stored)

    def augmentation(self, text: str) -> Augment:
        """scale-crop and photometric: what is known for classes of whole images would leave masks behind."""
        return parse_mask_augmentation(text)

    # -------------------------------------------------------------------------------------------------------- metrics
    def loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Cross-entropy, the mean over all labelled pixels of the batch; 0 where there is none.

        logits: (B, H, W, classes). targets: int64 (B, H, W), `IGNORED` where a pixel is not labelled.
        """
        total = F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum"
        )
        return total / targets.ne(IGNORED).sum().clamp_min(1)

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The share of labelled pixels that are right."""
        return (logits.argmax(-1) == targets).sum().double() / targets.ne(IGNORED).sum().clamp_min(1)

    def measure(self, model: nn.Module, source: Source) -> Metrics:
        """Mean intersection over union and accuracy of the pixels of the files; cross-entropy of those of canvases."""
        return measured(self, model, source)

    def tally(self, model: nn.Module, source: Source) -> Tally:
        """What the pixels of a set were taken for: sums, which the parts of a set add up to."""
        assert isinstance(source, MaskSource)
        device = next(model.parameters()).device
        metric = make_metric(self.shape.classes).to(device)
        loss, pixels = torch.zeros(2, dtype=torch.float64, device=device).unbind()
        for position, logits, targets in self._predictions(model, source):
            loss += F.cross_entropy(
                logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            ).double()
            pixels += targets.ne(IGNORED).sum()
            for at, each in enumerate(logits, start=position):
                truth = source.truth(at).to(device, non_blocking=True)
                found = classes_from_canvas(each, (truth.shape[0], truth.shape[1]))
                metric.update(found[None], truth[None].long())
        return Tally(metric.confmat.cpu(), float(loss), int(pixels))

    def score(self, tallies: Sequence[Any]) -> Metrics:
        """The metrics of all that was counted."""
        parts = cast(Sequence[Tally], tallies)
        matrix = torch.stack([part.matrix for part in parts]).sum(0)
        pixels = sum(part.pixels for part in parts)
        return {
            "mIoU": mean_iou(matrix),
            "accuracy": pixel_accuracy(matrix),
            "loss": sum(part.loss for part in parts) / pixels if pixels else None,
        }

    def _predictions(self, model: nn.Module, source: Source) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The number of the first sample of a batch, logits and targets."""
        shape = self.shape
        batch = max(1, min(64, LOGITS_AT_ONCE // (shape.height * shape.width * shape.classes)))
        position = 0
        for stored, targets in source.batches(torch.arange(len(source)), batch):
            yield position, logits_of(model(self.to_input(stored))).float(), targets
            position += len(targets)

    # ------------------------------------------------------------------------------------------------ for the page
    def details(self, model: nn.Module, source: Source) -> Details | None:
        """Intersection over union, class by class."""
        matrix = self.tally(model, source).matrix
        rows = zip(self.classes, matrix.sum(1).tolist(), class_ious(matrix), strict=True)
        return {"items": len(source), "table": class_table("IoU", "pixels", rows)}

    def pictures(self, model: nn.Module, source: Source, most: int) -> list[Picture]:
        """Images beside what the data say and what the model says."""
        assert isinstance(source, MaskSource)
        found = []
        for position in spread(len(source), most):
            ((stored, targets),) = source.batches(torch.tensor([position]), 1)
            says = logits_of(model(self.to_input(stored)))[0].argmax(-1)
            truth = source.truth(position)
            place = place_of((truth.shape[0], truth.shape[1]), (self.shape.height, self.shape.width))
            found.append(draw(place.cut(stored[0]), place.cut(targets[0]), place.cut(says), self.classes))
        return found

    def verify(self) -> list[str]:
        """What the files come to, beside what every task says."""
        own = []
        if self.validation is not None:
            own = [f"validation: {counted(len(self.validation()), 'image')} of the folder's own"]
        names = listed(self.classes) if len(self.classes) > SHOWN else ", ".join(self.classes)
        return [f"classes: {names}", *own]
