"""RandAugment on whole batches: images that drew the same operation at the same strength go through it together."""

from typing import Any

import torch
from torch import Tensor

Operation = tuple[str, float]
"""torchvision's name of it, and its strength."""

STRENGTHS = 31
"""Of torchvision's operations, from 0 to 30."""


def draw_operations(
    images: int, height: int, width: int, *, ops: int, magnitude: int, p: float, spread: float
) -> list[list[Operation]]:
    """The operations of every image, one after the other.

    p: each is applied with this probability. spread: standard deviation of the strength, rounded and kept from 0 to 30.

    Numbers are drawn in the order in which torchvision's RandAugment draws them when it is called image by image; what
    it does not have, p and spread, draws only where it is used.
    """
    space = _transform()._AUGMENTATION_SPACE
    names = list(space)
    strengths = {name: make(STRENGTHS, height, width) for name, (make, _) in space.items()}

    def draw() -> Operation:
        name = names[int(torch.randint(len(names), ()))]
        index = magnitude
        if spread:
            index = min(max(round(magnitude + spread * float(torch.randn(()))), 0), STRENGTHS - 1)
        strength = 0.0 if strengths[name] is None else float(strengths[name][index])
        if space[name][1] and torch.rand(()) <= 0.5:
            strength = -strength
        return ("Identity", 0.0) if p < 1 and torch.rand(()) > p else (name, strength)

    return [[draw() for _ in range(ops)] for _ in range(images)]


def apply_operations(images: Tensor, drawn: list[list[Operation]]) -> Tensor:
    """Every image after its operations: the same bits as if each went through them alone.

    images: uint8 (B, C, H, W). drawn: as many operations for every image.
    """
    transform = _transform()
    images = images.clone()
    for step in zip(*drawn, strict=True):
        groups: dict[Operation, list[int]] = {}
        for index, operation in enumerate(step):
            groups.setdefault(operation, []).append(index)
        for (name, strength), alike in groups.items():
            if name != "Identity":
                chosen = torch.tensor(alike).to(images.device, non_blocking=True)
                images[chosen] = transform._apply_image_or_video_transform(
                    images[chosen], name, strength, transform.interpolation, transform._fill
                )
    return images


def _transform() -> Any:
    from torchvision.transforms import v2

    return v2.RandAugment(num_magnitude_bins=STRENGTHS)
