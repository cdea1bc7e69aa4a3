"""Tile sizes for the kernels, as measured on an H200, and which sizes become compile-time constants.

A cap on the registers of a thread buys more programs per multiprocessor for a few spills.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STATIC_TOKENS = 1024
STATIC_SHAPES = 4
WHOLE_KEYS = 256
FEW = 8
SLOTS = 32
WHOLE_TILE = 64
WHOLE_TOKENS = {32: 128, 64: 80}
"""Head width → how many tokens one program can hold."""

_seen: dict[tuple[Any, ...], set[tuple[int, int]]] = {}


@dataclass(frozen=True)
class ForwardPlan:
    """m queries × n keys per tile; `fixed`: sweep with a fixed offset first (see `forward.py`)."""

    m: int
    n: int
    warps: int
    stages: int
    registers: int | None = None
    fixed: bool = True


@dataclass(frozen=True)
class BackwardPlan:
    """Programs that own key_n keys walk over queries by key_m; those that own query_m queries over keys by query_n."""

    key_n: int
    key_m: int
    query_m: int
    query_n: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True)
class WholePlan:
    """One program has all: m queries and tail_m more, 0 if that is all; keys in the same way (`whole.py`)."""

    m: int
    tail_m: int
    n: int
    tail_n: int
    warps: int
    registers: int | None = None


@dataclass(frozen=True)
class CutsPlan:
    """m queries × n keys per tile; the way in which the largest logits are found (see `largest.py`), and its slots."""

    m: int
    n: int
    warps: int
    stages: int
    way: str
    slots: int


@dataclass(frozen=True)
class MaximaPlan:
    """m queries × n keys per tile; where fewer queries are left over, up to `wide` keys (`maxima.py`).

    sums: the rounds of its tournament in which losers are found by sums.
    """

    m: int
    n: int
    warps: int
    stages: int
    wide: int
    sums: int = 2

    def tile(self, queries: int, nk: int, fitted: bool) -> dict[str, int]:
        """Sizes of the kernel's tiles with so many queries: keys, keys of the last one, threads that share a row.

        fitted: to rows of exactly nk keys.

        >>> MaximaPlan(64, 64, 4, 2, wide=256).tile(64, 197, True)
        {'BN': 64, 'REST_N': 16, 'LISTS': 4}
        >>> MaximaPlan(64, 64, 4, 2, wide=256).tile(16, 197, True)
        {'BN': 256, 'REST_N': 256, 'LISTS': 16}
        """
        n = max(self.n, min(self.n * self.m // queries, self.wide)) if fitted else self.n
        # A matrix product gives a warp 16 rows, and 4 of its threads share one. Spare warps share them, too.
        lists = 4 * max(1, 16 * self.warps // queries)
        return {"BN": n, "REST_N": max(2 * lists, tail(nk, n, fitted)), "LISTS": lists}


def padded(width: int) -> int:
    """The power of two, at least 16, that a tile of `width` columns takes.

    >>> padded(64), padded(80), padded(8)
    (64, 128, 16)
    """
    return max(16, 1 << max(width - 1, 0).bit_length())


def tail(n: int, block: int, static: bool, never_empty: bool = False) -> int:
    """The size of the tile that holds what n leaves beyond whole blocks; `never_empty`: a whole block if need be.

    >>> tail(197, 64, True), tail(197, 64, False), tail(128, 64, True, True)
    (16, 64, 64)
    """
    left = (n - 1) % block + 1 if never_empty else n % block
    return padded(left) if static else block


def is_static(nq: int, nk: int, kind: tuple[Any, ...] = ()) -> bool:
    """Whether the kernels are compiled for exactly these token counts.

    Short sequences gain by it, and every length takes seconds to compile. Images keep to a few; texts that are padded
    to the longest of their batch have ever new ones. So after the first few of a kind of attention all others share
    kernels that take lengths as numbers.

    kind: what tells attention of one kind from another, such as heads and widths: each stage of a pyramid has its own.

    >>> [is_static(n, n, ("an example",)) for n in (10, 20, 30, 40, 50, 10)]
    [True, True, True, True, False, True]
    """
    if max(nq, nk) > STATIC_TOKENS:
        return False
    seen = _seen.setdefault(kind, set())
    if (nq, nk) not in seen and len(seen) < STATIC_SHAPES:
        seen.add((nq, nk))
    return (nq, nk) in seen


def kind_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Heads and widths of a call, for `is_static`."""
    return q.shape[1], k.shape[1], q.shape[3], v.shape[3]


