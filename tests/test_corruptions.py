"""Corruptions: the published definitions with the published constants, checked against other people's code."""

from __future__ import annotations

import colorsys
import io
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from PIL import Image
from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.evaluation.corruption_constants import EXTRA, MAIN, SETS, SEVERITIES, published_for
from attemper.lab.evaluation.corruption_filters import clipped_zoom, correlate, disk, plasma
from attemper.lab.evaluation.corruptions import CORRUPTIONS, corrupt
from photos import photos, seeded

CIFAR, TINY, IMAGENET = SETS
DRAWN = (
    *("gaussian-noise", "shot-noise", "impulse-noise", "glass-blur", "motion-blur", "snow", "fog"),
    *("elastic-transform", "speckle-noise"),
)


def constants(name: str, severity: int, published: Any = CIFAR) -> Any:
    return published.constants[name][severity - 1]


def apply(x: Tensor, name: str, severity: int, published: Any = CIFAR, seed: int = 0) -> Tensor:
    """The corruption itself, before it is cut down to bytes."""
    return CORRUPTIONS[name](x, constants(name, severity, published), seeded(seed))


# ------------------------------------------------------------------------------------------------------------ constants
def test_every_corruption_has_five_published_constants_for_every_size() -> None:
    assert tuple(CORRUPTIONS) == (*MAIN, *EXTRA)
    for published in SETS:
        assert set(published.constants) == set(CORRUPTIONS)
        assert all(len(each) == 5 for each in published.constants.values())


@pytest.mark.parametrize(
    ("published", "name", "severity", "expected"),
    [
        (CIFAR, "gaussian-noise", 5, 0.10),
        (TINY, "gaussian-noise", 5, 0.18),
        (IMAGENET, "gaussian-noise", 5, 0.38),
        (IMAGENET, "defocus-blur", 3, (6, 0.5)),
        (CIFAR, "jpeg-compression", 1, 80),
        (IMAGENET, "jpeg-compression", 5, 7),
        (TINY, "pixelate", 4, 0.6),
        (IMAGENET, "elastic-transform", 2, (488, 19.52, 48.8)),
        (CIFAR, "elastic-transform", 1, (0, 0, 2.56)),
        (TINY, "fog", 5, (2, 1.75)),
    ],
)
def test_constants_are_those_of_the_authors_scripts(
    published: Any, name: str, severity: int, expected: float | tuple[float, ...]
) -> None:
    assert constants(name, severity, published) == pytest.approx(expected)


def test_the_set_follows_the_size_and_says_whether_it_is_for_it() -> None:
    found = {side: published_for(3, side, side) for side in (8, 28, 32, 48, 64, 96, 128, 224, 384)}
    assert {side: (chosen.set.side, chosen.exact) for side, chosen in found.items()} == {
        **{8: (32, False), 28: (32, False), 32: (32, True), 48: (64, False), 64: (64, True)},
        **{96: (64, False), 128: (224, False), 224: (224, True), 384: (224, False)},
    }
    assert not published_for(1, 32, 32).exact, "the published images are in colour"
    assert not published_for(3, 32, 33).exact


# ---------------------------------------------------------------------------------------------------------------- noise
GREY = torch.full((64, 3, 32, 32), 128 / 255)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noise_has_the_published_strength(severity: int) -> None:
    level, count = 128 / 255, GREY.numel()
    deviations = {
        "gaussian-noise": constants("gaussian-noise", severity),
        "speckle-noise": level * constants("speckle-noise", severity),
        "shot-noise": (level / constants("shot-noise", severity)) ** 0.5,
    }
    for name, deviation in deviations.items():
        noise = corrupt(GREY, name, severity) - GREY
        assert float(noise.std()) == pytest.approx(deviation, rel=0.02), name
        assert float(noise.mean()) == pytest.approx(-0.5 / 255, abs=5 * deviation / count**0.5 + 1e-3), "cut to bytes"
    share = constants("impulse-noise", severity)
    out = corrupt(GREY, "impulse-noise", severity)
    hit = out != GREY
    assert float(hit.float().mean()) == pytest.approx(share, abs=5 * (share / count) ** 0.5)
    assert set(out[hit].tolist()) == {0.0, 1.0}
    assert float(out[hit].mean()) == pytest.approx(0.5, abs=5 * (0.25 / int(hit.sum())) ** 0.5)
    assert not torch.equal(hit[:, 0], hit[:, 1]), "each channel by itself"


