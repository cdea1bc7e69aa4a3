"""Augmented images keep their boxes where their objects are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from attemper.errors import ParameterError
from attemper.lab.tasks.augment import Augmentation
from attemper.lab.tasks.boxes.augmenting import KINDS, SMALLEST, box_augmentation
from attemper.lab.tasks.boxes.canvas import fitted
from attemper.lab.tasks.boxes.shape import AREA, BOX, CLASS, COLUMNS, CROWD, NONE
from attemper.lab.tasks.seed_streams import drawing_from

SIZE = 64
COLOURS = ((250, 0, 0), (0, 250, 0), (0, 0, 250))
EVERY = "+".join(KINDS)


def scene(seed: int, *, height: int = SIZE, width: int = SIZE) -> tuple[Tensor, Tensor]:
    """A canvas with up to three rectangles of pure colours that do not touch, on grey."""
    draw = torch.Generator().manual_seed(seed)
    image = torch.zeros(4, SIZE, SIZE, dtype=torch.uint8)
    image[:3, :height, :width] = 60
    image[3, :height, :width] = 255
    rows = torch.zeros(4, COLUMNS)
    rows[:, CLASS] = NONE
    for at in range(3):
        left, right = (int(at * width / 3) + 2, int((at + 1) * width / 3) - 2)
        top = int(torch.randint(0, height // 2, (1,), generator=draw))
        bottom = top + int(torch.randint(10, height // 2, (1,), generator=draw))
        image[:3, top:bottom, left:right] = torch.tensor(COLOURS[at], dtype=torch.uint8)[:, None, None]
        rows[at] = torch.tensor([at, left / SIZE, top / SIZE, right / SIZE, bottom / SIZE, 10.0 * at, 0.0])
    return image, rows


def extent(image: Tensor, colour: int) -> list[float] | None:
    """The box round the pixels that are clearly of a colour, in pixels."""
    others = [channel for channel in range(3) if channel != colour]
    there = (image[colour].int() > 150) & (image[others].int().amax(0) < 60)
    if not there.any():
        return None
    ys, xs = there.nonzero().unbind(1)
    return [float(xs.min()), float(ys.min()), float(xs.max()) + 1, float(ys.max()) + 1]


def augmented(text: str, images: Tensor, rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    return box_augmentation(text)(images, rows, classes=3, to_input=lambda stored: stored, seed=seed)


@pytest.mark.parametrize(
    "text", ["flip(1)", "crop(least=0.3)", "scale(0.5)", "scale(1.2)", "zoom-out(p=1)", "flip+crop+scale+zoom-out"]
)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), height=st.integers(40, SIZE))
def test_boxes_stay_round_their_objects(text: str, seed: int, height: int) -> None:
    image, rows = scene(seed, height=height)
    (canvas,), (found,) = augmented(text, image[None], rows[None], seed)
    kept = found[found[:, CLASS] >= 0]
    assert found.shape == rows.shape
    assert bool((kept[:, BOX] >= 0).all())
    assert bool((kept[:, 3:5] > kept[:, 1:3]).all())
    for row in kept:
        at = int(row[CLASS])
        assert float(row[AREA]) == 10.0 * at, "what metrics need stays with its box"
        seen = extent(canvas[:3], at)
        sides = (row[3:5] - row[1:3]) * SIZE
        if seen is None or float(sides.min()) < 6:
            continue  # too little is left of it to see pure colour
        assert seen == pytest.approx((row[BOX] * SIZE).tolist(), abs=2.6)
    for at in {0, 1, 2} - {int(row[CLASS]) for row in kept}:
        gone = extent(canvas[:3], at)
        if gone is not None and "crop" not in text:  # SSD's crop drops a box whose centre is outside of the part
            assert min(gone[2] - gone[0], gone[3] - gone[1]) <= SMALLEST + 1


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_the_mask_is_where_the_image_is(seed: int) -> None:
    image, rows = scene(seed, height=48)
    (canvas,), _ = augmented("scale(0.4, most=1.6)", image[None], rows[None], seed)
    shown = canvas[3] > 0
    assert bool((canvas[:3, ~shown] == 0).all())
    height, width = int(shown[:, 0].sum()), int(shown[0].sum())
    assert bool(shown[:height, :width].all())
    assert int(shown.sum()) == height * width


class ByTorchvision:
    """The same augmentation by torchvision's transforms on its own tensors."""

    def __init__(self, names: list[str]) -> None:
        fit = lambda sample: v2.Resize(fitted_as(sample["image"]), antialias=True)(sample)  # noqa: E731
        cut = lambda sample: v2.RandomCrop([min(side, SIZE) for side in sample["image"].shape[1:]])(sample)  # noqa: E731
        known = {
            "flip": [v2.RandomHorizontalFlip(0.5)],
            "crop": [v2.RandomIoUCrop(min_scale=0.5), fit],
            "scale": [v2.ScaleJitter((SIZE, SIZE), (0.6, 1.4), antialias=True), cut],
            "zoom-out": [v2.RandomZoomOut([124, 116, 104], (1.0, 2.0), 0.5), fit],
            "photometric": [v2.RandomPhotometricDistort(p=0.5)],
        }
        self.steps = [step for name in names for step in known[name]]
        self.steps += [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=SMALLEST)]

    def __call__(self, image: Tensor, boxes: Tensor, seed: int) -> tuple[Tensor, Tensor, list[int]]:
        size = (image.shape[1], image.shape[2])
        wrapped = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)  # type: ignore[call-arg]
        sample = {"image": tv_tensors.Image(image), "boxes": wrapped, "labels": torch.arange(len(boxes))}
        with drawing_from(seed):
            for step in self.steps:
                sample = step(sample)
        return sample["image"].as_subclass(Tensor), sample["boxes"].as_subclass(Tensor), sample["labels"].tolist()


