"""Where a question looks: attention from the token that answers to the patches of the image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from attemper.lab.tasks.pictures import Picture, beside, image_of, paint_heat, picture
from attemper.probes.attention import Seen, weights_of_rows
from attemper.probes.watching import AttentionWatch, find_attention, in_eval, looking
from attemper.sites import AttentionSite
from attemper.tempering.subclassing import Action


@runtime_checkable
class LooksAtImages(Protocol):
    """A model that can say which of its attentions go from the question to the image.

    In each of them the first query is the token that answers, and the last keys are the patches.
    """

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        ...

    @property
    def image_attention(self) -> Sequence[nn.Module]: ...


@torch.no_grad()
def question_look(model: nn.Module, inputs: Tensor) -> Tensor | None:
    """The weights of the patches in the last of these attentions, the mean over its heads: (rows, columns).

    inputs: one sample. None for a model that does not say where it looks.
    """
    if not isinstance(model, LooksAtImages):
        return None
    last, grid = model.image_attention[-1], model.grid
    found: list[Tensor] = []

    def tell(site: AttentionSite, call: Seen) -> None:
        found.append(weights_of_rows(call, 0, 1)[0, :, 0, -math.prod(grid) :])

    inside = {id(module) for module in last.modules()}
    sites = [site for site in find_attention(model).attentions if id(site.module) in inside]
    watches: list[tuple[nn.Module, Action]] = [(site.module, AttentionWatch(site, tell)) for site in sites]
    with in_eval(model), looking(watches):
        model(inputs)
    return found[-1].float().mean(0).unflatten(0, grid).cpu() if found else None


def draw_look(pixels: Tensor, look: Tensor | None, caption: str) -> Picture:
    """The image, and beside it the same with heat over it. pixels: uint8 (3, H, W)."""
    image = image_of(pixels)
    return picture(image if look is None else beside([image, paint_heat(image, look)]), caption)