# ---------------------------------------------------------------------------------------------------------------- light
def test_contrast_moves_every_channel_towards_its_mean() -> None:
    x = photos()
    mean = x.mean((2, 3), keepdim=True)
    for severity, kept in zip(SEVERITIES, (0.75, 0.5, 0.4, 0.3, 0.15), strict=True):
        torch.testing.assert_close(apply(x, "contrast", severity), kept * x + (1 - kept) * mean)


@pytest.mark.parametrize("name", ["brightness", "saturate"])
@pytest.mark.parametrize("published", SETS, ids=lambda each: each.name)
def test_light_and_colour_change_in_hsv(name: str, published: Any) -> None:
    pixels = torch.rand(8, 3, 5, 5, generator=seeded())
    pixels[0] = 0.0  # black, white and grey have no hue
    pixels[1] = 1.0
    pixels[2] = 0.3
    for severity in SEVERITIES:
        found = apply(pixels, name, severity, published).clamp(0, 1).permute(0, 2, 3, 1).reshape(-1, 3)
        given = constants(name, severity, published)
        for before, after in zip(pixels.permute(0, 2, 3, 1).reshape(-1, 3).tolist(), found.tolist(), strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*before)
            if name == "brightness":
                value = min(1.0, value + given)
            else:
                saturation = min(1.0, saturation * given[0] + given[1])
            assert after == pytest.approx(colorsys.hsv_to_rgb(hue, saturation, value), abs=1e-5)


def test_colours_of_a_grey_image_cannot_be_saturated() -> None:
    with pytest.raises(ParameterError, match="saturate is for images of 3 channels"):
        corrupt(torch.rand(1, 1, 8, 8), "saturate", 1)


