"""The vision transformers whose training step is measured, from whichever library is installed."""

import importlib.util
from dataclasses import dataclass

from torch import nn

from attemper.errors import ParameterError

LIBRARIES = ("timm", "torchvision")


@dataclass(frozen=True)
class ViT:
    """The sizes of a vision transformer."""

    name: str
    image: int
    patch: int
    width: int
    blocks: int
    heads: int
    classes: int

    def __str__(self) -> str:
        tokens = (self.image // self.patch) ** 2 + 1
        return f"{self.name}: {self.blocks} blocks, width {self.width}, {self.heads} heads, {tokens} tokens"


BASE = ViT("ViT-S/16 at 224", image=224, patch=16, width=384, blocks=12, heads=6, classes=1000)
"""For a GPU."""
SMALL = ViT("small ViT", image=32, patch=4, width=192, blocks=6, heads=6, classes=10)
"""For a CPU."""


def pick_library(name: str) -> str:
    """The library by this name; "auto" is the first that is installed."""
    installed = [library for library in LIBRARIES if importlib.util.find_spec(library) is not None]
    if name == "auto" and installed:
        return installed[0]
    if name in installed:
        return name
    if name not in ("auto", *LIBRARIES):
        raise ParameterError(f"library must be auto, {' or '.join(LIBRARIES)}; got {name!r}")
    wanted = "timm or torchvision" if name == "auto" else name
    raise ParameterError(f"the training step is that of a ViT from {wanted}, which is not installed: pip install timm")


def make_vit(sizes: ViT, library: str) -> nn.Module:
    """A vision transformer with random weights and no dropout of its own."""
    model: nn.Module
    if library == "timm":
        import timm.models

        model = timm.models.VisionTransformer(
            img_size=sizes.image,
            patch_size=sizes.patch,
            embed_dim=sizes.width,
            depth=sizes.blocks,
            num_heads=sizes.heads,
            num_classes=sizes.classes,
        )
    else:
        import torchvision.models

        model = torchvision.models.VisionTransformer(
            image_size=sizes.image,
            patch_size=sizes.patch,
            hidden_dim=sizes.width,
            num_layers=sizes.blocks,
            num_heads=sizes.heads,
            mlp_dim=4 * sizes.width,
            num_classes=sizes.classes,
        )
    return model
