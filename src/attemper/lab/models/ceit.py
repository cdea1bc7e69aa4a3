"""CeiT: convolutions in the stem and the feed-forward networks. Yuan et al., Incorporating Convolution Designs into
Visual Transformers, ICCV 2021.

Millions of weights for 224 × 224 images in patches of 16 and 1000 classes: the paper gives 6.4 and 24.2 for CeiT-T and
CeiT-S, ours have 6.36 and 24.20. As in the authors' code, no activation follows the last layer of a feed-forward
network.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.lab.models.vision_parts import (
    FeedForward,
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


class ImageToTokens(nn.Module):
    """Low-level features first, then patches of them: (B, C, H, W) → (B, N, width)."""

    def __init__(self, shape: InputShape, patch: int, width: int, stem: int) -> None:
        super().__init__()
        stride, pool = 2 if patch % 4 == 0 else 1, 2 if patch % 8 == 0 else 1
        side = patch // (stride * pool)
        self.conv = nn.Conv2d(shape.channels, stem, 7, stride=stride, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(stem)
        self.pool = nn.MaxPool2d(3, stride=pool, padding=1)
        self.proj = nn.Conv2d(stem, width, side, stride=side)
        self.img_size = (shape.height, shape.width)
        self.grid_size = (shape.height // patch, shape.width // patch)

    def forward(self, x: Tensor) -> Tensor:
        return as_tokens(self.proj(self.pool(self.norm(self.conv(x)))))


class LocallyEnhancedFeedForward(nn.Module):
    """LeFF: a depthwise convolution between the two layers. The class token passes by: (B, 1 + N, width) → the same."""

    def __init__(self, width: int, hidden: int, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.conv1 = nn.Conv2d(width, hidden, 1)
        self.norm1 = nn.BatchNorm2d(hidden)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, width, 1)
        self.norm3 = nn.BatchNorm2d(width)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        token, patches = x[:, :1], as_image(x[:, 1:], self.grid)
        patches = self.act(self.norm1(self.conv1(patches)))
        patches = self.act(self.norm2(self.depthwise(patches)))
        return torch.cat([token, as_tokens(self.norm3(self.conv2(patches)))], dim=1)


class CeitBlock(nn.Module):
    """Attention, then LeFF: (B, 1 + N, width) → the same."""

    def __init__(self, width: int, heads: int, mlp: int, grid: Grid) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = SelfAttention(width, heads, bias=True)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = LocallyEnhancedFeedForward(width, mlp, grid)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class LayerAttention(nn.Module):
    """The last class token attends to those of all layers: (B, layers, width) → (B, 1, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x[:, -1:]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class LayerwiseClassAttention(nn.Module):
    """LCA, the block behind the others: (B, layers, width) → (B, width)."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = LayerAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = FeedForward(width, mlp)

    def forward(self, x: Tensor) -> Tensor:
        last = x[:, -1:] + self.attn(self.norm1(x))
        out: Tensor = last + self.mlp(self.norm2(last))
        return out[:, 0]


class CeiT(PatchTransformer):
    """(B, C, H, W) → (B, classes)."""

    def __init__(self, stem: ImageToTokens, width: int, depth: int, heads: int, mlp: int, classes: int) -> None:
        grid = stem.grid_size
        super().__init__(stem, [CeitBlock(width, heads, mlp, grid) for _ in range(depth)], width, classes)
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + grid[0] * grid[1], width))
        self.layer_embed = nn.Parameter(torch.zeros(1, depth, width))
        self.over_layers = LayerwiseClassAttention(width, heads, mlp)
        draw_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        x, tokens = self.embedded(x), []
        for block in self.blocks:
            x = block(x)
            tokens.append(x[:, 0])
        out: Tensor = self.head(self.norm(self.over_layers(torch.stack(tokens, dim=1) + self.layer_embed)))
        return out


def ceit(
    shape: InputShape,
    *,
    width: int = 192,
    depth: int = 12,
    heads: int = 3,
    mlp: int | None = None,
    stem: int = 64,
    patch: int | None = None,
) -> nn.Module:
    """A CeiT; without options, the one that is published as CeiT-T.

    mlp: width of the feed-forward networks' hidden layer; None: four times the model's.
    stem: channels of the convolutional stem.
    patch: side of a patch in pixels, stem included; None: whatever gives about 8 × 8 patches.
    """
    check_heads(width, heads)
    tokens = ImageToTokens(shape, fitting_patch(shape, patch), width, stem)
    return CeiT(tokens, width, depth, heads, 4 * width if mlp is None else mlp, shape.classes)
