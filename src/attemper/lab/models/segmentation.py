"""Networks that give every pixel a class: SegFormer, and image encoders with a head of their own."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.models.vision_parts import check_heads
from attemper.lab.tasks.segmentation.task import MaskShape
from attemper.tempering.outputs import logits_of

Head = Literal["linear", "upernet"]
LEVELS = 4
"""Feature maps that a UperNet head joins."""
SCALES = (4.0, 2.0, 1.0, 0.5)
"""Of an encoder whose feature maps are all of one size, such as a ViT, these are made of them."""

SEGFORMERS: dict[str, dict[str, Any]] = {
    "nano": {"hidden_sizes": (16, 32, 48, 64), "depths": (1, 1, 1, 1), "decoder_hidden_size": 64},
    "b0": {"hidden_sizes": (32, 64, 160, 256), "depths": (2, 2, 2, 2), "decoder_hidden_size": 256},
    "b1": {"hidden_sizes": (64, 128, 320, 512), "depths": (2, 2, 2, 2), "decoder_hidden_size": 256},
    "b2": {"hidden_sizes": (64, 128, 320, 512), "depths": (3, 4, 6, 3), "decoder_hidden_size": 768},
    "b3": {"hidden_sizes": (64, 128, 320, 512), "depths": (3, 4, 18, 3), "decoder_hidden_size": 768},
    "b4": {"hidden_sizes": (64, 128, 320, 512), "depths": (3, 8, 27, 3), "decoder_hidden_size": 768},
    "b5": {"hidden_sizes": (64, 128, 320, 512), "depths": (3, 6, 40, 3), "decoder_hidden_size": 768},
}
"""Xie et al., SegFormer, 2021, table 6; nano is smaller, and ours."""


def pixels_of(cells: Tensor, images: Tensor) -> Tensor:
    """Logits of feature cells (B, classes, h, w) → those of the images' pixels (B, H, W, classes), bilinear.

    Classes come last, as in every other model here: what compares predictions looks for them there.
    """
    size = (images.shape[-2], images.shape[-1])
    if cells.shape[2:] != size:
        cells = F.interpolate(cells, size=size, mode="bilinear", align_corners=False)
    return cells.movedim(1, -1)


class PixelClasses(nn.Module):
    """A library's network for segmentation, with logits for pixels: (B, C, H, W) → (B, H, W, classes)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return pixels_of(logits_of(self.network(images)), images)


