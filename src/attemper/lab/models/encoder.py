"""The transformer encoder that the papers put on sequences of features: audio tokens, steps of a video."""

from typing import Literal

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.tasks.base import SequenceShape


class SequenceEncoder(nn.Module):
    """Features, class token, positions, blocks, the class token's classes: (B, N, features) → (B, classes)."""

    def __init__(
        self,
        shape: SequenceShape,
        *,
        width: int,
        depth: int,
        heads: int,
        mlp: int,
        token: Literal["first", "last"],
        norm_first: bool,
        activation: Literal["gelu", "relu"],
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(shape.features, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        # As strong as the embedding of normalised features: fainter, most of a short training goes into finding them.
        self.positions = nn.Parameter(torch.randn(1, shape.tokens + 1, width) * 3**-0.5)
        self.where = 0 if token == "first" else -1

        def block() -> nn.TransformerEncoderLayer:
            return nn.TransformerEncoderLayer(
                width, heads, mlp, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
            )

        # Without nested tensors, which every mask-free call would pass by anyway and norm_first warns about.
        self.blocks = nn.TransformerEncoder(block(), depth, enable_nested_tensor=False)
        self.blocks.layers = nn.ModuleList(block() for _ in range(depth))  # it copies one block: equal initial weights
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.head = nn.Linear(width, shape.classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens, token = self.embed(x), self.token.expand(len(x), -1, -1)
        tokens = torch.cat([token, tokens] if self.where == 0 else [tokens, token], dim=1)
        tokens = self.blocks(tokens + self.positions)
        out: Tensor = self.head(self.norm(tokens[:, self.where]))
        return out


def encoder(
    shape: SequenceShape,
    *,
    width: int = 256,
    depth: int = 2,
    heads: int = 8,
    mlp: int | None = None,
    token: Literal["first", "last"] = "first",
    norm_first: bool = True,
    activation: Literal["gelu", "relu"] = "gelu",
) -> nn.Module:
    """A `torch.nn.TransformerEncoder` over feature vectors, with a class token and learnt positions, without dropout.

    mlp: width of the MLP's hidden layer; None: as wide as the model, as the papers have it.
    token: whether the class token stands before the features or after them.
    norm_first: whether blocks normalise what goes into a branch, or the sum that comes out.

    >>> model = encoder(SequenceShape(tokens=12, features=40, classes=10), width=32, heads=4)
    >>> model(torch.randn(2, 12, 40)).shape
    torch.Size([2, 10])
    """
    if width % heads:
        raise ParameterError(f"width is {width} and heads is {heads}; the width must be a multiple of the heads.")
    if token not in ("first", "last"):
        raise ParameterError(f"token is {token!r}; it must be 'first' or 'last'.")
    if activation not in ("gelu", "relu"):
        raise ParameterError(f"activation is {activation!r}; it must be 'gelu' or 'relu'.")
    return SequenceEncoder(
        shape,
        width=width,
        depth=depth,
        heads=heads,
        mlp=width if mlp is None else mlp,
        token=token,
        norm_first=norm_first,
        activation=activation,
    )
