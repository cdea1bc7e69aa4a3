"""The digits of scikit-learn: 1,797 images of 8 × 8 pixels, inside of the package, so that no download is needed."""

import functools

import torch

from attemper.lab.tasks.base import ImageTask, InputShape
from attemper.lab.tasks.fingerprint import of_tensors
from attemper.lab.tasks.source import MemorySource
from attemper.lab.tasks.split import FIXED, divide

TEST_IMAGES = 360
"""scikit-learn's digits have no test set of their own: a fifth of them, always the same, is ours."""


def open_digits(name: str, *, train: int | None = None, test: int | None = None) -> ImageTask:
    """Handwritten digits, one channel, ten classes: 1,437 images for training and validation, 360 for test."""
    whole = _load()
    kept, held = divide(whole.targets, TEST_IMAGES, FIXED)
    return ImageTask(
        name=name,
        shape=InputShape(channels=1, height=8, width=8, classes=10),
        fingerprint=of_tensors(whole.images, whole.targets, held),
        pool=lambda: whole.take(kept),
        held_out=lambda: whole.take(held),
        classes=tuple("0123456789"),
        train=train,
        test_images=test,
    )


@functools.cache
def _load() -> MemorySource:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    images = torch.from_numpy(data.images).mul(255 / 16).round().to(torch.uint8)  # stored as 0 … 16
    return MemorySource(images[:, None], torch.from_numpy(data.target).long())
