"""The random stream: which keys a call drops, as a pure function of (seed, site, call, sample, head, query, key).

Everything is 32-bit integer arithmetic, so that eager torch, compiled torch, Triton and CuTe kernels compute the same
bits. A mask element is kept where

    int32(row_word * column_word mod 2**32) >= threshold(p),

with one odd word per row (sample, head, query) and one per key, both fully mixed and made outside of a kernel's inner
loop. Inside of it an element costs one multiply and one compare.

A 64-bit seed, the site in the model, the number of the call there and a small *lane* number start a stream, and its
start has 64 bits, too. The methods composed in one call use lanes 0, 1, 2 …, so they never share their randomness.
"""

import functools
import hashlib
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.ops.quick_words import quick_columns, quick_rows
from attemper.ops.seeds import seed_tensor
from attemper.ops.stream_constants import COLUMN_SALT, HEAD_STEP, MASK, MIX_1, MIX_2, QUERY_STEP, STEP
from attemper.ops.tracing import constant

LANES = 256
"""How many lanes a call has."""


class Offsets(NamedTuple):
    """Where a call stands in a larger one of which it is a part: added to the numbers of its rows and keys.

    heads: how many heads the larger one has; 0: those of the call. Only methods that count heads ask.
    keys: how many keys the rows of the larger one have; 0: those up to the last one of the call.
    """

    sample: int = 0
    head: int = 0
    query: int = 0
    key: int = 0
    heads: int = 0
    keys: int = 0

    def splits_rows(self, keys: int) -> bool:
        """Whether a call with this many keys has only a part of the keys of its rows."""
        return self.key != 0 or self.keys > keys


NOWHERE = Offsets()