# ----------------------------------------------------------------------------------------------------------------- blur
@pytest.mark.parametrize("published", SETS, ids=lambda each: each.name)
def test_defocus_is_a_softened_disc(published: Any) -> None:
    x = photos(1, 24)
    for severity in SEVERITIES:
        radius, softness = constants("defocus-blur", severity, published)
        reach, size = (8, 3) if radius <= 8 else (radius, 5)
        row, column = np.mgrid[-reach : reach + 1, -reach : reach + 1]
        flat = (np.hypot(row, column) <= radius).astype(float)
        bell = np.exp(-((np.arange(size) - size // 2) ** 2) / (2 * softness**2))
        bell = np.outer(bell, bell) / bell.sum() ** 2
        kernel = scipy.ndimage.correlate(flat / flat.sum(), bell, mode="mirror")
        np.testing.assert_allclose(disk(radius, softness).numpy(), kernel, atol=1e-6)
        expected = scipy.ndimage.correlate(x.numpy(), kernel[None, None].astype(np.float32), mode="mirror")
        torch.testing.assert_close(correlate(x, disk(radius, softness)), torch.from_numpy(expected), atol=1e-5, rtol=0)


def test_glass_replaces_every_pixel_by_a_near_one_from_the_last_to_the_first() -> None:
    x, (sigma, reach, rounds) = photos(2, 10), (0.7, 2, 2)
    found = CORRUPTIONS["glass-blur"](x, (sigma, reach, rounds), seeded())
    draw = seeded()
    blurred = np.floor(255 * scipy.ndimage.gaussian_filter(x.numpy(), (0, 0, sigma, sigma), mode="nearest") + 1e-3)
    for _ in range(rounds):
        for row in range(10 - reach, reach, -1):
            shifts = torch.randint(-reach, reach, (2, 10, 2), generator=draw)
            for column in range(10 - reach, reach, -1):
                for image in range(2):
                    down, right = shifts[:, column - reach, image].tolist()
                    blurred[image, :, row, column] = blurred[image, :, row + down, column + right]
    expected = scipy.ndimage.gaussian_filter(blurred / 255, (0, 0, sigma, sigma), mode="nearest")
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_the_published_swap_of_two_pixels_is_a_copy() -> None:
    """Why glass blur copies: numpy's rows are views, so that the second assignment reads what the first has written."""
    pixels = np.array([[1, 2, 3], [7, 8, 9]])
    pixels[0], pixels[1] = pixels[1], pixels[0]
    assert pixels.tolist() == [[7, 8, 9], [7, 8, 9]]


@pytest.mark.parametrize(
    ("published", "severity", "factors"), [(CIFAR, 1, 7), (CIFAR, 5, 26), (IMAGENET, 3, 11), (IMAGENET, 5, 11)]
)
def test_zoom_blur_is_the_mean_over_the_published_factors(published: Any, severity: int, factors: int) -> None:
    given = np.arange(1, *constants("zoom-blur", severity, published))
    assert len(given) == factors
    x = photos(1)
    expected = (x + sum(clipped_zoom(x, float(factor)) for factor in given)) / (factors + 1)
    torch.testing.assert_close(apply(x, "zoom-blur", severity, published), expected)


# -------------------------------------------------------------------------------------------------------------- weather
def test_fog_is_added_and_scaled_back_to_the_brightest_pixel() -> None:
    x = photos(3)
    thickness, decay = constants("fog", 4)
    brightest = x.amax((1, 2, 3), keepdim=True)
    clouds = plasma(3, 32, decay, seeded())[:, None]
    torch.testing.assert_close(apply(x, "fog", 4), (x + thickness * clouds) * brightest / (brightest + thickness))


def test_snow_whitens_the_image_and_falls_the_same_both_ways() -> None:
    x = photos(3)
    none = (*constants("snow", 3)[:3], 1e9, *constants("snow", 3)[4:])  # no flake is bright enough
    grey = 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
    expected = 0.9 * x + 0.1 * torch.maximum(x, 1.5 * grey + 0.5)
    torch.testing.assert_close(CORRUPTIONS["snow"](x, none, seeded()), expected)
    flakes = apply(x, "snow", 3) - expected
    assert float(flakes.max()) > 0.1
    torch.testing.assert_close(flakes, flakes.flip(2, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(flakes[:, 0], flakes[:, 2], atol=1e-5, rtol=0)


# -------------------------------------------------------------------------------------------------------------- digital
def test_elastic_transform_is_an_affine_map_and_then_small_shifts() -> None:
    strength, sigma, shift = constants("elastic-transform", 3)
    x = photos(2)
    found = apply(x, "elastic-transform", 3)
    draw = seeded()
    moved = shift * (2 * torch.rand(2, 3, 2, generator=draw).numpy() - 1)
    fields = [2 * torch.rand(2, 32, 32, generator=draw).numpy() - 1 for _ in range(2)]
    before = np.array([[26, 26], [26, 6], [6, 6]])  # (x, y): a third of the side from the middle
    for image in range(2):
        forward = np.linalg.solve(np.c_[before, np.ones(3)], before + moved[image]).T  # what OpenCV inverts
        inverse = np.linalg.inv(np.vstack([forward, [0, 0, 1]]))
        column, row = np.meshgrid(np.arange(32), np.arange(32))
        source_x, source_y, _ = np.tensordot(inverse, np.stack([column, row, np.ones_like(row)]), 1)
        right, down = (
            strength * scipy.ndimage.gaussian_filter(field[image], sigma, mode="reflect", truncate=3)
            for field in fields
        )
        for plane in range(3):
            warped = scipy.ndimage.map_coordinates(
                x[image, plane].numpy(), [source_y, source_x], order=1, mode="mirror"
            )
            expected = scipy.ndimage.map_coordinates(warped, [row + down, column + right], order=1, mode="reflect")
            np.testing.assert_allclose(found[image, plane].numpy(), expected, atol=1e-3)


def as_image(pixels: Tensor) -> Image.Image:
    return Image.fromarray((255 * pixels).round().byte().permute(1, 2, 0).numpy())


def saved(image: Image.Image, quality: int, **options: Any) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, **options)
    return Image.open(file)


@pytest.mark.parametrize("published", SETS, ids=lambda each: each.name)
def test_jpeg_and_pixelation_are_pillows_and_sets_in_jpeg_files_go_through_it_again(published: Any) -> None:
    side = published.side
    x = torch.nn.functional.interpolate(photos(1), side, mode="bicubic").clamp(0, 1)
    for severity in (1, 5):
        small = int(side * constants("pixelate", severity, published))
        box = Image.Resampling.BOX
        made = {
            "jpeg-compression": saved(as_image(x[0]), constants("jpeg-compression", severity, published)),
            "pixelate": as_image(x[0]).resize((small, small), box).resize((side, side), box),
        }
        for name, image in made.items():
            expected = image if published is CIFAR else saved(image, 85, optimize=True)
            assert np.array_equal(np.array(as_image(corrupt(x, name, severity)[0])), np.array(expected)), name


# ------------------------------------------------------------------------------------------------------------------ all
@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name not in ("saturate", "elastic-transform")])
def test_corruptions_grow_with_severity(name: str) -> None:
    clean = photos(8)
    distances = [float((corrupt(clean, name, severity) - clean).abs().mean()) for severity in SEVERITIES]
    assert distances[0] > 0
    assert distances[4] > 1.2 * distances[0], distances


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_images_are_bytes_and_a_function_of_the_seed(name: str) -> None:
    clean = photos()
    kept = clean.clone()
    out = corrupt(clean, name, 5, seed=3)
    assert (out.shape, out.dtype) == (clean.shape, clean.dtype)
    assert 0 <= float(out.min()) <= float(out.max()) <= 1
    torch.testing.assert_close(255 * out, (255 * out).round(), atol=1e-4, rtol=0)
    assert torch.equal(clean, kept), "the images themselves stay"
    state = torch.get_rng_state()
    assert torch.equal(out, corrupt(clean, name, 5, seed=3))
    assert torch.equal(state, torch.get_rng_state()), "torch's own stream is not touched"
    assert torch.equal(out, corrupt(clean, name, 5, seed=4)) != (name in DRAWN)
    if name in DRAWN:
        same = clean[:1].expand(2, -1, -1, -1)
        assert not torch.equal(*corrupt(same, name, 5)), "every image by itself"


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name != "saturate"])
def test_corruptions_take_any_number_of_channels_and_any_size(name: str) -> None:
    for shape in ((1, 1, 1, 1), (2, 4, 5, 9), (1, 2, 70, 3), (65, 1, 2, 2)):
        out = corrupt(torch.rand(shape), name, 5)
        assert out.shape == shape
        assert bool(out.isfinite().all())


def test_a_corruption_that_does_not_exist_is_named() -> None:
    with pytest.raises(ParameterError, match=r"no corruption 'gausian-noise'. Did you mean 'gaussian-noise'\?"):
        corrupt(torch.rand(1, 1, 8, 8), "gausian-noise", 1)
    for severity in (0, 6, True, 1.5):
        with pytest.raises(ParameterError, match=f"The severity is {severity}"):
            corrupt(torch.rand(1, 1, 8, 8), "fog", severity)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"it must be \(B, C, H, W\), not empty"):
        corrupt(torch.rand(1, 8, 8), "fog", 1)
