"""Pictures of boxes: what a model finds beside what is there, and where the surest query looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attemper.errors import NoSiteError, ParameterError, WrappedModelError
from attemper.lab.tasks.boxes.geometry import to_corners
from attemper.lab.tasks.boxes.shape import BOX, CLASS
from attemper.lab.tasks.pictures import TRUE, Picture, beside, colour_of, draw_boxes, image_of, paint_heat, picture

if TYPE_CHECKING:
    from PIL.Image import Image

SURE = 0.5
"""Boxes with at least this probability are drawn."""
MOST_DRAWN = 30


@torch.no_grad()
def draw_answer(
    model: nn.Module, inputs: Tensor, stored: Tensor, targets: Tensor, classes: Sequence[str]
) -> list[Picture]:
    """A picture for every image of a batch, and which box is meant in words below it."""
    out = model(inputs)
    sure, labels = out["logits"].float().softmax(-1)[..., :-1].max(-1)
    corners = to_corners(out["boxes"].float()).clamp(0, 1)
    heat = where_queries_look(model, inputs, sure.argmax(1))
    found = []
    for at, canvas in enumerate(stored.cpu()):
        height, width = int((canvas[3, :, 0] > 0).sum()), int((canvas[3, 0] > 0).sum())
        image = image_of(canvas[:3, :height, :width])
        shrink = torch.tensor([width, height, width, height]) / canvas.shape[-1]
        drawn = _with_boxes(image, sure[at], labels[at], corners[at].cpu() / shrink, targets[at].cpu(), shrink, classes)
        parts = [drawn]
        if heat is not None:
            side = heat.shape[-1] / canvas.shape[-1]
            rows, columns = max(1, round(height * side)), max(1, round(width * side))
            parts.append(paint_heat(image, heat[at, :rows, :columns]))
        found.append(picture(beside(parts), _caption(sure[at], labels[at], targets[at], classes, heat is not None)))
    return found


def _with_boxes(
    image: Image, sure: Tensor, labels: Tensor, corners: Tensor, rows: Tensor, shrink: Tensor, classes: Sequence[str]
) -> Image:
    """What is there in white, and what is found in the colours of its classes."""
    rows = rows[rows[:, CLASS] >= 0]
    shown = draw_boxes(image, (rows[:, BOX] / shrink).tolist(), [""] * len(rows), [TRUE] * len(rows))
    best = sure.topk(min(MOST_DRAWN, len(sure))).indices
    best = best[sure[best] >= SURE].cpu()
    names = [f"{classes[int(labels[at])]} {100 * float(sure[at]):.0f} %" for at in best]
    return draw_boxes(shown, corners[best].tolist(), names, [colour_of(int(labels[at])) for at in best])


def _caption(sure: Tensor, labels: Tensor, rows: Tensor, classes: Sequence[str], heat: bool) -> str:
    there, found = int((rows[:, CLASS] >= 0).sum()), int((sure >= SURE).sum())
    best = int(sure.argmax())
    told = f"Boxes that are there: {there} (white). Found with at least {100 * SURE:.0f} %: {found}."
    look = (
        f" Right: where the query looks that is surest ({classes[int(labels[best])]}, {100 * float(sure[best]):.0f} %)."
    )
    return told + (look if heat else "")


def where_queries_look(model: nn.Module, inputs: Tensor, queries: Tensor) -> Tensor | None:
    """The weights of one query of every image in the last attention to it, the mean over heads: (B, rows, columns).

    None of a model that does not say, by its `cross_attention`, which attention that is.
    """
    from attemper.probes.pictures import module_weights

    name: Any = getattr(model, "cross_attention", None)
    if not isinstance(name, str):
        return None
    try:
        weights = module_weights(model, inputs, name)
    except (NoSiteError, WrappedModelError, ParameterError):  # in a form in which nothing can be looked at
        return None
    side = math.isqrt(weights.shape[-1])
    if side * side != weights.shape[-1]:
        return None
    chosen: Tensor = weights.mean(1)[torch.arange(len(weights), device=weights.device), queries.to(weights.device)]
    return chosen.view(-1, side, side).cpu()
