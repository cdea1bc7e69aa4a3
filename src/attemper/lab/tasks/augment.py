"""Augmentation of whole batches, on the device where the images are.

Every number is drawn on the CPU from a stream that is named by seed, epoch and step. So all recipes of a seed, all
devices, and a run that was interrupted see the same images.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.errors import ParameterError, quoted, suggestion
from attemper.lab.call_syntax import MOST_CHARACTERS, parse_call, render_call
from attemper.lab.tasks.crops import INTERPOLATIONS, Interpolation, random_boxes, resize_boxes
from attemper.lab.tasks.operations import apply_operations, draw_operations
from attemper.lab.tasks.seed_streams import derive, drawing_from
from attemper.lab.threads import threads


class Augment(Protocol):
    """From a batch as the source stores it to inputs and targets of the model."""

    def __call__(
        self, images: Tensor, targets: Tensor, *, classes: int, to_input: Callable[[Tensor], Tensor], seed: int
    ) -> tuple[Tensor, Tensor]: ...


class Transform:
    """One augmentation. `stage` says what it gets: stored pixels, the model's inputs, or inputs with their targets."""

    name: ClassVar[str]
    stage: ClassVar[Literal["pixels", "inputs", "mix"]]


def check_word(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless a word is one of some."""
    if value not in allowed:
        raise ParameterError(f"{name} is {value!r}; it must be {', '.join(allowed[:-1])} or {allowed[-1]}")


def check(name: str, value: Any, low: float, high: float = float("inf"), *, whole: bool = False) -> None:
    """Raise unless a number lies in its range."""
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        allowed = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        raise ParameterError(f"{name} is {value!r}; it must be a {'whole ' if whole else ''}number, {allowed}")


@dataclasses.dataclass(frozen=True)
class CropFlip(Transform):
    """Shift every image by up to `pad` pixels, with black beyond its border, and mirror it with probability `flip`.

    pad: in pixels; none: an eighth of the side, 4 at 32 × 32.
    """

    name: ClassVar[str] = "crop-flip"
    stage: ClassVar[Literal["pixels"]] = "pixels"

    pad: int | None = None
    flip: float = 0.5

    def __post_init__(self) -> None:
        if self.pad is not None:
            check("pad", self.pad, 0, 1000, whole=True)
        check("flip", self.flip, 0, 1)

    def __call__(self, images: Tensor) -> Tensor:
        batch, _, height, width = images.shape
        pad = max(height, width) // 8 if self.pad is None else self.pad
        top, left = torch.randint(2 * pad + 1, (2, batch, 1))
        mirrored = torch.rand(batch, 1) < self.flip
        rows = torch.arange(height) + top
        columns = torch.arange(width)
        columns = torch.where(mirrored, columns.flip(0), columns) + left
        rows, columns = (index.to(images.device, non_blocking=True) for index in (rows, columns))
        samples = torch.arange(batch, device=images.device)[:, None, None]
        padded = F.pad(images, (pad, pad, pad, pad)).permute(0, 2, 3, 1)
        return padded[samples, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@dataclasses.dataclass(frozen=True)
class ResizedCrop(Transform):
    """Cut out a part of every image, of random size, shape and place, and resize it to the whole.

    scale: the smallest share of the area. flip: how probably a part is mirrored.
    """

    name: ClassVar[str] = "resized-crop"
    stage: ClassVar[Literal["pixels"]] = "pixels"

    scale: float = 0.08
    flip: float = 0.5
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        check("scale", self.scale, 0, 1)
        check("flip", self.flip, 0, 1)
        check_word("interpolation", self.interpolation, INTERPOLATIONS)

    def __call__(self, images: Tensor) -> Tensor:
        batch, _, height, width = images.shape
        boxes = random_boxes(batch, height, width, self.scale)
        mirrored = torch.rand(batch) < self.flip
        return resize_boxes(images, boxes, mirrored, self.interpolation)


@dataclasses.dataclass(frozen=True)
class RandAugment(Transform):
    """Apply `ops` random operations of strength `magnitude` (0 … 30) to every image. torchvision's.

    p: each operation is applied with this probability. spread: standard deviation of the strength.
    """

    name: ClassVar[str] = "randaugment"
    stage: ClassVar[Literal["pixels"]] = "pixels"

    magnitude: int = 9
    ops: int = 2
    p: float = 1.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        check("magnitude", self.magnitude, 0, 30, whole=True)
        check("ops", self.ops, 1, 100, whole=True)
        check("p", self.p, 0, 1)
        check("spread", self.spread, 0, 1e3)

    def __call__(self, images: Tensor) -> Tensor:
        batch, _, height, width = images.shape
        return apply_operations(images, draw_operations(batch, height, width, **dataclasses.asdict(self)))


@dataclasses.dataclass(frozen=True)
class AutoAugment(Transform):
    """Apply a random pair of operations of a learnt policy to every image. torchvision's."""

    name: ClassVar[str] = "autoaugment"
    stage: ClassVar[Literal["pixels"]] = "pixels"

    policy: Literal["cifar10", "imagenet", "svhn"] = "cifar10"

    def __post_init__(self) -> None:
        check_word("policy", self.policy, ("cifar10", "imagenet", "svhn"))

    def __call__(self, images: Tensor) -> Tensor:
        from torchvision.transforms import v2

        return one_by_one(v2.AutoAugment(v2.AutoAugmentPolicy(self.policy)), images)


@dataclasses.dataclass(frozen=True)
class Erasing(Transform):
    """Erase one rectangle of every image with probability `p`.

    fill: what takes its place, the mean colour of the training set, or normal noise with its mean and deviation.
    """

    name: ClassVar[str] = "erasing"
    stage: ClassVar[Literal["inputs"]] = "inputs"

    p: float = 0.25
    smallest: float = 0.02
    largest: float = 0.33
    fill: Literal["mean", "noise"] = "mean"

    def __post_init__(self) -> None:
        check_word("fill", self.fill, ("mean", "noise"))
        check("p", self.p, 0, 1)
        check("smallest", self.smallest, 0, 1)
        check("largest", self.largest, self.smallest, 1)

    def __call__(self, inputs: Tensor) -> Tensor:
        batch, channels, height, width = inputs.shape
        area = height * width * torch.empty(batch).uniform_(self.smallest, self.largest)
        aspect = torch.empty(batch).uniform_(-1.2, 1.2).exp()  # from 0.3 to 3.3, as many wide ones as tall ones
        tall = (area * aspect).sqrt().round().clamp(1, height)
        wide = (area / aspect).sqrt().round().clamp(1, width)
        top = (torch.rand(batch) * (height - tall + 1)).floor()
        left = (torch.rand(batch) * (width - wide + 1)).floor()
        chosen = torch.rand(batch) < self.p
        rows = inside(torch.arange(height), top, tall) & chosen[:, None]
        columns = inside(torch.arange(width), left, wide)
        pixels = int((rows.sum(1) * columns.sum(1)).sum())
        rows, columns = (each.to(inputs.device, non_blocking=True) for each in (rows, columns))
        erased = (rows[:, :, None] & columns[:, None, :])[:, None]
        if self.fill == "mean":
            return inputs.masked_fill(erased, 0.0)
        noise = torch.randn(channels * pixels).to(inputs.device, inputs.dtype, non_blocking=True)
        return inputs.masked_scatter(erased, noise)


@dataclasses.dataclass(frozen=True)
class MixUp(Transform):
    """Blend every image and its class with a neighbour's; the share is drawn from Beta(alpha, alpha). torchvision's."""

    name: ClassVar[str] = "mixup"
    stage: ClassVar[Literal["mix"]] = "mix"

    alpha: float = 0.8

    def __post_init__(self) -> None:
        check("alpha", self.alpha, 1e-3, 1e3)

    def __call__(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        from torchvision.transforms import v2

        mixed: tuple[Tensor, Tensor] = v2.MixUp(alpha=self.alpha, num_classes=classes)(inputs, targets)
        return mixed


@dataclasses.dataclass(frozen=True)
class CutMix(Transform):
    """Paste a rectangle of a neighbour into every image, and mix the classes by area. torchvision's."""

    name: ClassVar[str] = "cutmix"
    stage: ClassVar[Literal["mix"]] = "mix"

    alpha: float = 1.0

    def __post_init__(self) -> None:
        check("alpha", self.alpha, 1e-3, 1e3)

    def __call__(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        from torchvision.transforms import v2

        mixed: tuple[Tensor, Tensor] = v2.CutMix(alpha=self.alpha, num_classes=classes)(inputs, targets)
        return mixed


def one_by_one(transform: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """A transform that draws once per call, called for every image."""
    with threads(1):  # on several each small operation would wait for all of them
        return torch.stack([transform(image) for image in images])


def inside(positions: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """Which positions lie in each of some intervals: boolean (intervals, positions)."""
    return (positions >= start[:, None]) & (positions < (start + length)[:, None])


KINDS: dict[str, type[Any]] = {
    kind.name: kind for kind in (CropFlip, ResizedCrop, RandAugment, AutoAugment, Erasing, MixUp, CutMix)
}


def list_augmentations(kinds: Mapping[str, type[Any]] = KINDS) -> list[str]:
    """The names that an augmentation text can use."""
    return ["none", *kinds]


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Several transforms, applied stage by stage and within a stage in the order in which they were written.

    Where mixup and cutmix stand together, every batch gets one of them, by the toss of a coin.
    """

    transforms: tuple[Any, ...] = ()

    def __call__(
        self, images: Tensor, targets: Tensor, *, classes: int, to_input: Callable[[Tensor], Tensor], seed: int
    ) -> tuple[Tensor, Tensor]:
        """A batch as the source stores it → inputs and targets of the model.

        images: uint8 (B, C, H, W).
        targets: int64 (B). Mixed ones come back as probabilities (B, classes).
        seed: of the stream from which this batch's numbers are drawn.
        """
        pixels, inputs, mixes = (self._of(stage) for stage in ("pixels", "inputs", "mix"))
        with drawing_from(seed):
            x = to_input(functools.reduce(lambda x, transform: transform(x), pixels, images))
            x = functools.reduce(lambda x, transform: transform(x), inputs, x)
            if not mixes:
                return x, targets
            mixed: tuple[Tensor, Tensor] = mixes[int(torch.randint(len(mixes), ()))](x, targets, classes)
            return mixed

    def _of(self, stage: str) -> list[Any]:
        return [transform for transform in self.transforms if transform.stage == stage]

    def __str__(self) -> str:
        return "+".join(_render(transform) for transform in self.transforms) or "none"


def _render(transform: Any) -> str:
    given = {
        field.name: getattr(transform, field.name)
        for field in dataclasses.fields(transform)
        if getattr(transform, field.name) != field.default
    }
    return render_call(transform.name, given)


def seed_of_batch(seed: int, epoch: int, batch: int) -> int:
    """The stream of one batch."""
    return derive(seed, "augment", epoch, batch)


def parse_augmentation(text: str, kinds: Mapping[str, type[Any]] = KINDS) -> Augmentation:
    """Read augmentations joined by '+', each with an optional number or options.

    kinds: the transforms that fit, by name; those of images unless given.

    >>> str(parse_augmentation("crop-flip + erasing(0.5) + mixup(alpha=0.2)"))
    'crop-flip+erasing(p=0.5)+mixup(alpha=0.2)'
    """
    if text.strip() == "none":
        return Augmentation()
    if len(text) > MOST_CHARACTERS:
        raise ParameterError(f"{quoted(text)} has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read.")
    parts = [part.strip() for part in re.split(r"\+(?![^()]*\))", text)]
    transforms = tuple(_parse_one(part, text, kinds) for part in parts)
    for transform in transforms:
        if [other.name for other in transforms].count(transform.name) > 1:
            raise ParameterError(f"'{text}' has {transform.name} more than once.")
    return Augmentation(transforms)


def _parse_one(part: str, text: str, kinds: Mapping[str, type[Any]]) -> Any:
    first = re.fullmatch(r"([\w-]+)\(\s*([^=(),]+?)\s*((?:,.*)?)\)", part)  # the first option may go without its name
    name = first[1] if first else part.partition("(")[0].strip()
    if name not in kinds:
        known = list_augmentations(kinds)
        hint = "; 'none' stands alone" if name == "none" else suggestion(name, known)
        raise ParameterError(f"There is no augmentation '{name}' (in '{text}').{hint} There are: {', '.join(known)}.")
    kind = kinds[name]
    fields = [field.name for field in dataclasses.fields(kind)]
    _, options = parse_call(f"{name}({fields[0]}={first[2]}{first[3]})" if first else part)
    for option in options:
        if option not in fields:
            hint = suggestion(option, fields)
            raise ParameterError(f"{name} has no option '{option}'.{hint} Options: {', '.join(fields)}.")
    try:
        return kind(**options)
    except ParameterError as error:
        raise ParameterError(f"{name}: {error}.") from None
