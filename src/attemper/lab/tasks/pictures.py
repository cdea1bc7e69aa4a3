"""Pictures of what a model says of a sample, for the page: boxes, coloured areas and heat over an image."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PICTURES = 4
"""Of a run: results stay small, and a page shows those of two recipes."""
MOST_BYTES = 32_000
"""Of one picture."""
SIDE = 480
"""Pixels of the longer side at most."""
QUALITIES = (88, 75, 60, 45, 30)
COLOURS = (
    *((27, 78, 194), (196, 69, 41), (23, 128, 96), (166, 78, 161), (210, 119, 12), (43, 144, 239)),
    *((120, 94, 240), (220, 38, 127), (100, 143, 60), (130, 90, 60), (0, 150, 150), (75, 85, 99)),
)
"""Of classes, in their order and then from the beginning again."""
TRUE = (255, 255, 255)
"""Of what the data say, beside what a model says."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image in the bytes of a PNG or JPEG file, with what is to be read below it. It may come from anywhere."""

    caption: str
    data: bytes

    def to_dict(self) -> dict[str, str]:
        return {"caption": self.caption, "data": base64.b64encode(self.data).decode()}


def picture(image: Image, caption: str) -> Picture:
    """A picture in bounded size: a PNG where that is small, else a JPEG."""
    image = fitted(image.convert("RGB"), SIDE)
    data = _encoded(image, format="PNG", optimize=True)
    for quality in QUALITIES:
        if len(data) <= MOST_BYTES:
            break
        data = _encoded(image, format="JPEG", quality=quality)
    while len(data) > MOST_BYTES:
        image = fitted(image, max(image.size) // 2)
        data = _encoded(image, format="JPEG", quality=QUALITIES[-1])
    return Picture(caption, data)


def _encoded(image: Image, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, **how)
    return file.getvalue()


def fitted(image: Image, side: int) -> Image:
    """The image, made smaller where its longer side has more pixels."""
    scale = side / max(image.size)
    if scale >= 1:
        return image
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))


def spread(count: int, most: int) -> list[int]:
    """At most so many of a number of samples, evenly spread over them.

    >>> spread(11, 3), spread(2, 3)
    ([0, 5, 10], [0, 1])
    """
    chosen = min(most, count)
    return [round(at * (count - 1) / max(1, chosen - 1)) for at in range(chosen)]


def colour_of(number: int) -> tuple[int, int, int]:
    """The colour of a class."""
    return COLOURS[number % len(COLOURS)]


# ------------------------------------------------------------------------------------------------------------- drawing
def image_of(pixels: Tensor) -> Image:
    """uint8 (3 or 1, H, W) → Pillow's image in colours, large enough to draw on."""
    from PIL import Image

    array = pixels.cpu().expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
    image = Image.fromarray(array)
    times = max(1, SIDE // max(image.size))
    return image.resize((times * image.width, times * image.height), Image.Resampling.NEAREST)


def draw_boxes(
    image: Image, boxes: Iterable[Sequence[float]], labels: Sequence[str], colours: Sequence[tuple[int, int, int]]
) -> Image:
    """The image with frames. boxes: left, top, right and bottom, in shares of the image's width and height."""
    from PIL import ImageDraw, ImageFont

    drawn = image.copy()
    draw, font = ImageDraw.Draw(drawn), ImageFont.load_default(11)
    for (left, top, right, bottom), label, colour in zip(boxes, labels, colours, strict=True):
        x0, x1 = sorted((left * image.width, right * image.width))
        y0, y1 = sorted((top * image.height, bottom * image.height))
        draw.rectangle((x0, y0, x1, y1), outline=colour, width=2)
        if label:
            text = label.encode("latin-1", "replace").decode("latin-1")  # what Pillow's own font can draw
            around = draw.textbbox((x0 + 3, y0 + 2), text, font)
            draw.rectangle((around[0] - 2, around[1] - 1, around[2] + 2, around[3] + 1), fill=colour)
            draw.text((x0 + 3, y0 + 2), text, TRUE if sum(colour) < 600 else (0, 0, 0), font)
    return drawn


def paint_classes(image: Image, classes: Tensor, *, strength: float = 0.55, nothing: int | None = None) -> Image:
    """The image with every pixel coloured by its class. classes: int64 (H, W). nothing: the class left unpainted."""
    from PIL import Image

    table = torch.tensor(COLOURS, dtype=torch.uint8)
    colours = Image.fromarray(table[classes.cpu().long() % len(COLOURS)].numpy())
    share = torch.full(classes.shape, round(255 * strength), dtype=torch.uint8)
    if nothing is not None:
        share[classes.cpu() == nothing] = 0
    mask = Image.fromarray(share.numpy())
    near = Image.Resampling.NEAREST
    return Image.composite(colours.resize(image.size, near), image, mask.resize(image.size, near))


def paint_heat(image: Image, heat: Tensor, *, colour: tuple[int, int, int] = (255, 80, 0)) -> Image:
    """The image, darkened, with the places where a number is large in a colour. heat: (H, W), at least 0."""
    from PIL import Image

    heat = heat.detach().float().cpu()
    share = (heat / heat.max().clamp_min(1e-12) * 255).round().to(torch.uint8)
    mask = Image.fromarray(share.numpy()).resize(image.size, Image.Resampling.BILINEAR)
    dark = Image.blend(image, Image.new("RGB", image.size), 0.35)
    return Image.composite(
        Image.new("RGB", image.size, colour), dark, mask.point([round(0.75 * at) for at in range(256)])
    )


def beside(images: Sequence[Image]) -> Image:
    """Images in a row, with a gap between them."""
    from PIL import Image

    gap = 6
    row = Image.new(
        "RGB", (sum(each.width for each in images) + gap * (len(images) - 1), max(e.height for e in images)), TRUE
    )
    left = 0
    for each in images:
        row.paste(each, (left, 0))
        left += each.width + gap
    return row
