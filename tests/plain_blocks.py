"""Attention, an MLP and a block as most people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, TOKENS = 16, 2, 5


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int = 2 * WIDTH) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """x + attention, x + MLP; subclasses write it in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def model_of(kind: type[nn.Module], depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(depth))).train()
