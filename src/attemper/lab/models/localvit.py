"""LocalViT: a depthwise convolution in every feed-forward network. Li et al., LocalViT, 2021.

Millions of weights for 224 × 224 images in patches of 16 and 1000 classes: the paper gives 5.9 and 22.4 for LocalViT-T
and LocalViT-S, and 9.4 for LocalViT-T with `squeezed=192`; ours have 5.91, 22.43 and 9.38. As in the authors' code, no
norm precedes a feed-forward network, and the class token passes it by.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.models.vision_parts import (
    Grid,
    PatchTransformer,
    SelfAttention,
    as_image,
    as_tokens,
    check_heads,
    draw_weights,
)
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.patch_size import fitting_patch


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate that is made of the means of all channels: (B, C, H, W) → the same."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Linear(width, squeezed)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(squeezed, width)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(self.fc2(self.act(self.fc1(self.pool(x).flatten(1)))))
        out: Tensor = x * gate[..., None, None]
        return out


class LocalFeedForward(nn.Module):
    """1 × 1 convolution, depthwise 3 × 3 convolution, 1 × 1 convolution: (B, C, H, W) → the same."""

    def __init__(self, width: int, hidden: int, squeezed: int | None, activation: str) -> None:
        super().__init__()

        def act() -> nn.Module:
            return nn.ReLU6() if activation == "relu6" else nn.Hardswish()

        self.conv1 = nn.Conv2d(width, hidden, 1, bias=False)
        self.norm1, self.act1 = nn.BatchNorm2d(hidden), act()
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False)
        self.norm2, self.act2 = nn.BatchNorm2d(hidden), act()
        self.squeeze = nn.Identity() if squeezed is None else SqueezeExcite(hidden, squeezed)
        self.conv2 = nn.Conv2d(hidden, width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm1(self.conv1(x)))
        x = self.squeeze(self.act2(self.norm2(self.depthwise(x))))
        out: Tensor = self.norm3(self.conv2(x))
        return out


class LocalBlock(nn.Module):
    """Attention over all tokens; a feed-forward network for the patches alone, the class token passes by."""

    def __init__(self, width: int, heads: int, grid: Grid, mlp: LocalFeedForward) -> None:
        super().__init__()
        self.grid = grid
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = SelfAttention(width, heads, bias=True)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        token, patches = x[:, :1], as_image(x[:, 1:], self.grid)
        patches = patches + self.mlp(patches)
        return torch.cat([token, as_tokens(patches)], dim=1)


class ImagePatches(nn.Module):
    """(B, C, H, W) → (B, N, width), by patches that do not overlap."""

    def __init__(self, shape: InputShape, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(shape.channels, width, patch, stride=patch)
        self.img_size = (shape.height, shape.width)
        self.grid_size = (shape.height // patch, shape.width // patch)

    def forward(self, x: Tensor) -> Tensor:
        return as_tokens(self.proj(x))


class LocalViT(PatchTransformer):
    """(B, C, H, W) → (B, classes)."""

    def __init__(self, patches: ImagePatches, blocks: list[nn.Module], width: int, classes: int) -> None:
        super().__init__(patches, blocks, width, classes)
        rows, columns = patches.grid_size
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + rows * columns, width))
        draw_weights(self)


def localvit(
    shape: InputShape,
    *,
    width: int = 192,
    depth: int = 12,
    heads: int = 4,
    mlp: int | None = None,
    squeeze_excite: bool = True,
    squeezed: int = 4,
    activation: Literal["hswish", "relu6"] = "hswish",
    patch: int | None = None,
) -> nn.Module:
    """A LocalViT; without options, the one that is published as LocalViT-T.

    mlp: width of the feed-forward networks' hidden layer; None: four times the model's.
    squeeze_excite: whether channels are scaled by a gate before the last layer.
    squeezed: width inside of what makes the gate.
    patch: side of a patch in pixels; None: whatever gives about 8 × 8 patches.
    """
    check_heads(width, heads)
    if activation not in ("hswish", "relu6"):
        raise ParameterError(f"activation is {activation!r}; it must be 'hswish' or 'relu6'.")
    patches = ImagePatches(shape, fitting_patch(shape, patch), width)
    hidden = 4 * width if mlp is None else mlp

    def feed_forward() -> LocalFeedForward:
        return LocalFeedForward(width, hidden, squeezed if squeeze_excite else None, activation)

    blocks: list[nn.Module] = [LocalBlock(width, heads, patches.grid_size, feed_forward()) for _ in range(depth)]
    return LocalViT(patches, blocks, width, shape.classes)
