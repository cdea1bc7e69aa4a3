"""Augmentation of images together with their boxes, as torchvision's transforms (v2) do it, image by image.

Every number is drawn on the CPU from the stream of the batch, so that all recipes of a seed see the same images. What
is drawn, and what is done to pixels, is torchvision's; boxes and the search for a crop are a few numbers, for which
numpy takes a tenth of the time of tensors. A test compares both with torchvision's own transforms.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attemper.lab.tasks.augment import Augment, Augmentation, Transform, check, parse_augmentation
from attemper.lab.tasks.boxes.canvas import SHOWN, fitted
from attemper.lab.tasks.boxes.shape import BOX, CLASS, NONE
from attemper.lab.tasks.seed_streams import drawing_from
from attemper.lab.threads import threads

SMALLEST = 2.0
"""Pixels: what is left of a box after a crop and is narrower or lower than this is no object to be found any more."""
MEAN = (124, 116, 104)
"""What stands round an image that was made smaller: ImageNet's mean colour."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """An image and its boxes. image: uint8 (3, H, W); boxes: float32 (n, 4), left, top, right, bottom in pixels."""

    image: Tensor
    boxes: NDArray[np.float32]

    @property
    def height(self) -> int:
        return self.image.shape[1]

    @property
    def width(self) -> int:
        return self.image.shape[2]

    def resized(self, height: int, width: int) -> "Sample":
        """Image and boxes in another size; of at least one pixel, however long and narrow the image is."""
        from torchvision.transforms.v2.functional import resize_image

        height, width = max(1, height), max(1, width)
        if (height, width) == (self.height, self.width):
            return self
        ratios = np.array([width / self.width, height / self.height] * 2, np.float32)
        return Sample(resize_image(self.image, [height, width], antialias=True), self.boxes * ratios)

    def cut(self, top: int, left: int, height: int, width: int) -> "Sample":
        """A part, with what lies in it of every box."""
        image = self.image[:, top : top + height, left : left + width]
        return Sample(image, within(self.boxes - np.array([left, top] * 2, np.float32), height, width))


Step = Callable[[Sample], Sample]


