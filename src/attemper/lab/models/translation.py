"""An encoder–decoder for translation, built on torch's own layers. Vaswani et al., Attention Is All You Need, 2017."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.tasks.text import TextShape
from attemper.lab.tasks.vocabulary import BEGIN, END, PADDING


class Positions(nn.Module):
    """Adds to every token a code of its position: sines and cosines, or a learnt vector."""

    def __init__(self, length: int, width: int, learnt: bool) -> None:
        super().__init__()
        table = sinusoids(length, width)
        self.table: Tensor
        if learnt:
            self.table = nn.Parameter(torch.randn_like(table) * table.std())
        else:
            self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width): at place n, sin and cos of n · 10000^(−2i/width) for every i < width/2."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


class Seq2Seq(nn.Module):
    """Source and target side by side (B, S + T) → logits of every next word (B, T, words). Pre-norm, no dropout.

    Target padding needs no mask: it stands behind the words, and no word looks at what comes after it.
    """

    def __init__(
        self, shape: TextShape, *, width: int, depth: int, heads: int, mlp: int, learnt: bool, tied: bool
    ) -> None:
        super().__init__()
        self.shape, self.scale = shape, math.sqrt(width)
        self.source_words = nn.Embedding(shape.source_words, width, padding_idx=PADDING)
        self.target_words = nn.Embedding(shape.target_words, width, padding_idx=PADDING)
        self.source_positions = Positions(shape.source, width, learnt)
        self.target_positions = Positions(shape.target, width, learnt)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, mlp, **options),
            depth,
            nn.LayerNorm(width),
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(width, heads, mlp, **options), depth, nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, shape.target_words, bias=False)
        self.init_weights()
        if tied:
            self.head.weight = self.target_words.weight

    def init_weights(self) -> None:
        """Xavier for every matrix: torch's stacks are copies of one layer, which would all start alike."""
        for stack in (self.encoder, self.decoder):
            for parameter in stack.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)
        for table in (self.source_words, self.target_words):
            nn.init.normal_(table.weight, std=1 / self.scale)
            nn.init.zeros_(table.weight[PADDING])
        nn.init.normal_(self.head.weight, std=1 / self.scale)

    def forward(self, tokens: Tensor) -> Tensor:
        source, target = tokens.split([self.shape.source, self.shape.target], 1)
        out: Tensor = self.head(self.decode(target, self.encode(source), source))
        return out

    def encode(self, source: Tensor) -> Tensor:
        """Words of the source (B, S), padded → their memory (B, S, width)."""
        x = self.source_positions(self.source_words(source) * self.scale)
        memory: Tensor = self.encoder(x, src_key_padding_mask=source == PADDING)
        return memory

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        """Words given of the target (B, t), memory and words of the source → states (B, t, width)."""
        x = self.target_positions(self.target_words(target) * self.scale)
        places = torch.arange(target.shape[1], device=target.device)
        later = places > places[:, None]
        # The hint is given, since torch would otherwise compare the mask with the causal one, and wait for the answer.
        states: Tensor = self.decoder(
            x, memory, tgt_mask=later, memory_key_padding_mask=source == PADDING, tgt_is_causal=True
        )
        return states

    @torch.no_grad()
    def translate(self, source: Tensor) -> Tensor:
        """Words of the source (B, S), padded → the likeliest word at each place (B, at most T), padded behind the end.

        Whatever else is in the batch, and however far a sentence is padded, its translation is the same.
        """
        memory = self.encode(source)
        words = source.new_full((len(source), 1), BEGIN)
        over = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        for _ in range(self.shape.target):
            states = self.decode(words, memory, source)
            chosen = self.head(states[:, -1]).argmax(-1).masked_fill(over, PADDING)
            words = torch.cat([words, chosen[:, None]], 1)
            over |= chosen == END
            if over.all():
                break
        return words[:, 1:]


def seq2seq(
    shape: TextShape,
    *,
    width: int = 512,
    depth: int = 6,
    heads: int = 8,
    mlp: int | None = None,
    positions: Literal["sinusoidal", "learnt"] = "sinusoidal",
    tied: bool = True,
) -> nn.Module:
    """An encoder and a decoder of `depth` layers each.

    mlp: width of the MLP's hidden layer; None: four times the width.
    tied: whether scores of words come from the same table as the decoder's input words.
    """
    if width % heads:
        raise ParameterError(f"width is {width} and heads is {heads}; the width must be a multiple of the heads.")
    if width % 2:
        raise ParameterError(f"width is {width}; it must be even, since positions are pairs of a sine and a cosine.")
    if positions not in ("sinusoidal", "learnt"):
        raise ParameterError(f"positions is {positions!r}; it must be 'sinusoidal' or 'learnt'.")
    return Seq2Seq(
        shape,
        width=width,
        depth=depth,
        heads=heads,
        mlp=4 * width if mlp is None else mlp,
        learnt=positions == "learnt",
        tied=tied,
    )
