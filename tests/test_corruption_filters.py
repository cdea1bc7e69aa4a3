"""What corruptions are made of: SciPy's filters and zooms, ImageMagick's motion, clouds point by point."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from torch import Tensor

from attemper.lab.evaluation.corruption_filters import (
    clipped_zoom,
    continued,
    mirrored,
    motion,
    plasma,
    reflected,
    sample,
    smooth,
)
from photos import photos, seeded


@pytest.mark.parametrize(("edge", "mode"), [(continued, "nearest"), (reflected, "reflect"), (mirrored, "mirror")])
@pytest.mark.parametrize("sigma", [0.05, 0.4, 1.5, 6.0, 40.0])
def test_smoothing_is_scipys(edge: Any, mode: str, sigma: float) -> None:
    x = photos(2)[:, :, :20]
    expected = scipy.ndimage.gaussian_filter(x.numpy(), (0, 0, sigma, sigma), mode=mode, truncate=3)
    torch.testing.assert_close(smooth(x, sigma, truncate=3, edge=edge), torch.from_numpy(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.13, 1.25, 1.75, 4.5])
@pytest.mark.parametrize("side", [8, 32, 33])
def test_zooming_is_scipys(factor: float, side: int) -> None:
    x = photos(1, side)[0, 0]
    cut = int(np.ceil(side / factor))
    first = (side - cut) // 2
    grown = scipy.ndimage.zoom(x[first : first + cut, first : first + cut].numpy(), factor, order=1, mode="nearest")
    trim = (len(grown) - side) // 2
    expected = torch.from_numpy(grown[trim : trim + side, trim : trim + side])
    torch.testing.assert_close(clipped_zoom(x[None, None], factor)[0, 0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("degrees", "step"), [(0.0, (0, 1)), (90.0, (1, 0)), (-90.0, (-1, 0)), (45.0, None)])
def test_motion_is_half_a_gaussian_along_a_line_of_pixels(degrees: float, step: tuple[int, int] | None) -> None:
    radius, sigma = 3, 2.0
    x = photos(1, 12)
    weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    expected = np.zeros((3, 12, 12))
    for distance, weight in enumerate(weights):
        along = step or (np.sin(np.deg2rad(degrees)), np.cos(np.deg2rad(degrees)))
        down, right = (int(np.ceil(distance * each - 0.5)) for each in along)
        rows, columns = np.clip(np.arange(12) + down, 0, 11), np.clip(np.arange(12) + right, 0, 11)
        expected += weight * x[0].numpy()[:, rows][:, :, columns]
    found = motion(x, radius, sigma, torch.tensor([degrees]))[0]
    np.testing.assert_allclose(found.numpy(), np.round(255 * expected) / 255, atol=1.01 / 255)
    assert float((found - torch.from_numpy(expected)).abs().max()) < 0.51 / 255, "rounded to bytes"


@pytest.mark.parametrize(("edge", "mode"), [(reflected, "reflect"), (mirrored, "mirror")])
def test_sampling_between_pixels_is_scipys(edge: Any, mode: str) -> None:
    x = photos(2, 9)
    rows, columns = 40 * torch.rand(2, 2, 9, 9, generator=seeded()) - 15
    expected = [
        [scipy.ndimage.map_coordinates(plane, np.stack([row, column]), order=1, mode=mode) for plane in image]
        for image, row, column in zip(x.numpy(), rows.numpy(), columns.numpy(), strict=True)
    ]
    torch.testing.assert_close(sample(x, rows, columns, edge), torch.tensor(np.array(expected)), atol=1e-4, rtol=0)


def test_clouds_are_means_of_four_neighbours_where_nothing_is_added() -> None:
    clouds = plasma(3, 16, 1e9, seeded()).double()  # after the first grid, the roughness is nil
    for step in (8, 4, 2):
        half, at = step // 2, torch.arange(0, 16, step)

        def value(rows: Tensor, columns: Tensor) -> Tensor:
            return clouds[:, rows % 16][:, :, columns % 16]

        corners = sum(value(at + a, at + b) for a, b in itertools.product((0, step), repeat=2))
        torch.testing.assert_close(value(at + half, at + half), corners / 4, atol=1e-5, rtol=0)
        for row, column in ((0, half), (half, 0)):
            near = sum(value(at + row + a, at + column + b) for a, b in ((-half, 0), (half, 0), (0, -half), (0, half)))
            torch.testing.assert_close(value(at + row, at + column), near / 4, atol=1e-5, rtol=0)
    assert clouds.amin((1, 2)).tolist() == [0.0] * 3
    assert clouds.amax((1, 2)).tolist() == [1.0] * 3


def test_clouds_grow_point_by_point_with_the_square_of_the_roughness() -> None:
    side, decay, draw = 8, 1.75, seeded()
    points = {(0, 0): 0.0}
    step, roughness = side, 100.0
    while step > 1:
        half, cells = step // 2, side // step
        for offset, near in (
            ((half, half), [(a * half, b * half) for a in (-1, 1) for b in (-1, 1)]),
            ((0, half), [(-half, 0), (half, 0), (0, -half), (0, half)]),
            ((half, 0), [(-half, 0), (half, 0), (0, -half), (0, half)]),
        ):
            noise = (2 * torch.rand(1, cells, cells, generator=draw) - 1)[0].tolist()
            for row, column in itertools.product(range(cells), repeat=2):
                at = row * step + offset[0], column * step + offset[1]
                mean = sum(points[(at[0] + a) % side, (at[1] + b) % side] for a, b in near) / 4
                points[at] = mean + roughness**2 * noise[row][column]
        step, roughness = half, roughness / decay
    low, high = min(points.values()), max(points.values())
    expected = [[(points[row, column] - low) / (high - low) for column in range(side)] for row in range(side)]
    torch.testing.assert_close(plasma(1, side, decay, seeded())[0], torch.tensor(expected), atol=1e-5, rtol=1e-5)
