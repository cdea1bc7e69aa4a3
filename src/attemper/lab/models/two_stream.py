"""A small model for questions about images: two streams of tokens, of which the question looks at the image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.models.vision_parts import check_heads
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.patch_size import fitting_patch
from attemper.lab.tasks.vocabulary import PADDING
from attemper.lab.tasks.vqa.shape import QuestionShape, grid_of


class TwoStream(nn.Module):
    """Image and question side by side (B, numbers) → scores of answers (B, answers). Pre-norm, no dropout of its own.

    The image stream is an encoder of patches. The question stream is a decoder: in each of its blocks the words look at
    each other, padding left out, and then at the patches. The mark before the words gives the answer.
    """

    def __init__(
        self, shape: QuestionShape, *, width: int, depth: int, image_depth: int, heads: int, mlp: int, patch: int
    ) -> None:
        super().__init__()
        self.shape, self.grid = shape, grid_of(shape, patch)
        self.patches = nn.Conv2d(shape.channels, width, patch, stride=patch)
        self.words = nn.Embedding(shape.words, width, padding_idx=PADDING)
        self.places = nn.Parameter(torch.randn(1, self.grid[0] * self.grid[1], width) * 0.5)
        self.order = nn.Parameter(torch.randn(1, shape.length, width) * 0.5)

        def encoder() -> nn.Module:
            return nn.TransformerEncoderLayer(
                width, heads, mlp, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )

        def decoder() -> nn.Module:
            return nn.TransformerDecoderLayer(
                width, heads, mlp, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )

        self.image_blocks = nn.ModuleList(encoder() for _ in range(image_depth))
        self.image_norm = nn.LayerNorm(width)
        self.question_blocks = nn.ModuleList(decoder() for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape.classes)

    @property
    def image_attention(self) -> Sequence[nn.Module]:
        """Where the question looks at the image."""
        return [block.multihead_attn for block in self.question_blocks]  # type: ignore[misc]

    def forward(self, inputs: Tensor) -> Tensor:
        images, words = self.shape.parted(inputs)
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.image_blocks:
            x = block(x)
        memory, padding = self.image_norm(x), words == PADDING
        tokens = self.words(words) + self.order
        for block in self.question_blocks:
            tokens = block(tokens, memory, tgt_key_padding_mask=padding)
        out: Tensor = self.head(self.norm(tokens[:, 0]))
        return out


def two_stream(
    shape: QuestionShape,
    *,
    width: int = 64,
    depth: int = 2,
    image_depth: int = 2,
    heads: int = 4,
    mlp: int | None = None,
    patch: int | None = None,
) -> nn.Module:
    """An encoder of patches, and a decoder of words that looks at them.

    depth: blocks of the question stream. image_depth: of the image stream. mlp: width of the MLPs' hidden layers; None:
    twice the width. patch: side of a patch in pixels; None: whatever gives about 8 × 8 patches.
    """
    check_heads(width, heads)
    if image_depth < 0 or depth < 1:
        raise ParameterError(f"depth is {depth} and image_depth is {image_depth}; at least 1 and 0.")
    images = InputShape(shape.channels, shape.height, shape.width, shape.classes)
    return TwoStream(
        shape,
        width=width,
        depth=depth,
        image_depth=image_depth,
        heads=heads,
        mlp=2 * width if mlp is None else mlp,
        patch=fitting_patch(images, patch),
    )
