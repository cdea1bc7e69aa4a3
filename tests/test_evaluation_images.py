"""Occlusion and corruptions: as large as asked for, worse with severity, the same under one seed."""

from __future__ import annotations

import itertools

import pytest
import torch

from attemper.errors import ParameterError
from attemper.lab.evaluation.corruptions import CORRUPTIONS, SEVERITIES, corrupt, plasma
from attemper.lab.evaluation.occlusion import covered, occlude_centre, occlude_random
from attemper.lab.tasks.registry import open_task


def digits() -> torch.Tensor:
    source = open_task("digits").test()
    return next(source.batches(torch.arange(128), 128))[0].float() / 255


def clouds() -> torch.Tensor:
    """Something with structure at every scale, in colour."""
    return plasma(24, 32, 40, torch.Generator().manual_seed(0)).reshape(8, 3, 32, 40)


IMAGES = {"digits": digits, "clouds": clouds}


# ----------------------------------------------------------------------------------------------------------- occlusion
@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("size", [(8, 8), (32, 20), (224, 224)])
def test_an_occlusion_covers_its_share_of_the_area(size: tuple[int, int], share: float) -> None:
    images = torch.ones(3, 2, *size)
    tolerance = 0.5 * max(size) / (size[0] * size[1])  # half a line of pixels
    for out in (
        occlude_centre(images, share),
        occlude_random(images, share, generator=torch.Generator().manual_seed(0)),
    ):
        gone = 1 - out.mean((1, 2, 3))
        torch.testing.assert_close(gone, torch.full((3,), share), atol=tolerance, rtol=0)
        assert bool((images == 1).all()), "the images themselves stay"


def test_the_centre_is_in_the_middle_and_random_boxes_are_elsewhere() -> None:
    images = torch.ones(64, 1, 16, 16)
    centre = occlude_centre(images, 0.25, fill=0.5)
    assert torch.equal(centre, centre.flip(2))
    assert torch.equal(centre, centre.flip(3))
    assert centre.unique().tolist() == [0.5, 1.0]
    boxes = occlude_random(images, 0.25, generator=torch.Generator().manual_seed(0))
    assert len(boxes.flatten(1).unique(dim=0)) > 30
    again = occlude_random(images, 0.25, generator=torch.Generator().manual_seed(0))
    assert torch.equal(boxes, again)
    for box in boxes[:, 0] == 0:  # a full rectangle: as many pixels as its outline says
        rows, columns = box.any(1).sum(), box.any(0).sum()
        assert (rows, columns) == covered(16, 16, 0.25)
        assert box.sum() == rows * columns


@pytest.mark.parametrize("share", [1.1, -0.1, float("nan"), "half", True])
def test_an_occlusion_larger_than_the_image_is_refused(share: float) -> None:
    with pytest.raises(ParameterError, match="it must be from 0 to 1"):
        occlude_centre(torch.ones(1, 1, 8, 8), share)
    if share == 1.1:
        with pytest.raises(ParameterError, match="cannot be larger than the image"):
            occlude_random(torch.ones(1, 1, 8, 8), share, generator=torch.Generator())


# --------------------------------------------------------------------------------------------------------- corruptions
@pytest.mark.parametrize("images", IMAGES, ids=str)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_grow_with_severity(name: str, images: str) -> None:
    clean = IMAGES[images]()
    distances = [float((corrupt(clean, name, severity) - clean).abs().mean()) for severity in SEVERITIES]
    assert distances[0] > 0
    assert all(later > 1.02 * earlier for earlier, later in itertools.pairwise(distances)), distances


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_images_are_images_and_a_function_of_the_seed(name: str) -> None:
    clean = clouds()
    kept = clean.clone()
    out = corrupt(clean, name, 5, seed=3)
    assert out.shape == clean.shape
    assert out.dtype == clean.dtype
    assert 0 <= float(out.min()) <= float(out.max()) <= 1
    assert torch.equal(clean, kept), "the images themselves stay"
    state = torch.get_rng_state()
    assert torch.equal(out, corrupt(clean, name, 5, seed=3))
    assert torch.equal(state, torch.get_rng_state()), "torch's own stream is not touched"
    drawn = name in ("gaussian-noise", "shot-noise", "impulse-noise", "motion-blur", "fog")
    assert torch.equal(out, corrupt(clean, name, 5, seed=4)) != drawn


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_take_any_number_of_channels_and_any_size(name: str) -> None:
    for shape in ((1, 1, 1, 1), (2, 4, 5, 9), (1, 2, 64, 3)):
        out = corrupt(torch.rand(shape), name, 5)
        assert out.shape == shape
        assert bool(out.isfinite().all())


def test_blurs_and_pixelation_keep_the_mean_light_of_a_plain_image() -> None:
    plain = torch.full((2, 3, 16, 16), 0.4)
    for name in ("defocus-blur", "motion-blur", "pixelate"):
        torch.testing.assert_close(corrupt(plain, name, 5), plain)


def test_a_box_kernel_by_hand_equals_pixelation() -> None:
    clean = clouds()[:, :, :, :32]
    by_hand = torch.nn.functional.avg_pool2d(clean, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.testing.assert_close(corrupt(clean, "pixelate", 5), by_hand)


def test_a_corruption_that_does_not_exist_is_named() -> None:
    with pytest.raises(ParameterError, match=r"no corruption 'gausian-noise'. Did you mean 'gaussian-noise'\?"):
        corrupt(torch.rand(1, 1, 8, 8), "gausian-noise", 1)
    with pytest.raises(ParameterError, match="The severity is 6"):
        corrupt(torch.rand(1, 1, 8, 8), "fog", 6)
