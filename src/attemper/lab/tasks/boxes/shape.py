"""What models of boxes take and give, and how an image with its boxes lies in tensors.

An image stands in the upper left of a square canvas, with padding to its right or below it. Four channels: red, green
and blue, and a mask that says where the image is. A box is a row of a tensor with as many rows as the image with most
boxes has; the class of a row that is none is −1.
"""

import dataclasses

import torch
from torch import Tensor

CHANNELS = 4
"""Red, green, blue, and where the image is."""
CLASS, BOX, AREA, CROWD = 0, slice(1, 5), 5, 6
COLUMNS = 7
"""Of a row: its class; left, top, right and bottom in shares of the canvas; the object's area in pixels of the file;
whether it is a crowd, in which nothing is right or wrong."""
NONE = -1.0
"""The class of a row that is no box."""


@dataclasses.dataclass(frozen=True)
class BoxShape:
    """Images on a canvas in; for every query the scores of the classes and of none, and a box out.

    size: side of the canvas in pixels. boxes: of the image that has most.
    """

    size: int
    classes: int
    boxes: int

    def __str__(self) -> str:
        kinds = "one class" if self.classes == 1 else f"{self.classes} classes"
        return f"3 × {self.size} × {self.size} at most and of boxes of {kinds}"

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        """Noise with up to as many boxes as there may be; every second image is padded."""
        images = torch.randn(samples, CHANNELS, self.size, self.size)
        images[:, 3] = 1.0
        images[1::2, :, :, self.size * 3 // 4 :] = 0.0
        rows = torch.rand(samples, self.boxes, COLUMNS)
        rows[..., CLASS] = torch.randint(self.classes, (samples, self.boxes)).float()
        first, second = rows[..., 1:3] * 0.4, 0.1 + rows[..., 3:5] * 0.25
        rows[..., BOX] = torch.cat([first, first + second], -1)
        rows[..., AREA], rows[..., CROWD] = 100.0, 0.0
        rows[:, 1 + self.boxes // 2 :, CLASS] = NONE
        return images, rows


def is_box(rows: Tensor) -> Tensor:
    """Which rows are objects to be found, boolean (…, M): neither padding nor a crowd."""
    return (rows[..., CLASS] >= 0) & (rows[..., CROWD] == 0)
