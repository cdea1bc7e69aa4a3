"""T2T-ViT: overlapping patches of tokens become tokens. Yuan et al., Tokens-to-Token ViT, ICCV 2021.

Millions of weights for 224 × 224 images in patches of 16 and 1000 classes, with the frozen positions and random
features, which are buffers here: the paper gives 4.3, 6.9, 21.5, 39.2 and 64.1 for 7, 12, 14, 19 and 24 blocks, ours
have 4.31, 6.94, 21.55, 39.18 and 64.11.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.models.vision_parts import (
    FeedForward,
    Grid,
    PatchTransformer,
    SelfAttention,
    as_image,
    check_heads,
    draw_weights,
)
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.patch_size import fitting_patch


class TokenAttention(nn.Module):
    """Attention with a single head whose skip connection is that of the values: (B, N, inputs) → (B, N, width)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.num_heads = 1
        self.qkv = nn.Linear(inputs, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        out: Tensor = v[:, 0] + self.proj(F.scaled_dot_product_attention(q, k, v)[:, 0])
        return out


class PerformerMixing(nn.Module):
    """The same with softmax(QKᵀ) estimated by products of positive random features, so that no logits are computed."""

    directions: Tensor

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        features = max(1, width // 2)
        self.kqv = nn.Linear(inputs, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("directions", math.sqrt(features) * nn.init.orthogonal_(torch.empty(features, width)))

    def features(self, x: Tensor) -> Tensor:
        """exp(wᵀx − ‖x‖²/2)/√m for each of the m directions w, in float32 at least: (B, N, m)."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        exponents = x @ self.directions.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2
        return exponents.exp() / math.sqrt(len(self.directions))

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.kqv(x).chunk(3, dim=-1)
        q, k = self.features(q), self.features(k)
        mixed = q @ (k.transpose(1, 2) @ v.to(k.dtype)) / (q @ k.sum(1)[..., None] + 1e-8)
        out: Tensor = v + self.proj(mixed.to(v.dtype))
        return out


class TokenLayer(nn.Module):
    """One step from wide tokens to narrow ones: (B, N, inputs) → (B, N, width)."""

    def __init__(self, inputs: int, width: int, tokens: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(inputs)
        self.attn = (PerformerMixing if tokens == "performer" else TokenAttention)(inputs, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class TokensToToken(nn.Module):
    """Cut, mix, cut, mix, cut, project: (B, C, H, W) → (B, N, width). Pieces that are cut out overlap."""

    def __init__(self, shape: InputShape, patch: int, width: int, token_width: int, tokens: str) -> None:
        super().__init__()
        self.img_size = (shape.height, shape.width)
        strides = strides_of(patch)
        self.grids = [
            (shape.height // side, shape.width // side) for side in (strides[0], strides[0] * strides[1], patch)
        ]
        self.split1, self.split2, self.split3 = map(soft_split, strides)
        areas = [kernel_of(stride) ** 2 for stride in strides]
        self.first = TokenLayer(shape.channels * areas[0], token_width, tokens)
        self.second = TokenLayer(token_width * areas[1], token_width, tokens)
        self.project = nn.Linear(token_width * areas[2], width)

    @property
    def grid_size(self) -> Grid:
        """Of the tokens that come out."""
        return self.grids[-1]

    def forward(self, x: Tensor) -> Tensor:
        x = as_image(self.first(self.split1(x).transpose(1, 2)), self.grids[0])
        x = as_image(self.second(self.split2(x).transpose(1, 2)), self.grids[1])
        out: Tensor = self.project(self.split3(x).transpose(1, 2))
        return out


def strides_of(patch: int) -> tuple[int, int, int]:
    """Of the three cuts, so that together they make patches of this side; published are 4, 2 and 2 for 16.

    >>> strides_of(16), strides_of(4), strides_of(2)
    ((4, 2, 2), (2, 2, 1), (2, 1, 1))
    """
    second, third = 2 if patch % 4 == 0 else 1, 2 if patch % 8 == 0 else 1
    return patch // (second * third), second, third


def soft_split(stride: int) -> nn.Unfold:
    """A cut into overlapping pieces, 1/stride as many per side: (B, C, H, W) → (B, C · kernel², N).

    >>> [(cut.kernel_size, cut.padding) for cut in map(soft_split, (4, 2, 1))]
    [(7, 2), (3, 1), (3, 1)]
    """
    return nn.Unfold(kernel_of(stride), stride=stride, padding=max(1, stride // 2))


def kernel_of(stride: int) -> int:
    """The side of the pieces of a cut, so that each reaches into its neighbours."""
    return max(3, 2 * stride - 1)


class T2TBlock(nn.Module):
    """Attention, then an MLP: (B, N, width) → the same."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class T2TViT(PatchTransformer):
    """(B, C, H, W) → (B, classes); positions are sinusoids, which are not trained."""

    def __init__(self, tokens_to_token: TokensToToken, blocks: list[nn.Module], width: int, classes: int) -> None:
        super().__init__(tokens_to_token, blocks, width, classes)
        rows, columns = tokens_to_token.grid_size
        self.register_buffer("pos_embed", sinusoids(1 + rows * columns, width))
        draw_weights(self)


def sinusoids(tokens: int, width: int) -> Tensor:
    """(1, tokens, width): sines and cosines of each place at falling frequencies, one after the other."""
    rates = 10000.0 ** (-2 * (torch.arange(width) // 2) / width)
    angles = torch.arange(tokens)[:, None] * rates
    return torch.where(torch.arange(width) % 2 == 0, angles.sin(), angles.cos())[None]


def t2t_vit(
    shape: InputShape,
    *,
    width: int = 256,
    depth: int = 7,
    heads: int = 4,
    mlp: int | None = None,
    token_width: int = 64,
    tokens: Literal["performer", "transformer"] = "performer",
    patch: int | None = None,
) -> nn.Module:
    """A T2T-ViT; without options, the one that is published as T2T-ViT-7.

    mlp: width of the MLP's hidden layer; None: twice the model's.
    token_width: width of the tokens inside the tokens-to-token module.
    tokens: how these are mixed; T2T-ViT-14, 19 and 24 are published with both, as T2T-ViT_t with transformers.
    patch: side of a patch in pixels, as seen by the blocks; None: whatever gives about 8 × 8 patches.
    """
    check_heads(width, heads)
    if tokens not in ("performer", "transformer"):
        raise ParameterError(f"tokens is {tokens!r}; it must be 'performer' or 'transformer'.")
    module = TokensToToken(shape, fitting_patch(shape, patch), width, token_width, tokens)
    blocks: list[nn.Module] = [T2TBlock(width, heads, 2 * width if mlp is None else mlp) for _ in range(depth)]
    return T2TViT(module, blocks, width, shape.classes)