def fitted_as(image: Tensor) -> list[int]:
    width, height = fitted(image.shape[2], image.shape[1], SIZE)
    return [height, width]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, unique=True), st.integers(0, 10**6), st.integers(24, SIZE))
def test_pixels_and_boxes_are_torchvisions(names: list[str], seed: int, height: int) -> None:
    image, rows = scene(seed, height=height)
    image[:3, :height] = torch.randint(0, 256, (3, height, SIZE), generator=torch.Generator().manual_seed(seed))
    there = rows[:, CLASS] >= 0
    pixels, boxes, kept = ByTorchvision(names)(image[:3, :height], rows[there, BOX] * SIZE, seed)
    (canvas,), (found,) = augmented("+".join(names), image[None], rows[None], seed)
    assert torch.equal(canvas[:3, : pixels.shape[1], : pixels.shape[2]], pixels)
    assert int((canvas[3] > 0).sum()) == pixels.shape[1] * pixels.shape[2]
    assert found[: len(kept), CLASS].tolist() == kept
    assert bool((found[len(kept) :, CLASS] == NONE).all())
    torch.testing.assert_close(found[: len(kept), BOX] * SIZE, boxes.reshape(-1, 4), rtol=0, atol=1e-4)


def test_what_is_drawn_belongs_to_the_batch_alone() -> None:
    image, rows = scene(1)
    images, targets = image.expand(4, -1, -1, -1), rows.expand(4, -1, -1)
    torch.manual_seed(0)
    first = augmented(EVERY, images, targets, 7)
    state = torch.get_rng_state()
    torch.manual_seed(9)
    again, other = augmented(EVERY, images, targets, 7), augmented(EVERY, images, targets, 8)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0][0], first[0][1]), "every image has draws of its own"
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_image_without_boxes_and_one_with_a_crowd_are_augmented_too() -> None:
    image, rows = scene(2)
    rows[1, CROWD] = 1.0
    nothing = rows.clone()
    nothing[:, CLASS] = NONE
    for seed in range(4):
        _, found = augmented(EVERY, torch.stack([image, image]), torch.stack([rows, nothing]), seed)
        assert bool((found[1, :, CLASS] == NONE).all())
        crowd = found[0][found[0][:, CLASS] == 1]
        assert bool((crowd[:, CROWD] == 1).all())


def test_no_augmentation_changes_nothing() -> None:
    image, rows = scene(3)
    assert box_augmentation("none") == Augmentation()
    (canvas,), (found,) = augmented("none", image[None], rows[None], 0)
    assert torch.equal(canvas, image)
    assert torch.equal(found, rows)
    assert str(box_augmentation("flip + crop(0.3)")) == "flip+crop(least=0.3)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixup", "There is no augmentation 'mixup'"),
        ("flip(2)", "flip: p is 2; it must be a number, from 0 to 1"),
        ("scale(0)", "least is 0; it must be a number, from 0.05"),
        ("scale(2, most=1)", "most is 1; it must be a number, from 2"),
        ("zoom-out(most=0.5)", "most is 0.5"),
        ("crop(least=0)", "least is 0"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        box_augmentation(text)
