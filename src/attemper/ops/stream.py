"""The random stream: which keys a call drops, as a pure function of (seed, sample, head, query, key).

Everything is 32-bit integer arithmetic, so that eager torch, compiled torch, Triton and CuTe kernels compute the same
bits. A mask element is kept where

    int32(row_word * column_word mod 2**32) >= threshold(p),

with one odd word per row (sample, head, query), fully mixed and hoisted out of a kernel's inner loop, and one odd word
per key, mixed by a single xor-shift-multiply. Inside the loop an element costs one multiply and one compare.

A 64-bit seed and a small *lane* number start a stream. The methods composed in one call use lanes 0, 1, 2 …, so they
never share their randomness.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attemper.ops.seeds import seed_tensor

MASK = 0xFFFFFFFF
STEP = 0x9E3779B9  # 2**32 / golden ratio, odd: neighbouring counters land far apart
QUERY_STEP = 0x85EBCA6B
LANE_STEP = 0x632BE5AB
COLUMN_SALT = 0x5BD1E995
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B


def _multiply(a: Tensor, b: int) -> Tensor:
    """a · b mod 2**32 for int64 tensors holding 32-bit values, without leaving the range where int64 is exact."""
    return ((((a >> 16) * b & 0xFFFF) << 16) + (a & 0xFFFF) * b) & MASK


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every input bit moves every output bit (two multiply rounds)."""
    x = _multiply(x ^ (x >> 16), MIX_1)
    x = _multiply(x ^ (x >> 15), MIX_2)
    return x ^ (x >> 16)


def stream_words(seed: Tensor, lane: int = 0) -> tuple[Tensor, Tensor]:
    """The two words that start a stream: one for its rows, one for its columns.

    seed: 0-dim int64 tensor, all 64 bits used; lane: which of the call's methods draws.
    """
    low, high = seed & MASK, (seed >> 32) & MASK
    rows = mix(mix((low + lane * LANE_STEP) & MASK) ^ high)
    return rows, mix(rows ^ COLUMN_SALT)


def row_words(start: Tensor, heads: int, queries: int) -> Tensor:
    """(heads, queries) odd words; `heads` counts sample · H + head over the whole call."""
    device = start.device
    head = torch.arange(heads, device=device)
    query = torch.arange(queries, device=device)
    head_words = mix((start + _multiply(head, STEP)) & MASK)
    return mix((head_words[:, None] + _multiply(query, QUERY_STEP)) & MASK) | 1


def column_words(start: Tensor, keys: int) -> Tensor:
    """(keys,) odd words, mixed lightly enough to be recomputed inside a kernel."""
    x = (start + _multiply(torch.arange(keys, device=start.device), STEP)) & MASK
    return _multiply(x ^ (x >> 16), MIX_1) | 1


def threshold(p: float) -> int:
    """The smallest signed 32-bit product that is kept, so that a share p of all products lies below it.

    >>> threshold(0.0), threshold(0.5)
    (-2147483648, 0)
    """
    return min(round(p * 2**32), MASK) - 2**31


def live_threshold(p: float, device: torch.device) -> int | Tensor:
    """`threshold(p)`, in a form that a compiler does not have to specialise on.

    As tensor arithmetic the rate stays a number that the graph takes in: blocks that differ in nothing but their rate
    share one compiled graph, and a live change of the rate compiles nothing anew.
    """
    if not torch.compiler.is_compiling():
        return threshold(p)
    one = torch.ones((), dtype=torch.float64, device=device)
    return ((one * p * 2**32).round().clamp(max=MASK) - 2**31).to(torch.int32)


class Stream:
    """One method's randomness in one attention call.

    seed, lane: where it starts; kernels take these and mix the words themselves.
    """

    def __init__(self, seed: Tensor, lane: int = 0) -> None:
        self.seed, self.lane = seed, lane
        self._words: tuple[Tensor, Tensor] | None = None

    @property
    def rows(self) -> Tensor:
        return self._start()[0]

    @property
    def columns(self) -> Tensor:
        return self._start()[1]

    def _start(self) -> tuple[Tensor, Tensor]:
        if self._words is None:  # a few dozen small operations, spared where a kernel does them
            self._words = stream_words(self.seed, self.lane)
        return self._words

    def products(self, batch: int, heads: int, queries: int, keys: int) -> Tensor:
        """(batch, heads, queries, keys) int32 words, uniform over the odd numbers."""
        rows = row_words(self.rows, batch * heads, queries).to(torch.int32)
        columns = column_words(self.columns, keys).to(torch.int32)
        return (rows[..., None] * columns).view(batch, heads, queries, keys)

    def keep(self, shape: Sequence[int], p: float) -> Tensor:
        """Boolean tensor of `shape` (batch, heads, queries, keys): True with probability 1 − p."""
        if self.seed.is_meta:
            return torch.empty(tuple(shape), dtype=torch.bool, device="meta")
        batch, heads, queries, keys = shape
        return self.products(batch, heads, queries, keys) >= live_threshold(p, self.seed.device)

    def uniform(self) -> Tensor:
        """One number in [0, 1), float64 and 0-dim."""
        return row_words(self.rows, 1, 1)[0, 0].to(torch.float64) / 2**32

    def scores(self, batch: int, heads: int, keys: int) -> Tensor:
        """(batch, heads, keys) words to sort keys by: each order of the keys is equally likely."""
        words = self.products(batch, heads, 1, keys).squeeze(2).to(torch.int64) & MASK
        return mix(words)


def keep_mask(
    seed: int | Tensor, shape: Sequence[int], p: float, *, lane: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """The keys that `DropKey(p)` keeps in a call of this seed: boolean, True = kept.

    seed: an int, or a 0-dim int64 tensor (the mask is then made on its device).
    shape: (batch, heads, queries, keys).
    p: the probability of dropping, 0 ≤ p < 1.
    lane: the position of the method among those composed in the call.

    >>> keep_mask(0, (1, 1, 2, 4), 0.5).shape
    torch.Size([1, 1, 2, 4])
    >>> bool(keep_mask(7, (2, 3, 5, 5), 0.0).all())
    True
    """
    if len(shape) != 4 or min(shape) < 0:
        raise ValueError(f"shape must be four sizes (batch, heads, queries, keys), got {tuple(shape)}")
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")
    return Stream(seed_tensor(seed, device), lane).keep(shape, p)
