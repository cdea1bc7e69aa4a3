"""Pictures of segmentations: an image, what the data say, what a model says, and which colour is which class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attemper.lab.tasks.pictures import COLOURS, Picture, beside, colour_of, fitted, image_of, paint_classes, picture
from attemper.lab.tasks.segmentation.masks import NOTHING
from attemper.tempering.outputs import IGNORED

if TYPE_CHECKING:
    from PIL.Image import Image

PAPER, INK = (255, 255, 255), (28, 33, 40)
ROW, SQUARE, GAP = 22, 12, 8
"""Of a legend, in pixels."""
WIDE = 520
"""Pixels of three pictures side by side: as wide as a page shows them, so that the legend can be read."""
STRENGTH = 0.7
"""How much of a painted pixel is the colour of its class."""


def draw(image: Tensor, truth: Tensor, says: Tensor, classes: Sequence[str]) -> Picture:
    """Three pictures side by side above a legend.

    image: uint8 (3, H, W). truth: int64 (H, W), `IGNORED` where a pixel is not labelled. says: int64 (H, W), what a
    model takes every pixel for.
    """
    truth, says = truth.cpu(), says.cpu()
    labelled = truth != IGNORED
    there = _most_first(torch.cat([truth[labelled], says.flatten()]))
    # Of more classes than there are colours, those of this picture share them out.
    numbers = {number: at for at, number in enumerate(there)} if len(classes) > len(COLOURS) else {n: n for n in there}
    table = torch.zeros(max(there) + 1, dtype=torch.int64)
    for number, colour in numbers.items():
        table[number] = colour
    plain = fitted(image_of(image), (WIDE - 2 * GAP) // 3)
    shown = torch.where(labelled, table[truth.clamp_min(0).clamp_max(max(there))], NOTHING)
    painted = [paint_classes(plain, each, strength=STRENGTH, nothing=NOTHING) for each in (shown, table[says])]
    row = beside([plain, *painted])
    entries = [(classes[number], colour_of(numbers[number])) for number in there[: len(COLOURS)]]
    right = int((says == truth)[labelled].sum()) / max(1, int(labelled.sum()))
    caption = f"image, truth, prediction; {100 * right:.0f} % of the labelled pixels are right"
    sheet = _above_legend(row, entries)
    return picture(sheet, caption, side=max(sheet.size))


def _most_first(classes: Tensor) -> list[int]:
    """The classes that occur, from the most frequent to the least."""
    found, counts = classes.unique(return_counts=True)
    order: list[int] = found[counts.argsort(descending=True, stable=True)].tolist()
    return order


def _above_legend(row: Image, entries: Sequence[tuple[str, tuple[int, int, int]]]) -> Image:
    """An image with squares of colour and names below it, in as many lines as they take."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(13)
    texts = [name.encode("latin-1", "replace").decode("latin-1") for name, _ in entries]  # what Pillow's font can draw
    places, x, y = [], 0, GAP // 2
    for text in texts:
        width = SQUARE + GAP // 2 + round(font.getlength(text)) + 2 * GAP
        if x and x + width > row.width:
            x, y = 0, y + ROW
        places.append((x, y))
        x += width
    whole = Image.new("RGB", (row.width, row.height + y + ROW), PAPER)
    whole.paste(row, (0, 0))
    sheet = ImageDraw.Draw(whole)
    for text, (_, colour), (left, top) in zip(texts, entries, places, strict=True):
        up = row.height + top
        sheet.rectangle((left, up + 3, left + SQUARE, up + 3 + SQUARE), fill=colour)
        sheet.text((left + SQUARE + GAP // 2, up + 1), text, INK, font)
    return whole
