"""ViLT for questions about images: one transformer over words and patches. Kim et al., ViLT, 2021."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.models.vision_parts import check_heads
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.patch_size import fitting_patch
from attemper.lab.tasks.vocabulary import PADDING
from attemper.lab.tasks.vqa.shape import QuestionShape, grid_of


class ViltAnswers(nn.Module):
    """Transformers' `ViltForQuestionAnswering` on image and question side by side: (B, numbers) → (B, answers).

    The library shuffles the patches of every image by torch's generator, in eval mode too, since it may have to choose
    among too many of them. Here they are embedded by the same layers in their order, so that a model gives the same
    answer twice and draws nothing beside the recipe.
    """

    def __init__(self, model: Any, shape: QuestionShape, patch: int) -> None:
        super().__init__()
        self.vilt: Any = model.vilt
        self.classifier: Any = model.classifier
        self.shape, self.grid = shape, grid_of(shape, patch)

    @property
    def image_attention(self) -> Sequence[nn.Module]:
        """Every block: words, class token and patches are keys side by side."""
        return [layer.attention for layer in self.vilt.encoder.layer]

    def forward(self, inputs: Tensor) -> Tensor:
        images, words = self.shape.parted(inputs)
        embedding = self.vilt.embeddings
        patches = embedding.patch_embeddings(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([embedding.cls_token.expand(len(patches), -1, -1), patches], 1)
        tokens = embedding.dropout(tokens + embedding.position_embeddings)
        out = self.vilt(
            input_ids=words,
            attention_mask=(words != PADDING).long(),
            image_embeds=tokens,
            pixel_mask=torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device),
        )
        answers: Tensor = self.classifier(out.pooler_output)
        return answers


def vilt(
    shape: QuestionShape,
    *,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    mlp: int | None = None,
    patch: int | None = None,
) -> nn.Module:
    """ViLT from nothing, of any size and without any dropout of its own; ViLT-B without options.

    mlp: width of the MLPs' hidden layers; None: four times the width. patch: side of a patch in pixels; None: whatever
    gives about 8 × 8 patches. Images must be square.
    """
    from transformers import ViltConfig, ViltForQuestionAnswering

    check_heads(width, heads)
    if shape.height != shape.width:
        raise ParameterError(f"ViLT takes square images, not those of {shape.height} × {shape.width}.")
    side = fitting_patch(InputShape(shape.channels, shape.height, shape.width, shape.classes), patch)
    config: Any = ViltConfig(
        vocab_size=shape.words,
        pad_token_id=PADDING,
        max_position_embeddings=shape.length,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width if mlp is None else mlp,
        image_size=shape.height,
        patch_size=side,
        num_channels=shape.channels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = shape.classes
    model = ViltForQuestionAnswering(config)
    for name in ("cls_token", "position_embeddings"):  # the library leaves both at zero, and patches without a place
        nn.init.trunc_normal_(getattr(model.vilt.embeddings, name), std=config.initializer_range)
    return ViltAnswers(model, shape, side)
