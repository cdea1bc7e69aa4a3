"""Occlusion: as large as asked for, where it was asked for, the same under one seed."""

from __future__ import annotations

import pytest
import torch

from attemper.errors import ParameterError
from attemper.lab.evaluation.occlusion import covered, occlude_centre, occlude_random


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
