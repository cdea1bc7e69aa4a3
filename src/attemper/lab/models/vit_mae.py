"""ViT-MAE: masked pre-training, and a classifier of the same encoder. He et al., Masked Autoencoders, 2022.

Transformers' own classes in any size. Built without trained weights, they have no positions at all (5.22: zeros, and
frozen); here they get the sines and cosines that the paper has.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.models.vision_parts import check_heads
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.mae.shape import MaskedShape
from attemper.lab.tasks.patch_size import fitting_patch

DECODER_WIDTH, DECODER_DEPTH = 0.5, 2
"""Of the decoder: its width as a share of the encoder's, and its blocks."""


class MaskedAutoencoder(nn.Module):
    """An image beside the ranks of its patches (B, numbers) → every patch (B, N, patch · patch · C).

    Hidden patches are painted over before anything looks at the image. The encoder leaves them out in any case; but
    what a recipe does to all patches of an image, such as graying, would carry their pixels into visible ones.
    """

    def __init__(self, model: Any, shape: MaskedShape) -> None:
        super().__init__()
        self.vit: Any = model.vit
        self.decoder: Any = model.decoder
        self.shape = shape

    def no_weight_decay(self) -> set[str]:
        """What weight decay on matrices leaves out."""
        return {"vit.embeddings.cls_token", "decoder.mask_token"}

    def encode(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Class token and visible patches (B, 1 + visible, width), by rank, and the rank of every patch (B, N)."""
        images, ranks = self.shape.parted(inputs)
        seen = self.shape.spread((ranks < self.shape.visible).to(images.dtype))
        found = self.vit(pixel_values=images * seen, noise=ranks)
        return found.last_hidden_state, found.ids_restore

    def forward(self, inputs: Tensor) -> Tensor:
        latent, ranks = self.encode(inputs)
        patches: Tensor = self.decoder(latent, ranks).logits
        return patches


class MaskedClassifier(nn.Module):
    """The encoder on whole images, and a linear layer: (B, C, H, W) → (B, classes)."""

    def __init__(self, vit: Any, classes: int, pool: str) -> None:
        super().__init__()
        self.vit: Any = vit
        self.pool = pool
        self.head = nn.Linear(vit.config.hidden_size, classes)

    def no_weight_decay(self) -> set[str]:
        """What weight decay on matrices leaves out."""
        return {"vit.embeddings.cls_token"}

    def forward(self, images: Tensor) -> Tensor:
        patches = self.vit.embeddings.patch_embeddings.num_patches
        order = torch.arange(patches, device=images.device, dtype=torch.float32).expand(len(images), -1)
        tokens = self.vit(pixel_values=images, noise=order).last_hidden_state
        out: Tensor = self.head(tokens[:, 0] if self.pool == "token" else tokens[:, 1:].mean(1))
        return out


def vit_mae(
    shape: MaskedShape | InputShape,
    *,
    width: int = 192,
    depth: int = 12,
    heads: int = 3,
    mlp: int | None = None,
    patch: int | None = None,
    decoder_width: int | None = None,
    decoder_depth: int | None = None,
    decoder_heads: int | None = None,
    pool: Literal["avg", "token"] | None = None,
) -> nn.Module:
    """For masked pre-training the autoencoder, for classes the classifier; the encoder has the same names in both.

    mlp: width of the MLPs' hidden layers; None: four times the width. patch: None: that of the task, or about 8 × 8
    patches, which are the same. decoder_width, decoder_depth, decoder_heads: of pre-training alone; None: half of the
    width, 2 blocks, as many heads. pool: of the classifier alone, the mean of the patches (avg, None) or the class
    token.
    """
    check_heads(width, heads)
    if width % 4:
        raise ParameterError(f"width is {width}; it must be a multiple of 4: sines and cosines of rows and columns.")
    sizes = {"width": width, "depth": depth, "heads": heads, "mlp": 4 * width if mlp is None else mlp}
    decoder = {"decoder_width": decoder_width, "decoder_depth": decoder_depth, "decoder_heads": decoder_heads}
    if isinstance(shape, MaskedShape):
        _refuse({"pool": pool}, "of a classifier, and this is pre-training")
        return _autoencoder(shape, sizes, decoder, patch)
    _refuse(decoder, "of pre-training, and this is a classifier")
    if pool not in (None, "avg", "token"):
        raise ParameterError(f"pool is {pool!r}; it must be 'avg' or 'token'.")
    return _classifier(shape, sizes, fitting_patch(shape, patch), pool or "avg")


def _refuse(options: dict[str, Any], why: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ParameterError(f"{name} is {value!r}; it is {why}. Leave it out.")


def _autoencoder(
    shape: MaskedShape, sizes: dict[str, int], decoder: dict[str, int | None], patch: int | None
) -> nn.Module:
    from transformers import ViTMAEForPreTraining

    if patch not in (None, shape.patch):
        raise ParameterError(
            f"patch is {patch}, and the task hides patches of {shape.patch}; say it there, or leave it out."
        )
    heads = decoder["decoder_heads"] or sizes["heads"]
    narrow = decoder["decoder_width"] or max(
        4 * heads, math.ceil(DECODER_WIDTH * sizes["width"] / (4 * heads)) * 4 * heads
    )
    check_heads(narrow, heads)
    if narrow % 4:
        raise ParameterError(f"decoder_width is {narrow}; it must be a multiple of 4.")
    config = _config(
        sizes,
        shape.side,
        shape.patch,
        shape.channels,
        mask_ratio=1 - (shape.visible + 0.5) / shape.patches,  # the library rounds down
        decoder_hidden_size=narrow,
        decoder_num_hidden_layers=decoder["decoder_depth"] or DECODER_DEPTH,
        decoder_num_attention_heads=heads,
        decoder_intermediate_size=4 * narrow,
    )
    model = ViTMAEForPreTraining(config)
    _draw_weights(model)
    _place(model.vit.embeddings.position_embeddings, shape.side // shape.patch)
    _place(model.decoder.decoder_pos_embed, shape.side // shape.patch)
    for token in (model.vit.embeddings.cls_token, model.decoder.mask_token):
        nn.init.normal_(token, std=config.initializer_range)
    return MaskedAutoencoder(model, shape)


def _classifier(shape: InputShape, sizes: dict[str, int], patch: int, pool: str) -> nn.Module:
    from transformers import ViTMAEModel

    if shape.height != shape.width:
        raise ParameterError(f"ViT-MAE takes square images, not those of {shape.height} × {shape.width}.")
    vit = ViTMAEModel(_config(sizes, shape.height, patch, shape.channels, mask_ratio=0.0))
    model = MaskedClassifier(vit, shape.classes, pool)
    _draw_weights(model)
    _place(vit.embeddings.position_embeddings, shape.height // patch)
    nn.init.normal_(vit.embeddings.cls_token, std=vit.config.initializer_range)
    return model


def _config(sizes: dict[str, int], side: int, patch: int, channels: int, **more: Any) -> Any:
    from transformers import ViTMAEConfig

    return ViTMAEConfig(
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["depth"],
        num_attention_heads=sizes["heads"],
        intermediate_size=sizes["mlp"],
        image_size=side,
        patch_size=patch,
        num_channels=channels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **more,
    )


def _draw_weights(model: nn.Module) -> None:
    """Xavier for every matrix, the patches' too, as the paper's authors have it."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.flatten(1) if module.weight.ndim > 2 else module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@torch.no_grad()
def _place(table: Tensor, side: int) -> None:
    """Write sines and cosines of columns and of rows into positions (1, 1 + N, width); the class token's are zero."""
    quarter = table.shape[-1] // 4
    rates = 10_000.0 ** -(torch.arange(quarter) / quarter)
    angles = torch.arange(side)[:, None] * rates
    waves = torch.cat([angles.sin(), angles.cos()], 1)
    grid = torch.cat([waves.expand(side, -1, -1), waves[:, None].expand(-1, side, -1)], -1)
    table.zero_()
    table[0, 1:] = grid.flatten(0, 1)
