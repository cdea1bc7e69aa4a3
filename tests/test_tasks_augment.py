"""Augmentation: drawn from a stream of its own, image by image, the same whenever it is drawn again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.tasks import list_augmentations, parse_augmentation
from attemper.tasks.augment import seed_of_batch

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


@pytest.mark.parametrize("text", ["crop-flip", "randaugment", "autoaugment", "erasing(1)"])
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
        ("mixup(0)", "mixup: alpha is 0; it must be a number, at least 0.001"),
        ("erasing(2)", "erasing: p is 2; it must be a number, from 0 to 1"),
        ("randaugment(3.5)", "magnitude is 3.5; it must be a whole number"),
        ("autoaugment(mnist)", "policy is 'mnist'; it must be cifar10, imagenet or svhn"),
        ("crop-flip+crop-flip", "has crop-flip more than once"),
        ("mixup(", "cannot be read"),
        ("", "no augmentation ''"),
    ],
)
def test_a_wrong_text_is_refused_with_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        parse_augmentation(text)
