"""The statistics of the random stream.

`battery` takes any mask function and gives a z-score per check, averaged over a mask, so that weaker hashes can be run
through it, too. What an average hides, single rows, pairs of rows, square masks and single seeds, is looked at below.
There a check may fail by chance with a probability of FALSE_ALARM, whatever the number of its comparisons: every
threshold is an exact tail bound (Chernoff's or Hoeffding's) with Bonferroni's correction.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from attemper import keep_mask
from attemper.ops.stream import Stream, site_word, stream_words
from stream_hashes import WEAK, MaskFn, keep_63759d7, numpy_keep, starts_of_32_bits

RATES = (0.001, 0.01, 0.1, 0.3, 0.5, 0.9)
FALSE_ALARM = 1e-4


def torch_keep(seed: int, shape: tuple[int, int, int, int], p: float) -> np.ndarray:
    return keep_mask(seed, shape, p).numpy()


def coins(seed: int, shape: tuple[int, int, int, int], p: float) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) >= p


def xored(seed: int, shape: tuple[int, int, int, int], p: float) -> np.ndarray:
    return numpy_keep(seed, shape, p, combine=np.bitwise_xor)


# The battery: averages.


def battery(mask_fn: MaskFn, seed: int = 20230617) -> dict[str, float]:
    """Standard errors between what a mask function gives and what independent coins would give, by check."""
    shape = (4, 4, 128, 256)
    z = {f"rate {p}": mean_z(standardise(mask_fn(seed + i, shape, p), p)) for i, p in enumerate(RATES)}
    p = 0.3
    mask = mask_fn(seed, shape, p)
    x = standardise(mask, p)
    z["neighbouring samples"] = mean_z(x[1:] * x[:-1])
    z["neighbouring heads"] = mean_z(x[:, 1:] * x[:, :-1])
    z["neighbouring rows"] = mean_z(x[:, :, 1:] * x[:, :, :-1])
    z["neighbouring columns"] = mean_z(x[..., 1:] * x[..., :-1])
    z["neighbouring seeds"] = mean_z(x * standardise(mask_fn(seed + 1, shape, p), p))
    z["seeds in high bits"] = mean_z(x * standardise(mask_fn(seed + 2**32, shape, p), p))
    for step in (1, 2):
        z[f"row triples {step}"] = mean_z(x[:, :, 2 * step :] * x[:, :, step:-step] * x[:, :, : -2 * step])
        z[f"column triples {step}"] = mean_z(x[..., 2 * step :] * x[..., step:-step] * x[..., : -2 * step])
    pairs = x[..., 1:] * x[..., :-1]
    z["2x2 parity"] = mean_z(pairs[:, :, 1:] * pairs[:, :, :-1])
    z["run lengths"] = run_length_z(mask, p)
    z["run lengths down"] = run_length_z(mask.swapaxes(-1, -2), p)
    z["16x16 tiles"] = tile_z(x)
    return z


def standardise(mask: np.ndarray, p: float) -> np.ndarray:
    """Dropped or not, with mean 0 and variance 1 if the rate is p."""
    return (~mask - p) / np.sqrt(p * (1 - p))


def mean_z(x: np.ndarray) -> float:
    return float(x.mean() * np.sqrt(x.size))


def run_length_z(mask: np.ndarray, p: float) -> float:
    """Runs of kept keys against the geometric distribution, by chi-square."""
    ends = np.flatnonzero(~mask.reshape(-1))
    lengths = np.diff(ends) - 1
    lengths = lengths[lengths > 0]
    longest = 24
    observed = np.bincount(np.minimum(lengths, longest), minlength=longest + 1)[1:]
    shares = (1 - p) ** np.arange(longest) * p
    shares[-1] = (1 - p) ** (longest - 1)
    expected = shares * lengths.size
    return chi_square_z(((observed - expected) ** 2 / expected).sum(), longest - 1)


def tile_z(x: np.ndarray) -> float:
    """Sums over 16 × 16 tiles: their spread by chi-square."""
    batch, heads, queries, keys = x.shape
    sums = x.reshape(batch, heads, queries // 16, 16, keys // 16, 16).sum((3, 5)) / 16
    return chi_square_z((sums**2).sum(), sums.size)


def chi_square_z(value: float, freedom: int) -> float:
    return float((value - freedom) / np.sqrt(2 * freedom))


def caught(z: dict[str, float]) -> set[str]:
    return {name for name, value in z.items() if abs(value) >= 4}


def test_battery_finds_nothing_in_the_stream():
    assert caught(battery(torch_keep)) == set()


def test_battery_finds_nothing_in_independent_coins():
    assert caught(battery(coins)) == set()


@pytest.mark.parametrize("name", WEAK)
def test_battery_catches_a_weaker_hash(name):
    parts, checks = WEAK[name]
    found = caught(battery(lambda seed, shape, p: numpy_keep(seed, shape, p, **parts)))
    assert checks <= found


def test_battery_catches_seeds_that_lose_bits():
    low_bits = battery(lambda seed, shape, p: numpy_keep(seed & 0xFFFFFFFF, shape, p))
    assert caught(low_bits) == {"seeds in high bits"}
    half_bits = battery(lambda seed, shape, p: numpy_keep(seed & ~1, shape, p), seed=20230616)
    assert caught(half_bits) == {"neighbouring seeds"}


def test_battery_catches_a_wrong_rate():
    off = battery(lambda seed, shape, p: numpy_keep(seed, shape, p * 1.02))
    assert {"rate 0.1", "rate 0.3", "rate 0.5", "rate 0.9"} <= caught(off)


# Single rows, at every lag.


def divergence(hits: np.ndarray, many: np.ndarray | int, p: float) -> np.ndarray:
    """n · KL(hits / n ‖ p): Chernoff bounds the probability of as many hits, or of as few, by exp of minus that."""
    share = np.clip(hits / np.maximum(many, 1), 1e-12, 1 - 1e-12)
    return many * (share * np.log(share / p) + (1 - share) * np.log((1 - share) / (1 - p)))


def repeating_rows(mask: np.ndarray, p: float) -> list[tuple[int, int]]:
    """(row, lag) of rows (R, N) that drop, or keep, with what they dropped `lag` keys before.

    Go through a row from left to right, and bet whenever the key `lag` before was dropped. What is bet on is a fresh
    coin every time, so of the first m bets of a row as many win as of m independent coins. How many bets there are is
    itself drawn, so all m up to N are corrected for, beside rows and lags.
    """
    dropped = (~mask).astype(np.float64)
    rows, keys = dropped.shape
    found = np.fft.rfft(dropped, 2 * keys)
    wins = np.rint(np.fft.irfft((found * found.conj()), 2 * keys)[:, 1:keys])
    bets = np.cumsum(dropped, 1)[:, keys - 2 :: -1]  # of lag 1 … N − 1: those before the last `lag` keys
    threshold = math.log(2 * keys * rows * (keys - 1) / FALSE_ALARM)
    return [
        (int(row), int(lag) + 1) for row, lag in zip(*np.nonzero(divergence(wins, bets, p) > threshold), strict=True)
    ]


LONG = {197: (2, 6, 197, 197), 1024: (2, 6, 256, 1024), 4096: (1, 2, 256, 4096)}
"""Keys → shape of the mask."""


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("keys", LONG)
def test_no_row_repeats_itself_at_any_lag(keys, p):
    assert repeating_rows(torch_keep(10, LONG[keys], p).reshape(-1, keys), p) == []
    assert repeating_rows(coins(10, LONG[keys], p).reshape(-1, keys), p) == []


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rows_of_columns_that_were_mixed_once_repeat_themselves(p):
    found = repeating_rows(keep_63759d7(10, LONG[1024], p).reshape(-1, 1024), p)
    assert (2521, 63) in found
    assert caught(battery(keep_63759d7)) == set()  # averages do not see it


# Pairs of rows: all 2 × 2 minors.


def alike_rows(mask: np.ndarray) -> int:
    """How many pairs of rows (R, N) at p = 0.5 agree in too many, or too few, keys."""
    rows, keys = mask.shape
    x = 2.0 * mask - 1
    agreeing = (keys + (x @ x.T)[np.triu_indices(rows, 1)]) / 2
    threshold = math.log(2 * agreeing.size / FALSE_ALARM)
    return int((divergence(agreeing, keys, 0.5) > threshold).sum())


def minors_z(mask: np.ndarray) -> float:
    """The share of 2 × 2 minors of signs that are not 0, over all pairs of rows and of columns, in standard errors.

    A minor of signs is 0 where their product is 1. Over all pairs of columns these products add up to (S² − N) / 2, S
    being the sum over one row times the other. S² has the mean N and the variance 2N(N − 1), and no correlation between
    pairs of rows.
    """
    rows, keys = mask.shape
    x = 2.0 * mask - 1
    sums = (x @ x.T)[np.triu_indices(rows, 1)]
    return float((sums**2 - keys).mean() / math.sqrt(2 * keys * (keys - 1) / sums.size))


@pytest.mark.parametrize("seed", [1, 2**32, -5])
def test_no_pair_of_rows_or_of_columns_is_alike_and_minors_are_those_of_coins(seed):
    mask = torch_keep(seed, (2, 4, 64, 512), 0.5).reshape(512, 512)
    for side in (mask, mask.T, coins(abs(seed), (2, 4, 64, 512), 0.5).reshape(512, 512)):
        assert alike_rows(side) == 0
        assert abs(minors_z(side)) < 4


def test_minors_catch_words_that_are_xored():
    mask = xored(1, (2, 4, 64, 512), 0.5).reshape(512, 512)
    assert alike_rows(mask) == 512 * 511 // 2
    assert minors_z(mask) > 1000


# Square masks as matrices over GF(2).


def rank_over_gf2(mask: np.ndarray) -> int:
    rows = [int("".join("1" if kept else "0" for kept in row), 2) for row in mask]
    rank = 0
    while rows:
        pivot = rows.pop()
        if pivot:
            rank += 1
            lowest = pivot & -pivot
            rows = [row ^ pivot if row & lowest else row for row in rows]
    return rank


def rank_chi_square(masks: np.ndarray) -> float:
    """Of square masks at p = 0.5: how many lack no rank, one, or more, by chi-square with two degrees of freedom."""
    size = masks.shape[-1]
    full = math.prod(1 - 2.0**-i for i in range(1, size + 1))
    shares = np.array([full, 2 * full, 1 - 3 * full])  # those of large matrices, right to 2⁻⁶⁰ at 64 rows
    missing = [min(size - rank_over_gf2(mask), 2) for mask in masks]
    expected = shares * len(masks)
    return float(((np.bincount(missing, minlength=3) - expected) ** 2 / expected).sum())


def test_square_masks_have_the_ranks_of_random_matrices():
    threshold = -2 * math.log(FALSE_ALARM)  # of chi-square with two degrees of freedom, exactly
    shape = (20, 20, 64, 64)
    assert rank_chi_square(torch_keep(3, shape, 0.5).reshape(-1, 64, 64)) < threshold
    assert rank_chi_square(coins(3, shape, 0.5).reshape(-1, 64, 64)) < threshold
    assert rank_chi_square(xored(3, shape, 0.5).reshape(-1, 64, 64)) > 1000


# Seeds, sites, calls and lanes.


def collisions(words: np.ndarray) -> int:
    return words.size - np.unique(words).size


def halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.view(np.uint32).astype(np.uint64) << np.uint64(32) | b.view(np.uint32)


def starts_of(seeds: torch.Tensor) -> list[np.ndarray]:
    """64 bits of rows, and of columns, for many seeds."""
    return [halves(start.a.numpy(), start.b.numpy()) for start in torch.vmap(lambda seed: stream_words(seed, 2))(seeds)]


def many_seeds(many: int) -> torch.Tensor:
    """Seeds that count, seeds that differ in their high half only, and seeds from a generator, all different."""
    counted, drawn = torch.arange(many // 4), torch.randint(2**62, 2**63 - 1, (many // 2,))
    return torch.cat([counted, counted - 2**63 + 2**40, (counted + 2**25) << 32, drawn]).unique()


@pytest.mark.parametrize("many", [5 * 10**5, pytest.param(10**7, marks=pytest.mark.slow)])
def test_no_two_seeds_start_alike(many):
    seeds = many_seeds(many)
    assert len(seeds) > 0.99 * many
    assert [collisions(start) for start in starts_of(seeds)] == [0, 0]


@pytest.mark.parametrize("many", [5 * 10**5, pytest.param(10**7, marks=pytest.mark.slow)])
def test_starts_of_32_bits_collide(many):
    seeds = torch.randint(-(2**63), 2**63 - 1, (many,)).numpy().view(np.uint64)
    (rows, other), _ = starts_of_32_bits(seeds.astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32))
    assert collisions(halves(rows, other)) > many**2 / 2**33 / 2  # half of what is to be expected


def test_no_two_seeds_have_the_same_mask():
    seeds = many_seeds(2 * 10**5)
    words = torch.vmap(lambda seed: Stream(seed).products(1, 1, 2, 32).flatten())(seeds).numpy()
    masks = np.packbits(words >= 0, axis=-1).view(np.uint64)  # 64 bits each
    assert collisions(masks) == 0


def test_streams_of_other_seeds_sites_calls_and_lanes_are_independent():
    shape = (2, 4, 64, 128)
    told = [{"lane": lane} for lane in (*range(8), 255)]
    told += [{"call": call, "lane": lane} for call in (1, 2, 3, 1000) for lane in (0, 1)]
    told += [{"site": f"blocks.{i}.attn", "call": call} for i in range(8) for call in (0, 1)]
    masks = [keep_mask(9, shape, 0.5, **place) for place in told]
    masks += [keep_mask(seed, shape, 0.5) for seed in (-9, *(9 ^ 1 << bit for bit in range(63)))]
    x = np.stack([2.0 * mask.numpy().ravel() - 1 for mask in masks])
    z = (x @ x.T)[np.triu_indices(len(x), 1)] / math.sqrt(x.shape[1])
    assert np.abs(z).max() < math.sqrt(2 * math.log(2 * z.size / FALSE_ALARM))  # Hoeffding


def test_sites_have_words_of_their_own():
    names = [
        f"{stack}.{i}.{name}" for stack in ("blocks", "model.layers") for i in range(200) for name in ("attn", "mlp")
    ]
    assert len({site_word(name) for name in names}) == len(names)
    assert all(-(2**31) <= site_word(name) < 2**31 for name in names)


def test_sites_calls_and_lanes_of_a_few_seeds_never_start_alike():
    # Small numbers in the low and in the high half, as people choose seeds.
    seeds = [low | high << 32 for low, high in itertools.product(range(4), range(16))]
    places = list(itertools.product((0, 1, 255), ("", "blocks.0.attn", "blocks.1.attn"), (0, 1, 7)))
    for side in (0, 1):
        found = {
            stream_words(torch.tensor(seed), lane, site_word(site), call)[side]
            for seed, (lane, site, call) in itertools.product(seeds, places)
        }
        assert len(found) == len(seeds) * len(places)
