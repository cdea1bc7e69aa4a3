"""A small detection transformer that learns from little data: every place of the feature map is a query.

As DETR (Carion et al., 2020, https://arxiv.org/abs/2005.12872) it has an encoder, a decoder and one box per query. What
makes DETR slow to train is left out: queries do not have to find out where they look. Each begins at one place of the
map, with what the encoder says there, and corrects its box from layer to layer, as in DAB-DETR (Liu et al., 2022,
https://arxiv.org/abs/2201.12329). The number and order of the queries are fixed, so that two passes can be compared.
"""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.models.vision_parts import FeedForward, as_tokens, check_heads
from attemper.lab.tasks.boxes.shape import BoxShape

FIRST_SIDE = 0.25
"""Sides of the box that a query begins with, in shares of the canvas."""
NOTHING_AT_FIRST = 3.0
"""The score of "no object" before training: most queries have none."""
HIDDEN = -30.0
"""The score of every class at a place that is padding, where that of "no object" is 0; finite, so that losses stay so.
Its box has no size, so that no object is matched with it."""


class ConvBlock(nn.Module):
    """Two convolutions round a skip connection, at half the resolution: (B, C, H, W) → (B, wide, H/2, W/2)."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(narrow, wide, 3, stride=2, padding=1, bias=False)
        self.norm1 = norm(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norm2 = norm(wide)
        self.skip = nn.Conv2d(narrow, wide, 2, stride=2)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        result: Tensor = self.act(out + self.skip(x))
        return result


def norm(width: int) -> nn.Module:
    """Of groups of channels: it knows no batch, so that processes that share one compute the same."""
    return nn.GroupNorm(math.gcd(8, width), width)


class Backbone(nn.Sequential):
    """(B, 3, S, S) → (B, width, S / stride, S / stride), stride a power of 2."""

    def __init__(self, width: int, stages: int, grid_size: tuple[int, int]) -> None:
        widths = [max(16, width >> (stages - 1 - stage)) for stage in range(stages)]
        widths[-1] = width
        first = [nn.Conv2d(3, widths[0], 3, stride=2, padding=1, bias=False), norm(widths[0]), nn.ReLU()]
        super().__init__(*first, *(ConvBlock(a, b) for a, b in itertools.pairwise(widths)))
        self.grid_size = grid_size


class EncoderLayer(nn.Module):
    """Pre-norm: places look at places."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = FeedForward(width, mlp)

    def forward(self, x: Tensor, places: Tensor, padding_mask: Tensor) -> Tensor:
        y = self.norm1(x)
        at = y + places
        x = x + self.self_attn(at, at, y, key_padding_mask=padding_mask, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm: queries look at each other, and then at the image."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = FeedForward(width, mlp)

    def forward(self, x: Tensor, at: Tensor, memory: Tensor, places: Tensor, padding_mask: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.self_attn(y + at, y + at, y, key_padding_mask=padding_mask, need_weights=False)[0]
        y = self.norm2(x) + at
        x = x + self.cross_attn(y, memory + places, memory, key_padding_mask=padding_mask, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.norm3(x))
        return out


class AnchorDetr(nn.Module):
    """Images (B, 4, S, S) → a dict: "logits" (B, queries, classes + 1), "boxes" (B, queries, 4), centres and sides.

    In training, "layers" (B, layers, queries, classes + 1 + 4) has the answers of all layers, the encoder's first.
    """

    num_prefix_tokens = 0

    def __init__(
        self, shape: BoxShape, *, width: int, heads: int, mlp: int, stages: int, encoder: int, decoder: int
    ) -> None:
        super().__init__()
        side = shape.size >> stages
        self.patch_embed = Backbone(width, stages, (side, side))
        self.input_norm = nn.LayerNorm(width)
        self.encoder_depth = encoder
        self.blocks = nn.ModuleList(
            [EncoderLayer(width, heads, mlp) for _ in range(encoder)]
            + [DecoderLayer(width, heads, mlp) for _ in range(decoder)]
        )
        self.cross_attention = f"blocks.{encoder + decoder - 1}.cross_attn"
        """Where queries look at the image."""
        self.memory_norm = nn.LayerNorm(width)
        self.query = nn.Parameter(torch.randn(width) * 0.02)
        self.query_norm = nn.LayerNorm(width)
        self.class_head = nn.Linear(width, shape.classes + 1)
        self.box_heads = nn.ModuleList(box_head(width) for _ in range(decoder + 1))
        self.anchors: Tensor
        self.register_buffer("anchors", anchors((side, side)), persistent=False)
        self.silence: Tensor
        self.register_buffer("silence", torch.tensor([*[HIDDEN] * shape.classes, 0.0]), persistent=False)
        nn.init.zeros_(self.class_head.bias)
        nn.init.constant_(self.class_head.bias[-1:], NOTHING_AT_FIRST)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        pixels, mask = images[:, :3], images[:, 3:]
        features = self.patch_embed(pixels * mask)
        covered = F.max_pool2d(mask, images.shape[-1] // features.shape[-1])
        return self.answers(as_tokens(features), (covered < 0.5).flatten(1))

    def answers(self, tokens: Tensor, padding_mask: Tensor) -> dict[str, Tensor]:
        """The same from the places of the feature map (B, N, width). padding_mask: which are padding, (B, N)."""
        width = tokens.shape[-1]
        boxes = self.anchors.expand(len(tokens), -1, -1)
        places = sinusoids(boxes[..., :2], width)
        x = self.input_norm(tokens)
        for layer in self.blocks[: self.encoder_depth]:
            x = layer(x, places, padding_mask)
        memory = self.memory_norm(x)
        found = [self.answer(memory, boxes, 0, padding_mask)]
        x = memory + self.query
        for number, layer in enumerate(self.blocks[self.encoder_depth :], 1):
            boxes = found[-1][..., -4:].detach().float()
            x = layer(x, sinusoids(boxes[..., :2], width).to(x.dtype), memory, places, padding_mask)
            found.append(self.answer(self.query_norm(x), boxes, number, padding_mask))
        last = found[-1]
        out = {"logits": last[..., :-4], "boxes": last[..., -4:]}
        return {**out, "layers": torch.stack(found, 1)} if self.training else out

    def answer(self, states: Tensor, boxes: Tensor, layer: int, padding_mask: Tensor) -> Tensor:
        """Scores, and boxes moved from where they were: (B, N, classes + 1 + 4)."""
        scores = torch.where(padding_mask[..., None], self.silence, self.class_head(states).float())
        moved = (logit(boxes) + self.box_heads[layer](states).float()).sigmoid()
        return torch.cat([scores, moved.masked_fill(padding_mask[..., None], 0.0)], -1)


def box_head(width: int) -> nn.Module:
    """Three layers, the last of which begins at zero, so that boxes stay where they are."""
    head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
    last: Any = head[-1]
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return head


def anchors(grid: tuple[int, int]) -> Tensor:
    """A box round the middle of every place: (1, rows · columns, 4)."""
    rows, columns = (torch.arange(count) for count in grid)
    y, x = torch.meshgrid((rows + 0.5) / grid[0], (columns + 0.5) / grid[1], indexing="ij")
    side = torch.full_like(x, FIRST_SIDE)
    return torch.stack([x, y, side, side], -1).flatten(0, 1)[None]


def sinusoids(points: Tensor, width: int) -> Tensor:
    """(…, 2) from 0 to 1 → (…, width): half of the channels for x and half for y, sines and cosines."""
    rates = 2 * math.pi * 100 ** -(torch.arange(width // 4, device=points.device) / (width // 4)) * 8
    angles = points[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)


def logit(x: Tensor) -> Tensor:
    """What `sigmoid` undoes."""
    x = x.clamp(1e-4, 1 - 1e-4)
    return (x / (1 - x)).log()


def anchor_detr(
    shape: BoxShape,
    *,
    width: int = 128,
    depth: int = 3,
    decoder: int | None = None,
    heads: int = 4,
    mlp: int | None = None,
    patch: int | None = None,
) -> nn.Module:
    """A small detection transformer for images without trained weights.

    depth: layers of the encoder, and of the decoder unless `decoder` says otherwise. mlp: width of the MLP's hidden
    layer; none: twice the width. patch: pixels of an image's side that become one place, and one query: a power of
    2; none: 16, or less where that would leave fewer than 6 × 6 places.
    """
    patch = patch_for(shape.size) if patch is None else patch
    check_heads(width, heads)
    if width % 8:
        raise ParameterError(f"width is {width}; it must be a multiple of 8, for the codes of places.")
    stages = patch.bit_length() - 1
    if patch != 2**stages or not 4 <= patch <= 64:
        raise ParameterError(f"patch is {patch}; it must be 4, 8, 16, 32 or 64.")
    if shape.size % patch:
        raise ParameterError(
            f"patch is {patch}; a canvas of {shape.size} × {shape.size} cannot be cut into such parts."
        )
    return AnchorDetr(
        shape,
        width=width,
        heads=heads,
        mlp=2 * width if mlp is None else mlp,
        stages=stages,
        encoder=depth,
        decoder=depth if decoder is None else decoder,
    )


def patch_for(size: int) -> int:
    """The largest power of 2 from 4 to 16 that cuts a side into 6 parts or more, and without a rest.

    >>> [patch_for(size) for size in (48, 96, 100, 256)]
    [8, 16, 4, 16]
    """
    return next((patch for patch in (16, 8) if size >= 6 * patch and size % patch == 0), 4)
