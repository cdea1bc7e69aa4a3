"""Tiles of one attention call: samples, heads and queries whose logits fit into a processor's cache.

The logits of a tile are made, weighed, multiplied with the values and forgotten, in forward and again in backward, so
that memory stays linear in the tokens and no pass over logits leaves the cache.
"""

import functools
import math
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

BUDGET = 256 * 1024
"""Logits of a tile, for each thread: a megabyte in float32."""


class Tile:
    """Some samples of all heads, or some heads of one sample, or some queries of one head; and the keys they may see.

    sizes: how many samples, heads, queries and keys. shape: (samples · heads, queries, keys), that of its logits.
    """

    __slots__ = ("first", "heads", "keys", "queries", "rows", "samples", "shape", "sizes", "slices", "whole")

    def __init__(
        self, samples: slice, heads: slice, queries: slice, keys: slice, of: tuple[int, int, int, int]
    ) -> None:
        self.samples, self.heads, self.queries, self.keys = samples, heads, queries, keys
        self.rows, self.slices = (samples, heads, queries), (samples, heads, queries, keys)
        b, h, q, k = (each.stop - each.start for each in self.slices)
        self.sizes, self.shape = (b, h, q, k), (b * h, q, k)
        self.first, self.whole = samples.start * of[1] + heads.start, (q == of[2], k == of[3])

    def of_queries(self, x: Tensor) -> Tensor:
        """(samples · heads, queries, e) of a tensor (B, H or 1, Nq, e), or of a flat one, (B · H, Nq, e)."""
        if x.dim() == 3:
            part = x.narrow(0, self.first, self.shape[0])
            return part if self.whole[0] else part[:, self.queries]
        part = x[self.samples, self.heads if x.shape[1] > 1 else slice(None), self.queries]
        if part.shape[1] != self.sizes[1]:
            part = part.expand(-1, self.sizes[1], -1, -1)
        return part.flatten(0, 1)

    def of_keys(self, x: Tensor) -> Tensor:
        """(samples · heads, keys, e) of a tensor (B, H, Nk, e), or of a flat one, (B · H, Nk, e)."""
        if x.dim() == 3:
            part = x.narrow(0, self.first, self.shape[0])
            return part if self.whole[1] else part[:, self.keys]
        return x[self.samples, self.heads, self.keys].flatten(0, 1)

    def of_logits(self, x: Tensor) -> Tensor:
        """(samples or 1, heads or 1, queries or 1, keys or 1) of a tensor that broadcasts to (B, H, Nq, Nk)."""
        return x[tuple(slice(None) if size == 1 else each for size, each in zip(x.shape, self.slices, strict=True))]


@dataclass(frozen=True)
class Tiling:
    """How a call of (B, H, Nq, Nk) is cut.

    ahead: with causal attention, how many keys the first query sees beyond key 0; None where all see all.
    """

    shape: tuple[int, int, int, int]
    step: tuple[int, int, int]
    ahead: int | None

    @property
    def repeats_keys(self) -> bool:
        """Whether the same keys occur in several tiles, or some keys in none."""
        return self.step[2] < self.shape[2] or self.ahead is not None

    @property
    def elements(self) -> int:
        """The logits of the largest tile."""
        return self.rows * self.shape[3]

    @property
    def rows(self) -> int:
        """The rows of the largest tile."""
        return math.prod(self.step)

    @functools.cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """In their order."""
        batch, heads, queries, keys = self.shape
        found = []
        for b in range(0, batch, self.step[0]):
            for h in range(0, heads, self.step[1]):
                for q in range(0, queries, self.step[2]):
                    end = min(q + self.step[2], queries)
                    seen = keys if self.ahead is None else max(1, min(keys, end + self.ahead))
                    samples, some = slice(b, min(b + self.step[0], batch)), slice(h, min(h + self.step[1], heads))
                    found.append(Tile(samples, some, slice(q, end), slice(0, seen), self.shape))
        return tuple(found)


def tiling(shape: tuple[int, int, int, int], ahead: int | None = None) -> Tiling:
    """Tiles for the threads of this process.

    >>> tiling((1, 1, 4, 4)).tiles[0].sizes
    (1, 1, 4, 4)
    """
    return cut(shape, ahead, BUDGET * torch.get_num_threads())


@functools.lru_cache(maxsize=64)
def cut(shape: tuple[int, int, int, int], ahead: int | None, budget: int) -> Tiling:
    """Tiles of `budget` logits at most, if a row has no more, evenly large.

    >>> [tile.sizes for tile in cut((2, 4, 10, 10), None, 200).tiles]
    [(1, 2, 10, 10), (1, 2, 10, 10), (1, 2, 10, 10), (1, 2, 10, 10)]
    """
    batch, heads, queries, keys = shape
    if heads * queries * keys <= budget:
        return Tiling(shape, (_even(batch, budget // (heads * queries * keys)), heads, queries), ahead)
    if queries * keys <= budget:
        return Tiling(shape, (1, _even(heads, budget // (queries * keys)), queries), ahead)
    return Tiling(shape, (1, 1, _even(queries, max(1, budget // keys))), ahead)


def _even(many: int, most: int) -> int:
    """The size of the parts if `many` are split into as few as can be, of `most` each at most, evenly."""
    return -(-many // -(-many // most))


def empty(*shape: int) -> Tensor:
    """Memory for numbers of a tile, whatever torch's defaults for new tensors are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def zeros(*shape: int) -> Tensor:
    """The same, of zeros."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


class Workspace(threading.local):
    """Memory for tiles, which the calls of a thread share: new memory the system must first give, page by page."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def buffers(self, elements: int, many: int) -> list[Tensor]:
        """So many float32 tensors of at least so many elements each. What they held is lost."""
        if elements > 2 * BUDGET * torch.get_num_threads():
            return [empty(elements) for _ in range(many)]
        if any(memory.numel() < elements for memory in self._memory):
            self._memory = []
        with torch.inference_mode(False):  # what is made there could not be written to in training
            while len(self._memory) < many:
                self._memory.append(empty(elements))
        return self._memory[:many]


WORKSPACE = Workspace()


def flat(x: Tensor) -> Tensor:
    """(B · H, N, e) of a tensor (B, H, N, e), where that is a view of it, so that tiles are cut from it quickly."""
    return x.view(-1, *x.shape[2:]) if x.is_contiguous() else x


def shaped(buffers: list[Tensor], shape: tuple[int, ...]) -> list[Tensor]:
    """The first elements of each, in this shape."""
    count = math.prod(shape)
    return [memory[:count].view(shape) for memory in buffers]
