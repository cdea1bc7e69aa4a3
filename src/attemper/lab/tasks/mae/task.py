"""Masked pre-training as a task: hidden patches in, the share of their variance that is explained out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.tasks.augment import Augment
from attemper.lab.tasks.base import ImageTask
from attemper.lab.tasks.classification import Details, Metrics, averages, class_table
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.mae.masks import drawn_ranks, ranks_of
from attemper.lab.tasks.mae.shape import TINY, MaskedShape
from attemper.lab.tasks.pictures import Picture, beside, image_of, picture, spread
from attemper.lab.tasks.source import Source
from attemper.tempering.outputs import logits_of

BATCH = 256
MOST_CLASSES = 100
"""Up to so many, the table says how well the images of each are explained."""
MEASURED = 4096
"""So many training images tell how much pixels vary."""


@dataclasses.dataclass
class MaskedTask:
    """The images of another task, in the same split. Their classes are used for tables and for nothing else.

    per_patch: whether what is predicted has mean 0 and variance 1 in each patch.
    """

    name: str
    inner: ImageTask
    shape: MaskedShape
    per_patch: bool = True
    primary: ClassVar[str] = "explained_variance"
    learning: ClassVar[str] = "explained variance"
    continuous: ClassVar[bool] = True
    """What is predicted are numbers, and no scores of classes."""

    def __post_init__(self) -> None:
        if self.per_patch and self.shape.classes < 2:
            raise ParameterError(
                f"'{self.name}': a patch is one number, which has no variance; give a larger patch, or per_patch=false."
            )

    @property
    def fingerprint(self) -> str:
        return of_parts("mae", self.inner.fingerprint, str(self.shape), str(self.per_patch))

    @property
    def notes(self) -> tuple[str, ...]:
        return self.inner.notes

    def split(self, seed: int, validation: float) -> tuple[Source, Source]:
        return self.inner.split(seed, validation)

    def test(self) -> Source:
        return self.inner.test()

    # ---------------------------------------------------------------------------------------------------------- inputs
    def to_input(self, stored: Tensor) -> Tensor:
        """Images with the patches hidden that their pixels choose: in evaluation, always the same ones."""
        return self.shape.join(self.inner.to_input(stored), ranks_of(stored, self.shape.patches))

    def aims(self, inputs: Tensor) -> Tensor:
        """What is to be predicted of some inputs, and where; see `MaskedShape.aims`."""
        return self.shape.aims(*self.shape.parted(inputs), per_patch=self.per_patch)

    def augmentation(self, text: str) -> Augment:
        """That of the images, with patches hidden by the stream of the batch."""
        found = self.inner.augmentation(text)
        if any(each.stage == "mix" for each in getattr(found, "transforms", ())):
            raise ParameterError(f"augment is '{text}'; mixing classes makes no sense where there are none to predict.")
        return Masking(self, found)

    # --------------------------------------------------------------------------------------------------------- metrics
    @cached_property
    def variance(self) -> float:
        """What predicting 0, the mean, costs on training images; below 1 for patches of variance 1, too: flat ones have
        none.
        """
        pool = self.inner.pool()
        step = max(1, len(pool) // MEASURED)
        stored = (stored for stored, _ in pool.batches(torch.arange(0, len(pool), step), BATCH))
        squares = [self.aims(self.to_input(each))[..., :-1].square().flatten(1).mean(1) for each in stored]
        return float(torch.cat(squares).double().mean())

    def loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Mean squared error of the hidden patches. logits: (B, N, numbers). targets: as `aims` gives them."""
        if smoothing:
            raise ParameterError(f"smoothing is {smoothing}; pixels have no labels that could be smoothed.")
        return errors(logits, targets).mean()

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The explained share of the variance."""
        return 1 - errors(logits, targets).double().mean() / self.variance

    @averages
    def measure(self, model: nn.Module, source: Source) -> Metrics:
        """The loss, and 1 − loss / variance: about 0 for predicting the mean, 1 for predicting every pixel."""
        found = torch.cat([each for each, _ in self._errors(model, source)]).double().mean()
        return {self.primary: 1 - float(found) / self.variance, "loss": float(found)}

    def _errors(self, model: nn.Module, source: Source) -> Iterator[tuple[Tensor, Tensor]]:
        """Of every batch: the error of each image, and its class."""
        for stored, classes in source.batches(torch.arange(len(source)), BATCH):
            inputs = self.to_input(stored)
            yield errors(logits_of(model(inputs)).float(), self.aims(inputs)), classes

    def details(self, model: nn.Module, source: Source) -> Details | None:
        """How well the images of each class are explained."""
        names = self.inner.classes
        if len(names) > MOST_CLASSES:
            return {"items": len(source)}
        found, classes = (torch.cat(each).cpu() for each in zip(*self._errors(model, source), strict=True))
        rows = []
        for number, name in enumerate(names):
            mine = found[classes == number].double()
            rows.append((str(name), len(mine), 1 - float(mine.mean()) / self.variance if len(mine) else None))
        return {"items": len(source), "table": class_table("explained variance", "images", rows)}

    # -------------------------------------------------------------------------------------------------------- pictures
    def pictures(self, model: nn.Module, source: Source, most: int) -> list[Picture]:
        """An image, what the model sees of it, and what it makes of that."""
        chosen = torch.tensor(spread(len(source), most))
        ((stored, classes),) = source.batches(chosen, max(1, len(chosen)))
        inputs = self.to_input(stored)
        images, ranks = self.shape.parted(inputs)
        predicted = logits_of(model(inputs)).float()
        missed = errors(predicted, self.aims(inputs)) / self.variance
        hidden = self.shape.spread((ranks >= self.shape.visible).to(images.dtype))
        made = images * (1 - hidden) + self.shape.glued(self._pixels(predicted, images)) * hidden
        found = []
        for row in range(len(chosen)):
            shown = [self._visible(x) for x in (images[row], images[row] * (1 - hidden[row]), made[row])]
            shown[1] = torch.where(hidden[row].bool().cpu(), torch.full_like(shown[1], HIDDEN), shown[1])
            name = self.inner.classes[int(classes[row])]
            caption = (
                f"{name}: the image, what is seen of it, and what is made of that; {1 - missed[row]:.0%} explained"
            )
            found.append(picture(beside([image_of(each) for each in shown]), caption))
        return found

    def _pixels(self, predicted: Tensor, images: Tensor) -> Tensor:
        """Predictions as pixels. What has mean 0 and variance 1 gets those of the true patch, as the paper shows it."""
        if not self.per_patch:
            return predicted
        true = self.shape.cut(images)
        pixels: Tensor = predicted * (true.var(-1, keepdim=True) + TINY).sqrt() + true.mean(-1, keepdim=True)
        return pixels

    def _visible(self, x: Tensor) -> Tensor:
        """An input image (C, H, W) as uint8: `to_input` undone."""
        levels = torch.tensor([0, 255], dtype=torch.uint8, device=x.device)[:, None, None, None]
        low, high = self.inner.to_input(levels.expand(2, *x.shape).contiguous())
        pixels: Tensor = ((x - low) / (high - low) * 255).round().clamp(0, 255).to(torch.uint8)
        return pixels.cpu()


HIDDEN = 128
"""The grey of hidden patches."""


@dataclasses.dataclass(frozen=True)
class Masking:
    """The augmentation of images, and which of their patches are hidden."""

    task: MaskedTask
    images: Augment

    def __call__(
        self, images: Tensor, targets: Tensor, *, classes: int, to_input: Callable[[Tensor], Tensor], seed: int
    ) -> tuple[Tensor, Tensor]:
        """The whole batch is drawn, of which each of several processes then takes its part."""
        shape = self.task.shape
        x, _ = self.images(images, targets, classes=classes, to_input=self.task.inner.to_input, seed=seed)
        ranks = drawn_ranks(len(x), shape.patches, seed).to(x.device, non_blocking=True)
        inputs = shape.join(x, ranks)
        return inputs, self.task.aims(inputs)


def errors(predicted: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error of the hidden patches of every image, (B,); each has as many of them."""
    wanted, hidden = targets[..., :-1], targets[..., -1]
    found: Tensor = ((predicted - wanted).square().mean(-1) * hidden).sum(-1) / hidden.sum(-1)
    return found