def within(boxes: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """What of boxes lies in an image of this size."""
    return np.clip(boxes, 0, np.array([width, height] * 2, np.float32))


@dataclasses.dataclass(frozen=True)
class Flip(Transform):
    """Mirror every image with probability `p`."""

    name: ClassVar[str] = "flip"

    p: float = 0.5

    def __post_init__(self) -> None:
        check("p", self.p, 0, 1)

    def on(self, size: int) -> list[Step]:
        def flip(sample: Sample) -> Sample:
            if float(torch.rand(1)) >= self.p:
                return sample
            boxes = sample.boxes.copy()
            boxes[:, [2, 0]] = sample.width - sample.boxes[:, [0, 2]]
            return Sample(sample.image.flip(-1), boxes)

        return [flip]


@dataclasses.dataclass(frozen=True)
class Crop(Transform):
    """Cut out a part with at least one object in it, as SSD does, and make it as large as fits.

    least: the smallest side of the part, as a share of the image's.
    """

    name: ClassVar[str] = "crop"

    least: float = 0.5

    def __post_init__(self) -> None:
        check("least", self.least, 0.05, 1)

    def on(self, size: int) -> list[Step]:
        from torchvision.transforms import v2

        limits = v2.RandomIoUCrop(min_scale=self.least)

        def crop(sample: Sample) -> Sample:
            part = find_part(limits, sample)
            if part is None:
                return sample
            cut = sample.cut(*part.place)
            cut.boxes[~part.inside] = 0
            return cut

        return [crop, _fit(size)]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an image that is to be kept. place: top, left, height, width; inside: the boxes whose centre it has."""

    place: tuple[int, int, int, int]
    inside: NDArray[np.bool_]


def find_part(limits: Any, sample: Sample) -> Part | None:
    """What torchvision's RandomIoUCrop would cut out, from the same draws; None: the image stays whole."""
    while True:
        least = limits.options[int(torch.randint(0, len(limits.options), (1,)))]
        if least >= 1:
            return None
        before = torch.get_rng_state()
        drawn = torch.rand(2 * limits.trials, 2).numpy()
        part, used = _first_part(limits, sample, least, drawn)
        torch.set_rng_state(before)
        torch.rand(used, 2)  # torchvision draws one trial after the other, and nothing after the one that fits
        if part is not None:
            return part


def _first_part(limits: Any, sample: Sample, least: float, drawn: NDArray[np.float32]) -> tuple[Part | None, int]:
    """The first of some trials that has enough of a box in it, and how many draws it and those before it took.

    drawn: float32 (twice the trials, 2). A trial takes a pair for its sides, and if their aspect is allowed, the next
        one for its place.
    """
    size = np.array([sample.width, sample.height], np.float32)
    sides = (size * (limits.min_scale + (limits.max_scale - limits.min_scale) * drawn)).astype(np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        aspect = sides[:, 0] / sides[:, 1]
    allowed = ((limits.min_aspect_ratio <= aspect) & (aspect <= limits.max_aspect_ratio)).tolist()
    chosen, used = [], 0
    for _ in range(limits.trials):
        if allowed[used]:
            chosen.append(used)
        used += 1 + allowed[used]
    at = np.array(chosen, np.int64)
    sides = sides[at]
    corners = ((size - sides.astype(np.float32)) * drawn[at + 1]).astype(np.int64)
    starts, areas = corners.astype(np.float32)[:, None], sides.prod(1).astype(np.float32)[:, None]
    ends = starts + sides.astype(np.float32)[:, None]
    first, last = sample.boxes[:, :2], sample.boxes[:, 2:]
    centres = np.float32(0.5) * (first + last)
    inside = np.all((starts < centres) & (centres < ends), 2)
    common = np.prod(np.maximum(np.minimum(last, ends) - np.maximum(first, starts), 0), 2)
    shared = common / (np.prod(last - first, 1) + areas - common)
    fits = np.max(shared, 1, initial=-1, where=inside) >= np.float32(least)
    if not fits.any():
        return None, used
    best = int(fits.argmax())
    (left, top), (width, height) = corners[best].tolist(), sides[best].tolist()
    return Part((top, left, height, width), inside[best]), chosen[best] + 2


@dataclasses.dataclass(frozen=True)
class Scale(Transform):
    """Resize every image by a factor from `least` to `most`, and cut a part out of what is larger than the canvas."""

    name: ClassVar[str] = "scale"

    least: float = 0.6
    most: float = 1.4

    def __post_init__(self) -> None:
        check("least", self.least, 0.05, 20)
        check("most", self.most, self.least, 20)

    def on(self, size: int) -> list[Step]:
        from torchvision.transforms import v2

        jitter = v2.ScaleJitter((size, size), (self.least, self.most), antialias=True)

        def scale(sample: Sample) -> Sample:
            return sample.resized(*jitter.make_params([sample.image])["size"])

        return [scale, _cut_to(size)]


@dataclasses.dataclass(frozen=True)
class ZoomOut(Transform):
    """Put an image on a larger plain one with probability `p`, up to `most` times as wide, and resize the whole."""

    name: ClassVar[str] = "zoom-out"

    most: float = 2.0
    p: float = 0.5

    def __post_init__(self) -> None:
        check("most", self.most, 1, 10)
        check("p", self.p, 0, 1)

    def on(self, size: int) -> list[Step]:
        from torchvision.transforms import v2
        from torchvision.transforms.v2.functional import pad_image

        zoom = v2.RandomZoomOut(list(MEAN), (1.0, self.most), self.p)

        def zoom_out(sample: Sample) -> Sample:
            if float(torch.rand(1)) >= self.p:
                return sample
            padding = zoom.make_params([sample.image])["padding"]
            image = pad_image(sample.image, padding, fill=list(MEAN))
            return Sample(image, sample.boxes + np.array(padding[:2] * 2, np.float32))

        return [zoom_out, _fit(size)]


@dataclasses.dataclass(frozen=True)
class Photometric(Transform):
    """Change brightness, contrast, saturation and hue, each with probability `p`. torchvision's."""

    name: ClassVar[str] = "photometric"

    p: float = 0.5

    def __post_init__(self) -> None:
        check("p", self.p, 0, 1)

    def on(self, size: int) -> list[Step]:
        from torchvision.transforms import v2

        distort = v2.RandomPhotometricDistort(p=self.p)
        return [lambda sample: Sample(distort(sample.image), sample.boxes)]


KINDS: dict[str, type[Any]] = {kind.name: kind for kind in (Flip, Crop, Scale, ZoomOut, Photometric)}


def _fit(size: int) -> Step:
    """Resizes an image with its boxes so that its longer side is that of the canvas."""

    def fit(sample: Sample) -> Sample:
        across, down = fitted(sample.width, sample.height, size)
        return sample.resized(down, across)

    return fit


def _cut_to(size: int) -> Step:
    """Cuts a part of random place out of an image that is larger than the canvas."""
    from torchvision.transforms import v2

    def cut(sample: Sample) -> Sample:
        height, width = min(sample.height, size), min(sample.width, size)
        drawn = v2.RandomCrop((height, width)).make_params([sample.image])
        return sample.cut(drawn["top"], drawn["left"], height, width) if drawn["needs_crop"] else sample

    return cut


@dataclasses.dataclass(frozen=True)
class BoxAugmentation:
    """Several transforms, one after the other, on every image of a batch and its boxes, by the CPU."""

    by_cpu: ClassVar[bool] = True
    """Its images need not lie on a GPU."""

    transforms: tuple[Any, ...]

    def __call__(
        self, images: Tensor, targets: Tensor, *, classes: int, to_input: Callable[[Tensor], Tensor], seed: int
    ) -> tuple[Tensor, Tensor]:
        size, device = images.shape[-1], images.device
        steps = [step for transform in self.transforms for step in transform.on(size)]
        # Dozens of small operations on one image: on a GPU each would be a launch, and each look at a box a wait;
        # on several cores each would wait for all of them, for as long as other processes have one.
        with drawing_from(seed), threads(1):
            changed = [_changed(*pair, steps) for pair in zip(images.cpu(), targets.cpu(), strict=True)]
        canvases, rows = zip(*changed, strict=True)
        return to_input(torch.stack(canvases).to(device)), torch.stack(rows).to(device)

    def __str__(self) -> str:
        return str(Augmentation(self.transforms))


def _changed(image: Tensor, rows: Tensor, steps: list[Step]) -> tuple[Tensor, Tensor]:
    """One image and its boxes after all steps, on a canvas again."""
    size = image.shape[-1]
    height, width = int((image[3, :, 0] > 0).sum()), int((image[3, 0] > 0).sum())
    there = (rows[:, CLASS] >= 0).nonzero().flatten()
    sample = Sample(image[:3, :height, :width], (rows[there, BOX] * size).numpy())
    for step in steps:
        sample = step(sample)
    boxes = within(sample.boxes, sample.height, sample.width)
    kept = torch.from_numpy((boxes[:, 2:] - boxes[:, :2] >= SMALLEST).all(1))
    canvas, found = torch.zeros_like(image), torch.zeros_like(rows)
    canvas[:3, : sample.height, : sample.width] = sample.image
    canvas[3, : sample.height, : sample.width] = SHOWN
    found[:, CLASS] = NONE
    count = int(kept.sum())
    found[:count] = rows[there[kept]]
    found[:count, BOX] = torch.from_numpy(boxes)[kept] / size
    return canvas, found


def box_augmentation(text: str) -> Augment:
    """What the `augment` of a budget means where images have boxes, such as 'flip+crop(least=0.3)+photometric'."""
    parsed = parse_augmentation(text, KINDS)
    return BoxAugmentation(parsed.transforms) if parsed.transforms else parsed
