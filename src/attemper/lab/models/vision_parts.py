"""What the vision transformers here are made of."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError

Grid = tuple[int, int]


class SelfAttention(nn.Module):
    """Attention of tokens over each other: (B, N, width) → (B, N, width)."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Widen, bend, narrow: (B, N, width) → (B, N, width)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class PatchTransformer(nn.Module):
    """Patches, class token, positions, blocks, norm, the class token's classes: (B, C, H, W) → (B, classes).

    patch_embed: (B, C, H, W) → (B, N, width); it has a `grid_size` and, of the images, an `img_size`.
    """

    num_prefix_tokens = 1
    pos_embed: Tensor
    """(1, 1 + N, width), added to the tokens: a parameter or a buffer that a subclass makes."""

    def __init__(self, patch_embed: nn.Module, blocks: list[nn.Module], width: int, classes: int) -> None:
        super().__init__()
        self.img_size = patch_embed.img_size
        self.patch_embed = patch_embed
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def embedded(self, x: Tensor) -> Tensor:
        """What goes into the first block: the class token and the patches, with their positions."""
        tokens = self.patch_embed(x)
        return torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], dim=1) + self.pos_embed

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedded(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x[:, 0]))
        return out


def as_image(tokens: Tensor, grid: Grid) -> Tensor:
    """(B, C, rows, columns) from (B, rows · columns, C)."""
    image: Tensor = tokens.transpose(1, 2).unflatten(2, grid)
    return image


def as_tokens(image: Tensor) -> Tensor:
    """(B, rows · columns, C) from (B, C, rows, columns)."""
    return image.flatten(2).transpose(1, 2)


def draw_weights(model: nn.Module) -> None:
    """Weights of linear layers, the class token and learnt positions as vision transformers have them at first."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for name, parameter in model.named_parameters(recurse=False):
        if name in ("cls_token", "pos_embed", "layer_embed"):
            nn.init.trunc_normal_(parameter, std=0.02)


def check_heads(width: int, heads: int) -> None:
    """Raise unless the width can be shared out between the heads."""
    if width % heads:
        raise ParameterError(f"width is {width} and heads is {heads}; the width must be a multiple of the heads.")
