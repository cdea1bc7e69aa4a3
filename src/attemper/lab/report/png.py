"""Pictures as PNG, drawn with Pillow: heat maps of block × head, curves over blocks, attention over an image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attemper.lab.report.heat import Bounds, HeatMap, colours, heat_of
from attemper.lab.report.scale import make_scale, number, signed
from attemper.probes.pictures import Look

if TYPE_CHECKING:
    from PIL.Image import Image

INK, SOFT, FAINT, PAPER, EMPTY = (28, 33, 40), (87, 96, 108), (225, 228, 232), (255, 255, 255), (236, 238, 240)
SERIES = ((75, 85, 99), (27, 78, 194), (196, 69, 41), (23, 128, 96), (166, 78, 161), (210, 119, 12), (43, 144, 239))
"""The colours of the page's style sheet, in its order."""


def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _text(draw: Any, place: tuple[float, float], text: str, colour: Any, size: int = 13, anchor: str = "la") -> None:
    """Text in Pillow's own font, which has neither Greek letters nor a minus sign."""
    for letter, name in (("κ", "kappa"), ("ε", "eps"), ("σ", "sigma"), ("−", "-")):
        text = text.replace(letter, name)
    draw.text(place, text, colour, _font(size), anchor=anchor)


def _canvas(width: int, height: int) -> tuple[Image, Any]:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), PAPER)
    return image, ImageDraw.Draw(image)


