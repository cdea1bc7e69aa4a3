"""Augmentation: drawn from a stream of its own, image by image, the same whenever it is drawn again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as torchvision_functions

from attemper.errors import ParameterError
from attemper.lab.tasks.augment import list_augmentations, parse_augmentation, seed_of_batch
from attemper.lab.tasks.crops import INTERPOLATIONS, random_boxes, resize_boxes
from attemper.lab.tasks.operations import apply_operations, draw_operations

EVERYTHING = [name for name in list_augmentations() if name != "none"]


def batch(size: int = 16, side: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8), torch.arange(size) % 10


def augmented(text: str, images: Tensor, targets: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    return parse_augmentation(text)(images, targets, classes=10, to_input=lambda x: x.float(), seed=seed)


@pytest.mark.parametrize("text", [*EVERYTHING, "+".join(EVERYTHING)])
def test_the_same_seed_gives_the_same_images_and_another_seed_others(text: str) -> None:
    images, targets = batch()
    first, again, other = (augmented(text, images, targets, seed)[0] for seed in (1, 1, 2))
    assert first.shape == images.shape
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, images.float())


@pytest.mark.parametrize("text", EVERYTHING)
def test_augmentation_leaves_the_stream_of_the_methods_alone(text: str) -> None:
    images, targets = batch()
    before = torch.get_rng_state()
    augmented(text, images, targets)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("text", ["crop-flip", "resized-crop", "randaugment", "autoaugment", "erasing(1)"])
def test_every_image_of_a_batch_has_its_own_draw(text: str) -> None:
    one = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8)
    out, _ = augmented(text, one.expand(32, -1, -1, -1), torch.zeros(32, dtype=torch.int64))
    assert len({image.numpy().tobytes() for image in out}) > 4


def test_none_does_nothing() -> None:
    images, targets = batch()
    out, same = augmented("none", images, targets)
    assert torch.equal(out, images.float())
    assert same is targets


def test_flip_mirrors_left_and_right() -> None:
    images, targets = batch()
    assert torch.equal(augmented("crop-flip(0, flip=1)", images, targets)[0], images.flip(-1).float())
    out, _ = augmented("crop-flip(0)", images.repeat(8, 1, 1, 1), targets.repeat(8))
    mirrored = [bool(torch.equal(a, b.flip(-1).float())) for a, b in zip(out, images.repeat(8, 1, 1, 1), strict=True)]
    assert 40 < sum(mirrored) < 88  # of 128, half of them by chance


def test_crop_shifts_by_at_most_the_padding_with_black_beyond() -> None:
    images, targets = batch(64, side=6)
    out, _ = augmented("crop-flip(2, flip=0)", images, targets)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2)).float()
    shifts = set()
    for image, whole in zip(out, padded, strict=True):
        fitting = [(y, x) for y in range(5) for x in range(5) if torch.equal(image, whole[:, y : y + 6, x : x + 6])]
        assert len(fitting) == 1
        shifts.add(fitting[0])
    assert len(shifts) > 12


# ----------------------------------------------------------------------------------------------- crops of random size
def pictures(count: int, channels: int, height: int, width: int) -> Tensor:
    """Half of them noise, half of them smooth: where a filter overshoots, and where it does not."""
    noise = torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8)
    smooth = torch.nn.functional.interpolate(torch.rand(count, channels, 3, 3), (height, width), mode="bilinear")
    return torch.where(torch.arange(count)[:, None, None, None] % 2 == 0, noise, (255 * smooth).byte())


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 8, 8), (3, 20, 31)])
def test_crops_are_those_of_torchvision_on_the_same_boxes(interpolation: Any, shape: tuple[int, int, int]) -> None:
    """49 of 50 values are equal, and others differ by two of 255 at most: Pillow calculates with whole numbers."""
    images = pictures(300, *shape)
    boxes = random_boxes(300, *shape[1:], 0.08)
    mirrored = torch.rand(300) < 0.5
    ours = resize_boxes(images, boxes, mirrored, interpolation)
    how = InterpolationMode(interpolation)
    theirs = torch.empty_like(images)
    for image, box, turned, out in zip(images, boxes.T.tolist(), mirrored.tolist(), theirs, strict=True):
        picture = torchvision_functions.to_pil_image(image)
        cut = torchvision_functions.resized_crop(picture, *box, size=list(shape[1:]), interpolation=how)
        out.copy_(torchvision_functions.pil_to_tensor(torchvision_functions.hflip(cut) if turned else cut))
    far = (ours.int() - theirs.int()).abs()
    assert int(far.max()) <= 2
    assert float((far > 0).float().mean()) < 0.02


def test_a_crop_of_everything_is_the_image_itself() -> None:
    images, targets = batch()
    assert torch.equal(augmented("resized-crop(1, flip=0)", images, targets)[0], images.float())
    assert torch.equal(augmented("resized-crop(1, flip=1)", images, targets)[0], images.flip(-1).float())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.integers(0, 9))
def test_boxes_lie_in_the_image_and_have_the_asked_area_and_aspect(
    height: int, width: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    top, left, tall, wide = random_boxes(200, height, width, scale)
    assert int(top.min()) >= 0 <= int(left.min())
    assert int(tall.min()) >= 1 <= int(wide.min())
    assert int((top + tall).max()) <= height
    assert int((left + wide).max()) <= width
    slack = 0.5  # sides are rounded
    assert bool(((tall + slack) * (wide + slack) >= min(scale, 9 / 16) * height * width * 0.999).all()) or (
        not 3 / 4 <= width / height <= 4 / 3  # then the largest box of an allowed aspect may be smaller than asked for
    )
    assert bool(((wide + slack) / (tall - slack) >= 3 / 4 * 0.999).all())
    assert bool(((wide - slack) / (tall + slack) <= 4 / 3 * 1.001).all())


def test_boxes_are_distributed_as_torchvisions_are() -> None:
    ours = random_boxes(4000, 64, 64, 0.08).double()
    image = torch.empty(3, 64, 64)
    crop = v2.RandomResizedCrop(64)
    drawn = [crop.make_params([image]) for _ in range(4000)]
    theirs = torch.tensor([[each[k] for each in drawn] for k in ("top", "left", "height", "width")]).double()
    assert torch.allclose(ours.mean(1), theirs.mean(1), atol=1.2)
    assert torch.allclose(ours.std(1), theirs.std(1), atol=1.0)
    areas = [(each[2] * each[3]).sort().values / 64**2 for each in (ours, theirs)]
    assert float((areas[0] - areas[1]).abs().max()) < 0.06
    assert math.isclose(float(areas[0][0]), 0.08, abs_tol=0.02)


# --------------------------------------------------------------------------------------------------------- RandAugment
@pytest.mark.parametrize(("magnitude", "ops", "channels"), [(9, 2, 3), (27, 3, 3), (0, 1, 3), (30, 2, 1)])
def test_a_batch_goes_through_randaugment_with_the_bits_of_torchvisions_image_by_image(
    magnitude: int, ops: int, channels: int
) -> None:
    images = pictures(160, channels, 16, 20)
    torch.manual_seed(5)
    one_by_one = v2.RandAugment(ops, magnitude)
    theirs = torch.stack([one_by_one(image) for image in images])
    after = torch.get_rng_state()
    torch.manual_seed(5)
    drawn = draw_operations(160, 16, 20, ops=ops, magnitude=magnitude, p=1.0, spread=0.0)
    before = images.clone()
    assert torch.equal(apply_operations(images, drawn), theirs)
    assert torch.equal(torch.get_rng_state(), after), "as many numbers are drawn"
    assert torch.equal(images, before), "what came in is as it was"


def test_operations_can_be_left_out_and_their_strength_can_spread() -> None:
    def draws(p: float, spread: float) -> list[tuple[str, float]]:
        drawn = draw_operations(2000, 32, 32, ops=1, magnitude=27, p=p, spread=spread)
        return [operation for (operation,) in drawn]

    applied = [name for name, _ in draws(0.5, 0.0) if name != "Identity"]
    assert 0.4 < len(applied) / 2000 < 0.53, "half of them, and one of fourteen does nothing anyway"
    strengths = torch.tensor([abs(strength) for name, strength in draws(1.0, 1.5) if name == "Rotate"])
    assert strengths.unique().tolist() == pytest.approx(range(int(strengths.min()), int(strengths.max()) + 1))
    assert 25 < float(strengths.mean()) < 28.5
    assert 0.8 < float(strengths.std()) < 2
    assert float(strengths.max()) <= 30
    assert not {name for name, _ in draws(0.0, 0.0)} - {"Identity"}


# ------------------------------------------------------------------------------------------------------------- erasing
def test_erased_rectangles_can_be_filled_with_noise() -> None:
    images = torch.full((64, 3, 20, 20), 9, dtype=torch.uint8)
    kept = torch.zeros(64, dtype=torch.int64)
    out, mean = (augmented(f"erasing(1{fill})", images, kept)[0] for fill in (", fill=noise", ""))
    erased = mean == 0
    assert torch.equal(out[~erased], mean[~erased]), "the same rectangles"
    noise = out[erased]
    assert abs(float(noise.mean())) < 0.05
    assert float(noise.std()) == pytest.approx(1, abs=0.05)
    assert len(noise.unique()) > 0.99 * len(noise)


def test_erasing_takes_one_rectangle_of_the_asked_size() -> None:
    images = torch.full((64, 3, 20, 20), 9, dtype=torch.uint8)
    out, _ = augmented("erasing(1, smallest=0.1, largest=0.2)", images, torch.zeros(64, dtype=torch.int64))
    for image in out:
        rows, columns = (image[0] == 0).any(1), (image[0] == 0).any(0)
        assert int((image[0] == 0).sum()) == int(rows.sum()) * int(columns.sum())
        assert 0.05 < float((image == 0).float().mean()) < 0.3
    untouched = augmented("erasing(0)", images, torch.zeros(64, dtype=torch.int64))[0]
    assert torch.equal(untouched, images.float())


@pytest.mark.parametrize("text", ["mixup", "cutmix", "mixup+cutmix"])
def test_mixed_targets_are_probabilities_that_follow_the_images(text: str) -> None:
    images = torch.zeros(8, 1, 16, 16, dtype=torch.uint8)
    images[::2] = 1  # class 0 is black, class 1 is white: the mean of an image is the share of class 1
    targets = torch.tensor([1, 0] * 4)
    for seed in range(6):
        out, mixed = augmented(text, images, targets, seed)
        assert mixed.shape == (8, 10)
        assert torch.allclose(mixed.sum(1), torch.ones(8))
        assert torch.allclose(out.mean((1, 2, 3)), mixed[:, 1], atol=1e-5)


def test_the_stream_of_a_batch_is_named_by_seed_epoch_and_step() -> None:
    seeds = {seed_of_batch(s, e, b) for s in range(3) for e in range(12) for b in range(12)}
    assert len(seeds) == 3 * 12 * 12


def test_a_text_is_read_and_written_back() -> None:
    text = "crop-flip(1, flip=0) + randaugment(5) + autoaugment(svhn) + erasing(p=0.1) + mixup(0.2) + cutmix"
    augmentation = parse_augmentation(text)
    assert str(augmentation).startswith("crop-flip(flip=0, pad=1)+randaugment(magnitude=5)+autoaugment(policy='svhn')")
    assert parse_augmentation(str(augmentation)) == augmentation


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixpu", "no augmentation 'mixpu' .* Did you mean 'mixup'"),
        ("mixup + none", "'none' stands alone"),
        ("mixup(beta=1)", "mixup has no option 'beta'"),
        ("mixup(0)", "mixup: alpha is 0; it must be a number, from 0.001 to 1000"),
        ("erasing(2)", "erasing: p is 2; it must be a number, from 0 to 1"),
        ("randaugment(3.5)", "magnitude is 3.5; it must be a whole number"),
        ("resized-crop(0.1, interpolation=nearest)", "interpolation is 'nearest'; it must be bicubic or bilinear"),
        ("resized-crop(1.5)", "resized-crop: scale is 1.5; it must be a number, from 0 to 1"),
        ("erasing(fill=black)", "fill is 'black'; it must be mean or noise"),
        ("autoaugment(mnist)", "policy is 'mnist'; it must be cifar10, imagenet or svhn"),
        ("crop-flip+crop-flip", "has crop-flip more than once"),
        ("mixup(", "cannot be read"),
        ("", "no augmentation ''"),
    ],
)
def test_a_wrong_text_is_refused_with_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        parse_augmentation(text)
