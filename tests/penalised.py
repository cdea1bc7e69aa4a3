"""A small model with penalties, and what they are."""

from __future__ import annotations

import torch
from torch import nn

import attemper

RECIPE = "explicit(v=0.2, av=0.1, ff=0.4)"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.fc2(self.fc1(x).relu())


class Model(nn.Module):
    """Blocks and a head; `wrap` makes its output out of the logits."""

    def __init__(self, wrap=lambda logits: logits, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(8, 3)
        self.wrap = wrap

    def forward_features(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.wrap(self.head(self.forward_features(x).mean(1)))


def tokens(seed=0, samples=2):
    return torch.randn(samples, 5, 8, generator=torch.Generator().manual_seed(seed))


def criterion(out):
    return out.square().mean()


def tempered_model(recipe=RECIPE, wrap=lambda logits: logits, blocks=2, **options):
    model = Model(wrap, blocks).train()
    return model, attemper.apply(model, recipe, **options)


def expected(*seeds, recipe=RECIPE, blocks=2):
    """What the penalties of passes are, each taken by itself."""
    model, tempered = tempered_model(recipe, blocks=blocks)
    values = []
    for seed in seeds:
        out = model(tokens(seed))
        values.append(tempered.penalty().item())
        del out
    return sum(values)


def terms(tempered):
    return tempered.control.ledger.untaken()