# ----------------------------------------------------------------------------------------------------------- heat maps
def heat_map(
    values: Sequence[Sequence[float | None]],
    *,
    title: str,
    rows: Sequence[str],
    x: str = "head",
    y: str = "block",
    bounds: Bounds | None = None,
) -> Image:
    """A cell per number, rows from top to bottom, with a scale at the right. None leaves its cell empty.

    bounds: the numbers at the ends of the scale; None: the smallest value and the largest.
    """
    heat = heat_of(values, rows, x=x, y=y, bounds=bounds)
    columns = heat.columns
    side = max(18, min(44, 640 // max(columns, 1)))
    label = max((round(_font(13).getlength(name)) for name in rows), default=0)
    left, top = 34 + label, 66
    wide = max(left + columns * side + 100, 320)
    image, draw = _canvas(wide, top + max(len(values), 1) * side + 42)
    _text(draw, (14, 12), title, INK, 17)
    _text(draw, (14, 40), y, SOFT)
    for at, row in enumerate(heat.rows):
        up = top + at * side
        _text(draw, (left - 10, up + side / 2), rows[at], SOFT, anchor="rm")
        for column, cell in enumerate(row):
            box = (left + column * side, up, left + (column + 1) * side - 2, up + side - 2)
            draw.rectangle(box, EMPTY if cell.strength is None else _colour(cell.strength))
    bottom = top + len(values) * side
    for column in heat.ticks:
        _text(draw, (left + (column + 0.5) * side - 1, bottom + 4), str(column), SOFT, anchor="mt")
    _text(draw, (left + columns * side / 2, bottom + 22), x, SOFT, anchor="mt")
    _scale_bar(draw, left + columns * side + 18, top, max(len(values) * side - 2, 60), heat)
    return image


def _scale_bar(draw: Any, left: int, top: int, tall: int, heat: HeatMap) -> None:
    for at in range(tall):
        draw.line((left, top + at, left + 12, top + at), _colour(1 - at / max(tall - 1, 1)))
    _text(draw, (left + 18, top), number(heat.high, significant=3), SOFT, anchor="lt")
    _text(draw, (left + 18, top + tall), number(heat.low, significant=3), SOFT, anchor="lb")


def _colour(strength: float) -> tuple[int, ...]:
    return tuple(colours(np.array(strength)).tolist())


# -------------------------------------------------------------------------------------------------------------- curves
def curves(
    lines: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    y: str,
    x: str = "block",
    log: bool = False,
    names: Sequence[str] = (),
) -> Image:
    """Lines over blocks, each with its name. names: of the places along the axis, in place of their numbers."""
    where = list(range(max((len(values) for values in lines.values()), default=0)))
    up = make_scale([value for values in lines.values() for value in values], log=log)
    across = make_scale(where, count=8, margin=0.02)
    left, top, wide, tall = 72, 66, 520, 260
    longest = max((round(_font(13).getlength(name)) for name in lines), default=0)
    image, draw = _canvas(left + wide + longest + 50, top + tall + 56)
    _text(draw, (14, 12), title, INK, 17)
    _text(draw, (14, 40), y, SOFT)
    for tick in up.ticks:
        level = top + tall - up.at(tick) * tall
        draw.line((left, level, left + wide, level), FAINT)
        _text(draw, (left - 8, level), up.label(tick), SOFT, anchor="rm")
    for tick in where[:: max(1, math.ceil(len(where) / 16))]:
        label = names[tick] if names else number(tick)
        _text(draw, (left + across.at(tick) * wide, top + tall + 6), label, SOFT, anchor="mt")
    _text(draw, (left + wide / 2, top + tall + 28), x, SOFT, anchor="mt")
    ends: dict[str, float] = {}
    for at, (name, values) in enumerate(lines.items()):
        points = [
            (left + across.at(where[i]) * wide, top + tall - up.at(v) * tall)
            for i, v in enumerate(values)
            if v is not None and math.isfinite(v)
        ]
        for px, py in points:
            draw.ellipse((px - 3, py - 3, px + 3, py + 3), SERIES[at % len(SERIES)])
        if points:
            draw.line(points, SERIES[at % len(SERIES)], 2)
            ends[name] = points[-1][1]
    order = list(lines)
    for name, level in _apart(ends, 16, top + tall).items():
        _text(draw, (left + wide + 12, level), name, SERIES[order.index(name) % len(SERIES)], anchor="lm")
    return image


def _apart(levels: Mapping[str, float], gap: float, bottom: float) -> dict[str, float]:
    """Places for names near these levels, so far apart that they can be read, and none below the bottom."""
    placed: dict[str, float] = {}
    level = -math.inf
    for name in sorted(levels, key=lambda name: levels[name]):
        level = placed[name] = max(levels[name], level + gap)
    for name in reversed(placed):
        placed[name] = bottom = min(placed[name], bottom)
        bottom -= gap
    return placed


# ----------------------------------------------------------------------------------------------------------- intervals
@dataclass(frozen=True, kw_only=True)
class Interval:
    """A difference with its interval. strong: drawn so that it stands out."""

    name: str
    value: float
    low: float
    high: float
    strong: bool = False


def intervals(rows: Sequence[Interval], *, title: str, reach: float) -> Image:
    """A line per row, with zero in the middle; what lies beyond ± reach ends in an arrow at the edge."""
    row, top, wide = 24, 62, 460
    left = 30 + max((round(_font(13).getlength(each.name)) for each in rows), default=0)
    bottom = top + row * len(rows)
    image, draw = _canvas(max(left + wide + 86, 40 + round(_font(17).getlength(title))), bottom + 40)
    _text(draw, (14, 12), title, INK, 17)

    def at(value: float) -> float:
        return left + wide * (min(max(value, -reach), reach) + reach) / (2 * reach)

    for tick in make_scale([-reach, reach], margin=0.0).ticks:
        draw.line((at(tick), top - 8, at(tick), bottom), SOFT if tick == 0 else FAINT)
        _text(draw, (at(tick), bottom + 6), signed(tick, 0), SOFT, anchor="mt")
    for up, each in enumerate(rows):
        level = top + row * up + row // 2 - 6
        colour = SERIES[1] if each.strong else SERIES[0]
        _text(draw, (left - 12, level), each.name, INK if each.strong else SOFT, anchor="rm")
        draw.line((at(each.low), level, at(each.high), level), colour, 3 if each.strong else 2)
        for end, towards in ((each.low, 1), (each.high, -1)):
            if abs(end) > reach:
                tip, back = at(end), at(end) + 8 * towards
                draw.polygon(((tip, level), (back, level - 5), (back, level + 5)), colour)
        if abs(each.value) <= reach:
            draw.ellipse((at(each.value) - 4, level - 4, at(each.value) + 4, level + 4), colour)
        _text(draw, (left + wide + 12, level), signed(each.value), INK if each.strong else SOFT, anchor="lm")
    return image


# ------------------------------------------------------------------------------------------------------ over an image
def overlay(image: Tensor, weights: Tensor, side: int = 160, top: float | None = None) -> Image:
    """Attention over the image that it was computed from: the more of it, the more of the image is seen.

    image: uint8 (3 or 1, H, W). weights: (rows, columns) of the patches. top: the weight that is drawn brightest.
    """
    from PIL import Image as Pillow

    pixels = image.expand(3, -1, -1) if image.shape[0] == 1 else image
    below = Pillow.fromarray(pixels.permute(1, 2, 0).cpu().numpy()).resize((side, side), Pillow.Resampling.BICUBIC)
    share = (weights.double() / (top or float(weights.max()) or 1.0)).clamp(0, 1)
    smooth = torch.nn.functional.interpolate(share[None, None], (side, side), mode="bilinear")[0, 0].numpy()
    photo, heat = np.asarray(below, dtype=float), colours(smooth).astype(float)
    strength = (0.25 + 0.5 * smooth)[..., None]
    mixed = photo * (1 - strength) + heat * strength
    return Pillow.fromarray(mixed.round().astype(np.uint8))


def looks_sheet(image: Tensor, looks: Sequence[Look], *, title: str, side: int = 96) -> Image:
    """One picture per block and head, blocks from top to bottom; within a block, one scale for all heads."""
    heads = max(look.weights.shape[0] for look in looks)
    left, top = 66, 60
    sheet, draw = _canvas(max(left + heads * (side + 4) + 12, 360), top + len(looks) * (side + 4) + 12)
    _text(draw, (14, 10), title, INK, 17)
    for head in range(heads):
        _text(draw, (left + head * (side + 4) + side / 2, 40), f"head {head}", SOFT, anchor="mt")
    for at, look in enumerate(looks):
        up = top + at * (side + 4)
        _text(draw, (left - 8, up + side / 2), f"block {look.block}", SOFT, anchor="rm")
        for head, weights in enumerate(look.weights):
            sheet.paste(overlay(image, weights, side, float(look.weights.max())), (left + head * (side + 4), up))
    return sheet


def beside(pictures: Mapping[str, Image]) -> Image:
    """Pictures side by side, each under its name: recipe beside recipe."""
    gap = 16
    wide = sum(picture.width for picture in pictures.values()) + gap * (len(pictures) + 1)
    sheet, draw = _canvas(wide, max(picture.height for picture in pictures.values()) + 52)
    left = gap
    for name, picture in pictures.items():
        _text(draw, (left, 14), name, INK, 15)
        sheet.paste(picture, (left, 40))
        left += picture.width + gap
    return sheet


def above(pictures: Sequence[Image]) -> Image:
    """Pictures below each other, from the left."""
    sheet, _ = _canvas(max(picture.width for picture in pictures), sum(picture.height for picture in pictures))
    top = 0
    for picture in pictures:
        sheet.paste(picture, (0, top))
        top += picture.height
    return sheet