def checked(at: Offsets) -> Offsets:
    """The same offsets, if they are numbers from 0 up to 2³¹; an error otherwise."""
    for name, value in zip(Offsets._fields, at, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise ParameterError(f"at.{name} must be an int, got {value!r}")
        if not 0 <= value < 2**31:
            raise ParameterError(f"at.{name} must be from 0 up to 2³¹ − 1, got {value}")
    return at


def causal_mask(queries: int, keys: int, at: Offsets, device: torch.device) -> Tensor:
    """Boolean (queries, keys): whether a key comes no later than the query, both numbered as in the larger call.

    >>> causal_mask(1, 4, Offsets(query=2), torch.device("cpu")).tolist()
    [[True, True, True, False]]
    """
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(at.query - at.key)


class Source(NamedTuple):
    """Where the streams of one call start.

    seed: 0-dim int64; site: `site_word` of the place in the model; call: how often that place drew before in this pass.
    """

    seed: Tensor
    site: int = 0
    call: int = 0
    at: Offsets = NOWHERE

    def stream(self, lane: int = 0) -> "Stream":
        """The stream of one of the call's methods."""
        return Stream(self.seed, lane, site=self.site, call=self.call, at=self.at)


def seed_of_call(seed: Tensor, site: int, call: int) -> Tensor:
    """The seed with which a first call without a site draws what this call of a site draws with the given one."""
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    first = mix(low + signed(STEP))
    other = first ^ site
    high = unmix((mix(high ^ first) ^ site) + call * LANES) ^ other
    low = unmix(other) - signed(STEP)
    return (high.to(torch.int64) << 32) | (low.to(torch.int64) & MASK)


class Site:
    """A place in a model where random numbers are drawn.

    word: `site_word` of its name. tensor: the same as a 0-dim int64 tensor on the CPU, which compiled code takes as an
    input: it would hold on to a number, and blocks of one kind could not share their graph.
    """

    def __init__(self, name: str = "") -> None:
        self.word = site_word(name)
        self.tensor = torch.tensor(self.word, dtype=torch.int64, device="cpu")


@constant  # a digest cannot be traced
def site_word(name: str) -> int:
    """The word that stands for a site where streams start: 32 bits of a digest of its name, as a signed number.

    >>> site_word("")
    0
    """
    if not name:
        return 0
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little", signed=True)


def signed(word: int) -> int:
    """A 32-bit word as the signed number that an int32 tensor holds.

    >>> signed(0xFFFFFFFF)
    -1
    """
    return (word & MASK ^ 0x80000000) - 0x80000000


def all_signed(words: tuple[int, ...]) -> tuple[int, ...]:
    """Several of them.

    >>> all_signed((1, 0xFFFFFFFF))
    (1, -1)
    """
    if min(words) >= -0x80000000 and max(words) <= 0x7FFFFFFF:
        return words
    return tuple(signed(word) for word in words)


def mix(x: Tensor) -> Tensor:
    """A bijection of int32 words in which every input bit moves every output bit (two multiply rounds)."""
    x = (x ^ (x >> 16 & 0xFFFF)) * MIX_1
    x = (x ^ (x >> 15 & 0x1FFFF)) * signed(MIX_2)
    return x ^ (x >> 16 & 0xFFFF)


def unmix(x: Tensor) -> Tensor:
    """The words that `mix` made these of."""
    x = (x ^ (x >> 16 & 0xFFFF)) * signed(pow(MIX_2, -1, 2**32))
    x = (x ^ (x >> 15 & 0x1FFFF) ^ (x >> 30 & 0x3)) * signed(pow(MIX_1, -1, 2**32))
    return x ^ (x >> 16 & 0xFFFF)


def mix_word(x: int) -> int:
    """The same for a number."""
    x &= MASK
    x = (x ^ x >> 16) * MIX_1 & MASK
    x = (x ^ x >> 15) * MIX_2 & MASK
    return x ^ x >> 16


class Words(NamedTuple):
    """The 64 bits that rows, or columns, start from: two int32 tensors, or two numbers in the range of int32."""

    a: Tensor | int
    b: Tensor | int


def stream_words(seed: Tensor, lane: int = 0, site: int = 0, call: int = 0) -> tuple[Words, Words]:
    """What starts a stream: one pair of words for its rows, one for its columns.

    seed: 0-dim int64 tensor, all 64 bits used. Two seeds never give the same start at one site, call and lane; nor do
        two sites, calls or lanes with one seed, as long as the words of the sites differ.
    lane: which of the call's methods draws; site, call: see `Source`.
    """
    path = call * LANES + lane
    if _is_readable(seed):  # some dozens of operations on a single number are faster in Python
        number = int(seed)
        t = mix_word(number + STEP)  # mix leaves 0 as it is, and 0 is a popular seed
        a = mix_word((mix_word(number >> 32 ^ t) ^ site & MASK) + path)
        b = mix_word((t ^ site & MASK) + a)
        c = mix_word(a ^ COLUMN_SALT)
        return Words(signed(a), signed(b)), Words(signed(c), signed(mix_word(b + c)))
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    first = mix(low + signed(STEP))
    rows = mix((mix(high ^ first) ^ site) + path)
    other = mix((first ^ site) + rows)
    columns = mix(rows ^ signed(COLUMN_SALT))
    return Words(rows, other), Words(columns, mix(other + columns))


def _is_readable(seed: Tensor) -> bool:
    """Whether the value of a seed can be had at once, without waiting for a device or breaking a trace."""
    if torch.compiler.is_compiling() or type(seed) is not Tensor or seed.device.type != "cpu":
        return False
    return not torch._C._are_functorch_transforms_active()


def _counted(many: int, first: int, device: torch.device) -> Tensor:
    """first … first + many − 1."""
    return torch.arange(many, device=device) + first


def _times(numbers: Tensor, step: int) -> Tensor:
    """Counters times an odd step, modulo 2**32, as int32.

    In int64, where no product overflows: a C++ compiler takes it for granted that counters in int32 do not, and has
    loops that Inductor wrote run past their end. By the signed step, which is the same modulo 2**32: on a GPU Inductor
    writes the product with counters in int32, where a step of 2**31 or more does not compile.
    """
    return (numbers.to(torch.int64) * signed(step) & MASK).to(torch.int32)


def row_words(start: Words, shape: tuple[int, int, int], at: Offsets, device: torch.device) -> Tensor:
    """(samples, heads, queries) odd int32 words; at: of the first of them."""
    samples, heads, queries = shape
    sample, head = _counted(samples, at.sample, device)[:, None, None], _counted(heads, at.head, device)[:, None]
    return words_of_rows(start, sample, head, _counted(queries, at.query, device))


def words_of_rows(start: Words, sample: Tensor, head: Tensor, query: Tensor) -> Tensor:
    """One odd int32 word for each row, from its numbers: integer tensors that broadcast."""
    sample = mix(_times(sample, STEP) + start.a)
    head = mix((sample ^ start.b) + _times(head, HEAD_STEP))
    return mix(mix(head + _times(query, QUERY_STEP)) ^ sample) | 1


def column_words(start: Words, keys: int, first: int, device: torch.device) -> Tensor:
    """(keys,) odd int32 words."""
    return words_of_columns(start, _counted(keys, first, device))


def words_of_columns(start: Words, key: Tensor) -> Tensor:
    """One odd int32 word for each key, from its number."""
    return mix(mix(_times(key, STEP) + start.a) ^ start.b) | 1


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
    """One method's randomness in one call.

    seed, lane, site, call: where it starts; kernels take these and mix the words themselves.
    at: the numbers of the first sample, head, query and key.
    """

    def __init__(self, seed: Tensor, lane: int = 0, *, site: int = 0, call: int = 0, at: Offsets = NOWHERE) -> None:
        self.seed, self.lane, self.site, self.call, self.at = seed, lane, site, call, at
        self._words: tuple[Words, Words] | None = None

    @property
    def path(self) -> int:
        """The number of the call and the lane, in one number."""
        return self.call * LANES + self.lane

    @property
    def rows(self) -> Words:
        return self._start()[0]

    @property
    def columns(self) -> Words:
        return self._start()[1]

    def _start(self) -> tuple[Words, Words]:
        if self._words is None:  # a few dozen small operations, spared where a kernel does them
            self._words = stream_words(self.seed, self.lane, self.site, self.call)
        return self._words

    def placed(self, at: Offsets) -> "Stream":
        """The same stream, read from another place."""
        other = Stream(self.seed, self.lane, site=self.site, call=self.call, at=at)
        other._words = self._words
        return other

    def for_all_heads(self) -> "Stream":
        """What every head of a sample draws alike, wherever the call stands: the stream of head 0."""
        return self.placed(self.at._replace(head=0))

    def for_all_queries(self) -> "Stream":
        """The same for queries: the stream of query 0."""
        return self.placed(self.at._replace(query=0))

    def products(self, batch: int, heads: int, queries: int, keys: int) -> Tensor:
        """(batch, heads, queries, keys) int32 words, uniform over the odd numbers."""
        return self.row_words(batch, heads, queries)[..., None] * self.column_words(keys)

    def row_words(self, batch: int, heads: int, queries: int) -> Tensor:
        """(batch, heads, queries) odd int32 words."""
        if self.is_quick:
            return quick_rows(self.rows, (batch, heads, queries), self.at)
        return row_words(self.rows, (batch, heads, queries), self.at, self.seed.device)

    def column_words(self, keys: int) -> Tensor:
        """(keys,) odd int32 words."""
        if self.is_quick:
            return quick_columns(self.columns, keys, self.at.key)
        return column_words(self.columns, keys, self.at.key, self.seed.device)

    @property
    def is_quick(self) -> bool:
        """Whether words may come from numpy: on a CPU, where nobody has to see the operations."""
        return _is_readable(self.seed) and torch._C._len_torch_dispatch_stack() == 0

    def keep(self, shape: Sequence[int], p: float) -> Tensor:
        """Boolean tensor of `shape` (batch, heads, queries, keys): True with probability 1 − p."""
        if self.seed.is_meta:
            return torch.empty(tuple(shape), dtype=torch.bool, device="meta")
        if self._has_kernels():
            kept: Tensor = _kernels().keep(self, shape, p)
            return kept
        batch, heads, queries, keys = shape
        return self.products(batch, heads, queries, keys) >= live_threshold(p, self.seed.device)

    def _has_kernels(self) -> bool:
        return not torch.compiler.is_compiling() and self.seed.is_cuda and _kernels().serves(self.seed)

    def uniform(self) -> Tensor:
        """One number in [0, 1), float64 and 0-dim, wherever the call stands."""
        if self._has_kernels():
            number: Tensor = _kernels().uniform(self)
            return number
        word = self.placed(NOWHERE).row_words(1, 1, 1)[0, 0, 0]
        return (word.to(torch.int64) & MASK).to(torch.float64) / 2**32

    def scores(self, batch: int, heads: int, keys: int) -> Tensor:
        """(batch, heads, keys) words to sort keys by: each order of the keys is equally likely."""
        words = self.for_all_queries().products(batch, heads, 1, keys).squeeze(2)
        return mix(words).to(torch.int64) & MASK


@functools.cache
def _kernels() -> ModuleType:
    """Found by name, so that no import leads to GPU code."""
    return importlib.import_module("attemper.kernels.masks")


def keep_mask(
    seed: int | Tensor,
    shape: Sequence[int],
    p: float,
    *,
    lane: int = 0,
    site: str = "",
    call: int = 0,
    at: Offsets = NOWHERE,
    device: torch.device | str | None = None,
) -> Tensor:
    """The keys that `DropKey(p)` keeps in a call of this seed: boolean, True = kept.

    seed: an int, or a 0-dim int64 tensor (the mask is then made on its device).
    shape: (batch, heads, queries, keys).
    p: the probability of dropping, 0 ≤ p < 1.
    lane: the position of the method among those composed in the call.
    site, call: in a tempered model, whose pass drew the seed, the name of the attention module and the number of the
        call there; a call of `attemper.attention` has neither.
    at: where the call stands in a larger one of which it is a part.

    >>> keep_mask(0, (1, 1, 2, 4), 0.5).shape
    torch.Size([1, 1, 2, 4])
    >>> bool(keep_mask(7, (2, 3, 5, 5), 0.0).all())
    True
    >>> whole = keep_mask(7, (4, 3, 5, 5), 0.5)
    >>> bool((keep_mask(7, (2, 3, 5, 5), 0.5, at=Offsets(sample=2)) == whole[2:]).all())
    True
    """
    if len(shape) != 4 or min(shape) < 0:
        raise ValueError(f"shape must be four sizes (batch, heads, queries, keys), got {tuple(shape)}")
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")
    return Stream(seed_tensor(seed, device), lane, site=site_word(site), call=call, at=checked(at)).keep(shape, p)
