"""What models of questions take: an image and the words of a question, side by side in one row of numbers."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from attemper.lab.tasks.vocabulary import BEGIN, MARKS, PADDING

PER_WORD = 2
"""Bytes of a word's number where it is stored beside pixels."""
MOST_WORDS = 256**PER_WORD


@dataclasses.dataclass(frozen=True)
class QuestionShape:
    """Images with questions in, scores of answers out.

    words: size of the vocabulary, marks included. length: tokens of a question, the mark before it included.
    """

    channels: int
    height: int
    width: int
    words: int
    length: int
    classes: int

    def __str__(self) -> str:
        return (
            f"{self.channels} × {self.height} × {self.width} with {self.length} tokens of {self.words:,} words, and of "
            f"{self.classes:,} answers"
        )

    @property
    def pixels(self) -> int:
        """Numbers of an image."""
        return self.channels * self.height * self.width

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        """Images of noise, questions of random words and lengths, one answer each."""
        images = torch.randn(samples, self.channels, self.height, self.width)
        words = torch.randint(len(MARKS), self.words + 1, (samples, self.length)) % self.words
        ends = torch.randint(2, self.length + 1, (samples, 1)) if self.length > 1 else torch.ones(samples, 1)
        words = words.masked_fill(torch.arange(self.length) >= ends, PADDING)
        words[:, 0] = BEGIN
        answers = torch.arange(samples) % self.classes
        return self.join(images, words), torch.nn.functional.one_hot(answers, self.classes).float()

    def join(self, images: Tensor, words: Tensor) -> Tensor:
        """float32 (B, C, H, W) and int64 (B, length) → (B, C · H · W + length), float32: it can hold each."""
        return torch.cat([images.flatten(1), words.to(images.dtype)], 1)

    def parted(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What `join` has put together."""
        images, words = inputs.split([self.pixels, self.length], 1)
        return images.unflatten(1, (self.channels, self.height, self.width)), words.round().long()

    def store(self, images: Tensor, words: Tensor) -> Tensor:
        """uint8 (B, C, H, W) and int32 (B, length) → uint8 (B, C · H · W + 2 · length)."""
        low, high = words % 256, words // 256
        return torch.cat([images.flatten(1), torch.stack([low, high], -1).flatten(1).to(torch.uint8)], 1)

    def stored(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What `store` has put together: uint8 images and int64 words."""
        images, words = rows.split([self.pixels, PER_WORD * self.length], 1)
        low, high = words.long().unflatten(1, (self.length, PER_WORD)).unbind(-1)
        return images.unflatten(1, (self.channels, self.height, self.width)), low + 256 * high


def grid_of(shape: QuestionShape, patch: int) -> tuple[int, int]:
    """Rows and columns of patches."""
    return math.floor(shape.height / patch), math.floor(shape.width / patch)