class EncoderWithHead(nn.Module):
    """One of timm's image encoders and a head on its feature maps: (B, C, H, W) → (B, H, W, classes).

    indices: the blocks or stages whose feature maps the head gets.
    """

    def __init__(self, encoder: nn.Module, indices: list[int], head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.indices, self.head = encoder, indices, head

    @property
    def patch_embed(self) -> Any:
        """The encoder's; positions of other sizes are resampled to its grid."""
        return self.encoder.patch_embed

    def forward(self, images: Tensor) -> Tensor:
        maps = cast(Any, self.encoder).forward_intermediates(
            images, indices=self.indices, norm=True, output_fmt="NCHW", intermediates_only=True
        )
        return pixels_of(self.head(maps), images)


class LinearHead(nn.Module):
    """A linear layer on every cell of the last feature map."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        out: Tensor = self.classifier(maps[-1])
        return out


class UperNet(nn.Module):
    """Transformers' UperNet head (Xiao et al., 2018); feature maps of one size become a pyramid first."""

    def __init__(self, widths: list[int], classes: int, hidden: int, pyramid: bool) -> None:
        super().__init__()
        try:
            from transformers import UperNetConfig
            from transformers.models.upernet.modeling_upernet import UperNetHead
        except ModuleNotFoundError:
            raise ParameterError("The UperNet head is Transformers': pip install 'attemper[transformers]'.") from None
        self.scales = SCALES if pyramid else (1.0,) * LEVELS
        options: dict[str, Any] = {"hidden_size": hidden, "num_labels": classes}
        self.decoder = UperNetHead(UperNetConfig(**options), widths)

    def forward(self, maps: list[Tensor]) -> Tensor:
        out: Tensor = self.decoder([_scaled(x, scale) for x, scale in zip(maps, self.scales, strict=True)])
        return out


def _scaled(x: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return x
    return F.interpolate(x, scale_factor=scale, mode="bilinear", align_corners=False)


# --------------------------------------------------------------------------------------------------------------- models
def segformer(shape: MaskShape, *, kind: str = "b0") -> nn.Module:
    """Transformers' SegFormer, untrained, without any dropout of its own.

    kind: which of `SEGFORMERS`.
    """
    try:
        from transformers import SegformerConfig, SegformerForSemanticSegmentation
    except ModuleNotFoundError:
        raise ParameterError(
            "SegFormer is one of Transformers' models: pip install 'attemper[transformers]'."
        ) from None
    heads = (1, 2, 5, 8) if kind != "nano" else (1, 2, 3, 4)
    options = {
        "num_channels": shape.channels,
        "num_labels": shape.classes,
        "num_attention_heads": heads,
        "classifier_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
        **SEGFORMERS[kind],
    }
    return PixelClasses(SegformerForSemanticSegmentation(SegformerConfig(**options)))


def segvit(
    shape: MaskShape,
    *,
    width: int = 192,
    depth: int = 12,
    heads: int = 3,
    mlp: int | None = None,
    patch: int | None = None,
    head: Head = "linear",
    hidden: int | None = None,
) -> nn.Module:
    """A pre-norm ViT without a class token, and a head on its patches; without any dropout of its own.

    mlp: width of the MLP's hidden layer; None: four times the width.
    patch: side of a patch in pixels; None: a power of 2 that gives at least 16 patches along the shorter side.
    head: a linear layer per patch, or UperNet on four blocks. hidden: width of the latter; None: that of the model.
    """
    from timm.models.vision_transformer import VisionTransformer

    check_heads(width, heads)
    _check_head(head)
    side = fitting_side(shape, patch)
    encoder: nn.Module = VisionTransformer(
        img_size=(shape.height, shape.width),
        patch_size=side,
        in_chans=shape.channels,
        num_classes=0,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        mlp_ratio=(4 * width if mlp is None else mlp) / width,
        class_token=False,
        global_pool="",
    )
    if width < NARROW:  # a deviation of 0.02 suits widths of hundreds
        cast(Any, encoder).init_weights("jax")
        nn.init.normal_(cast(Tensor, encoder.pos_embed))
    return with_head(encoder, shape.classes, head, width if hidden is None else hidden)


NARROW = 128
"""Widths below which a ViT begins from the weights of `vit_digits`."""
CELLS = 16
"""Patches along the shorter side of an image, at least, where a patch has no size."""


def fitting_side(shape: MaskShape, patch: int | None) -> int:
    """The side of a patch, if images can be cut into such patches.

    >>> fitting_side(MaskShape(3, 96, 128, 11), None)
    4
    """
    if patch is None:
        most = max(1, min(shape.height, shape.width) // CELLS)
        patch = 2 ** int(math.log2(most))
        while shape.height % patch or shape.width % patch:
            patch //= 2
    if shape.height % patch or shape.width % patch:
        raise ParameterError(
            f"patch is {patch}; images of {shape.height} × {shape.width} cannot be cut into such patches."
        )
    return patch


def segmenter_from_timm(name: str, shape: MaskShape, options: dict[str, Any]) -> nn.Module:
    """One of timm's models with a head for pixels. Its options are timm's, and `head` and `hidden` as of `segvit`."""
    from attemper.lab.models.libraries import from_timm
    from attemper.lab.tasks.base import InputShape

    options = dict(options)
    head, hidden = options.pop("head", "linear"), options.pop("hidden", None)
    _check_head(head)
    plain = InputShape(shape.channels, shape.height, shape.width, classes=0)
    encoder = from_timm(name, plain, options)
    if not hasattr(encoder, "forward_intermediates"):
        raise ParameterError(f"timm's {name} does not give its feature maps; a model with forward_intermediates does.")
    return with_head(encoder, shape.classes, head, hidden or 256)


def segmenter_from_transformers(kind: str, shape: MaskShape, options: dict[str, Any]) -> nn.Module:
    """Transformers' model for semantic segmentation, untrained: the default configuration of a model type, such as
    'segformer', changed by options.
    """
    from transformers import AutoModelForSemanticSegmentation
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES as KNOWN

    from attemper.lab.models.libraries import built_from_config

    return PixelClasses(
        built_from_config(kind, shape, options, AutoModelForSemanticSegmentation, KNOWN, "semantic segmentation")
    )


def _check_head(head: Any) -> None:
    if head not in ("linear", "upernet"):
        raise ParameterError(f"head is {head!r}; it must be 'linear' or 'upernet'.")


def with_head(encoder: nn.Module, classes: int, head: Head, hidden: int) -> nn.Module:
    """An encoder of timm with a head; what it never uses of itself is left out."""
    info = cast(Any, encoder).feature_info
    wanted = 1 if head == "linear" else LEVELS
    if len(info) < wanted:
        raise ParameterError(f"head is 'upernet', which needs {LEVELS} feature maps; the model has {len(info)}.")
    indices = [(at + 1) * len(info) // wanted - 1 for at in range(wanted)]
    widths = [int(info[at]["num_chs"]) for at in indices]
    flat = len({info[at]["reduction"] for at in indices}) == 1
    made = LinearHead(widths[-1], classes) if head == "linear" else UperNet(widths, classes, hidden, pyramid=flat)
    return EncoderWithHead(encoder, indices, made)