def forward_plan(nq: int, nk: int, width: int, dtype: torch.dtype, seeds: bool = False) -> ForwardPlan:
    """Tiles of the forward kernel; width is the larger of the padded head widths. seeds: they drop keys."""
    if seeds:
        return dataclasses.replace(forward_plan(nq, nk, width, dtype), registers=None)
    tokens = max(nq, nk)
    if dtype == torch.float32:
        return ForwardPlan(32, 32, 4, 2) if width <= 64 else ForwardPlan(16, 32, 4, 1)
    if width > 64:
        return ForwardPlan(64, 32, 4, 3, registers=168)
    if tokens <= 128:
        return ForwardPlan(64, 64, 4, 2, registers=64 if width <= 32 else None, fixed=False)
    if tokens <= 256:
        return ForwardPlan(128, 32, 4, 3, registers=168)
    return ForwardPlan(64, 64, 4, 3, registers=None if tokens <= 768 else 128)


def backward_plan(
    nq: int, nk: int, width: int, dtype: torch.dtype, hard: bool = False, seeds: bool = False
) -> BackwardPlan:
    """Tiles of the backward kernel.

    hard: with hard masking, where they are the largest that spill nothing. seeds: where these drop keys, the same.
    """
    if seeds and dtype == torch.float32:
        return BackwardPlan(32, 16, 32, 16, 4, 1) if width <= 64 else BackwardPlan(16, 16, 16, 16, 4, 1)
    if seeds and width > 64:
        return BackwardPlan(64, 32, 64, 32, 8, 2)
    if seeds and max(nq, nk) > 128:
        return BackwardPlan(64, 32, 64, 32, 4, 3)
    if seeds:
        return dataclasses.replace(backward_plan(nq, nk, width, dtype), registers=None)
    tokens = max(nq, nk)
    if dtype == torch.float32:
        return BackwardPlan(32, 32, 32, 32, 4, 1) if width <= 64 else BackwardPlan(16, 16, 16, 16, 4, 1)
    if width > 64:
        return BackwardPlan(64, 32, 64, 32, 4, 2)
    if tokens <= 128:
        caps = (96, 168) if hard else (80, 128)
        return BackwardPlan(64, 32, 64, 64, 4, 1, registers=caps[width > 32])
    if hard:
        if tokens <= 256:
            return BackwardPlan(64, 32, 64, 64, 4, 2, registers=128)
        return BackwardPlan(64, 32, 64, 64, 4, 3, registers=None if tokens <= STATIC_TOKENS else 168)
    if tokens <= 256:
        return BackwardPlan(64, 32, 64, 32, 4, 3, registers=128)
    return BackwardPlan(64, 64, 64, 64, 4, 3, registers=168)


def whole_plan(
    nq: int, nk: int, width: int, dtype: torch.dtype, drop: bool = False, seeds: bool = False
) -> WholePlan | None:
    """Tiles of the backward kernel that has a whole head on chip; None where that is too much.

    drop: with keys dropped. What that needs in the rare case that a row lost all its keys takes registers in the
    others; hence the cap. seeds: they drop keys, and no cap leaves room for that.
    """
    most = next((tokens for widest, tokens in WHOLE_TOKENS.items() if width <= widest), 0)
    if dtype == torch.float32 or max(nq, nk) > most:
        return None
    (m, tail_m), (n, tail_n) = (_split(tokens) for tokens in (nq, nk))
    registers = 128 if drop and not seeds and width <= 32 and max(nq, nk) <= 80 else None
    return WholePlan(m, tail_m, n, tail_n, warps=4, registers=registers)


def _split(tokens: int) -> tuple[int, int]:
    """A tile and what is left.

    >>> _split(65), _split(49), _split(128)
    ((64, 16), (64, 0), (64, 64))
    """
    if tokens <= WHOLE_TILE:
        return padded(tokens), 0
    return WHOLE_TILE, padded(tokens - WHOLE_TILE)


def cuts_plan(nk: int, largest: int, width: int, dtype: torch.dtype) -> CutsPlan:
    """Tiles of the kernel that finds the `largest` largest of nk logits where the quick one does not serve."""
    rows = 16 if dtype == torch.float32 and width > 64 else 32
    if largest >= SLOTS:
        return CutsPlan(rows, 64, 4, 2, "digits", SLOTS)
    if nk <= WHOLE_KEYS:
        return CutsPlan(rows, padded(nk), 4, 1, "whole", SLOTS)
    return CutsPlan(rows, 64, 4, 2, "slots", padded(largest + 1))


def maxima_plan(nk: int, largest: int, width: int, dtype: torch.dtype, plain: bool) -> MaximaPlan | None:
    """Tiles of the quick kernel; None where so many are asked for that its lists would not fit into registers.

    plain: all keys are in reach. To find out who is takes registers, so that tiles are narrower then.
    """
    if largest > FEW:
        return None
    if dtype == torch.float32:
        return MaximaPlan(32, 32, 4, 2, wide=32)
    n = 64 if plain else 32
    if width > 64:
        return MaximaPlan(64, n, 4, 2, wide=n)
    return MaximaPlan(64, n, 4, 3, wide=padded(nk) if plain and nk <= WHOLE_KEYS else n)
