"""The data of all examples: handwritten digits of 8 × 8 pixels, which come with scikit-learn. Put your own here."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def digits(samples: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test data: images (1, 8, 8) from −1 to 1, classes 0 to 9."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:samples, None] / 8 - 1
    classes = torch.tensor(found.target)[:samples]
    test = len(images) // 4
    return TensorDataset(images[test:], classes[test:]), TensorDataset(images[:test], classes[:test])
