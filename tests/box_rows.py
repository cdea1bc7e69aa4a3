"""Targets of images with boxes, for tests."""

import torch
from torch import Tensor

from attemper.lab.tasks.boxes.shape import AREA, BOX, CLASS, COLUMNS, NONE


def rows_of(boxes: list[tuple[int, tuple[float, float, float, float]]], most: int = 4) -> Tensor:
    """Targets of one image."""
    rows = torch.zeros(most, COLUMNS)
    rows[:, CLASS] = NONE
    for at, (label, corners) in enumerate(boxes):
        rows[at, CLASS], rows[at, BOX] = label, torch.tensor(corners)
        rows[at, AREA] = 100.0
    return rows
