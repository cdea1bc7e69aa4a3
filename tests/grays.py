"""Photographs to gray, exact formulas to compare with, and how far apart two results are."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor

from attemper.methods import TokenGraying
from attemper.tempering.embedding import from_patches, to_patches


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def map_image(method: TokenGraying, image: Tensor, patch: tuple[int, int]) -> Tensor:
    """An image with its patches grayed."""
    grid = (image.shape[-2] // patch[0], image.shape[-1] // patch[1])
    return from_patches(method.map_patches(to_patches(image, grid, patch)), image, grid, patch)


@functools.cache
def photographs():
    """(260, 64, 48): every second crop of 32 × 32 pixels of two photographs, cut into 4 × 4 patches."""
    images = torch.stack([torch.from_numpy(np.array(image)) for image in load_sample_images().images])
    images = images[:, :416, :640].movedim(-1, 1).float() / 255
    crops = images.unfold(2, 32, 32).unfold(3, 32, 32).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)[::2]
    return F.unfold(crops, 4, stride=4).mT.contiguous()


def by_svd(x, eps, rescale=True):
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    top = s[..., :1]
    s = torch.where(s > 1e-12 * top, (s / top) ** eps * (top if rescale else 1.0), 0.0)
    return (u * s[..., None, :]) @ v


def distance(given, expected):
    """The largest relative Frobenius error of a batch."""
    return ((given - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))).max().item()


def condition(x):
    """κ over the singular values that are not zero."""
    s = torch.linalg.svdvals(x.double())
    return (s[..., 0] / torch.where(s > 1e-6 * s[..., :1], s, torch.inf).amin(-1)).tolist()
