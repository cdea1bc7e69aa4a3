"""The laboratory's own models whose stems and feed-forward networks are not those of a ViT."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from families.base import Family, image


def lab_model(text: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from attemper.lab.models.registry import build_model
        from attemper.lab.tasks.base import InputShape

        model = build_model(text, InputShape(channels=3, height=16, width=16, classes=5))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.0  # any training pass would change what it does in eval mode
        return model

    return build


SMALL = "width=24, depth=2, heads=3, mlp=32, patch=4"

LAB = [
    Family("lab-t2t", lab_model(f"t2t-vit({SMALL}, token_width=16)"), image(16), 2, 2, ((4, 4),), prefix=1),
    Family("lab-localvit", lab_model(f"localvit({SMALL})"), image(16), 2, 2, ((4, 4),), prefix=1),
    Family("lab-ceit", lab_model(f"ceit({SMALL}, stem=8)"), image(16), 2, 2, ((4, 4),), prefix=1),
]
"""The attention of CeiT's last class token over those of all layers stands outside of its blocks, and is left alone."""
