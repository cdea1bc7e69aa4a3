"""Vision transformers for small images, built on timm's."""

from typing import Any, Literal, cast

from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.models.vision_parts import check_heads
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.patch_size import fitting_patch


def vit(
    shape: InputShape,
    *,
    width: int,
    depth: int,
    heads: int,
    mlp: int,
    patch: int | None = None,
    pool: Literal["token", "avg"] = "token",
    drop_path: float = 0.0,
) -> nn.Module:
    """A pre-norm vision transformer with a class token and learnt positions, by default without any dropout of its own.

    mlp: width of the MLP's hidden layer.
    patch: side of a patch in pixels; None: whatever gives about 8 × 8 patches.
    pool: what is classified, the class token or the mean of the patches.
    drop_path: the rate at which the last block's branches are left out in training; earlier blocks have less.
    """
    from timm.models.vision_transformer import VisionTransformer

    check_heads(width, heads)
    if pool not in ("token", "avg"):
        raise ParameterError(f"pool is {pool!r}; it must be 'token' or 'avg'.")
    if not 0 <= drop_path < 1:
        raise ParameterError(f"drop_path is {drop_path!r}; it must be at least 0 and below 1.")
    model: nn.Module = VisionTransformer(
        img_size=(shape.height, shape.width),
        patch_size=fitting_patch(shape, patch),
        in_chans=shape.channels,
        num_classes=shape.classes,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp / width,
        global_pool=pool,
        drop_path_rate=drop_path,
    )
    return model


def vit_digits(
    shape: InputShape,
    *,
    width: int = 32,
    depth: int = 4,
    heads: int = 4,
    mlp: int = 64,
    patch: int | None = None,
    pool: Literal["token", "avg"] = "token",
) -> nn.Module:
    """A ViT that is narrow enough to learn 8 × 8 images in seconds on one core.

    It starts from other weights than `vit`: a deviation of 0.02 suits widths of hundreds, and at 32 it makes positions
    so faint beside the patches that most of a short training is spent on finding them.
    """
    model = vit(shape, width=width, depth=depth, heads=heads, mlp=mlp, patch=patch, pool=pool)
    cast(Any, model).init_weights("jax")  # Xavier, which knows the width
    nn.init.normal_(cast(Tensor, model.pos_embed))
    return model
