"""The random stream: its definition, its statistics, and where its seeds come from.

`battery` takes any mask function and gives a z-score per check, so that weaker hashes can be run through it, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from attemper import keep_mask
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import threshold

CPU = torch.device("cpu")
RATES = (0.001, 0.01, 0.1, 0.3, 0.5, 0.9)
MaskFn = Callable[[int, tuple[int, int, int, int], float], np.ndarray]


# The documented hash once more, in numpy's own 32-bit arithmetic, with places where a weaker part can be put in.


def word(x: int) -> np.ndarray:
    return np.array([x & 0xFFFFFFFF], np.uint32)


def counter(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.uint32)


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> 16)) * word(0x7FEB352D)
    x = (x ^ (x >> 15)) * word(0x846CA68B)
    return x ^ (x >> 16)


def numpy_rows(start: np.ndarray, batch: int, heads: int, queries: int) -> np.ndarray:
    head_words = mix(start + counter(batch * heads) * word(0x9E3779B9))
    return mix(head_words[:, None] + counter(queries) * word(0x85EBCA6B)) | word(1)


def numpy_columns(start: np.ndarray, keys: int) -> np.ndarray:
    x = start + counter(keys) * word(0x9E3779B9)
    return (x ^ (x >> 16)) * word(0x7FEB352D) | word(1)


def numpy_keep(seed, shape, p, *, lane=0, rows=numpy_rows, columns=numpy_columns, combine=np.multiply) -> np.ndarray:
    low, high = word(seed), word(seed >> 32)
    row_start = mix(mix(low + word(lane * 0x632BE5AB)) ^ high)
    column_start = mix(row_start ^ word(0x5BD1E995))
    batch, heads, queries, keys = shape
    words = combine(rows(row_start, batch, heads, queries)[..., None], columns(column_start, keys))
    return words.view(np.int32).reshape(shape) >= min(round(p * 2**32), 2**32 - 1) - 2**31


def torch_keep(seed: int, shape: tuple[int, int, int, int], p: float) -> np.ndarray:
    return keep_mask(seed, shape, p).numpy()


# The battery.


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
    def coins(seed, shape, p):
        return np.random.default_rng(seed).random(shape) >= p

    assert caught(battery(coins)) == set()


def progression_columns(start, keys):
    return (start | word(1)) + counter(keys) * word(2 * 0x9E3779B9)


def counted_rows(start, batch, heads, queries):
    return (word(2) * counter(batch * heads * queries) + word(1)).reshape(-1, queries)


def progression_rows(start, batch, heads, queries):
    head_words = mix(start + counter(batch * heads) * word(0x9E3779B9)) | word(1)
    return head_words[:, None] + counter(queries) * word(2 * 0x85EBCA6B)


def rows_without_samples(start, batch, heads, queries):
    return np.tile(numpy_rows(start, 1, heads, queries), (batch, 1))


def rows_without_heads(start, batch, heads, queries):
    return np.repeat(numpy_rows(start, 1, batch, queries), heads, 0)


WEAK = {
    "column words in arithmetic progression": (
        {"columns": progression_columns},
        {"column triples 1", "column triples 2", "run lengths"},
    ),
    "row words that count": ({"rows": counted_rows}, {"row triples 1", "row triples 2", "run lengths down"}),
    "row words in arithmetic progression": (
        {"rows": progression_rows},
        {"row triples 1", "row triples 2", "run lengths down"},
    ),
    "row and column words xored": ({"combine": np.bitwise_xor}, {"2x2 parity", "16x16 tiles"}),
    "samples left out": ({"rows": rows_without_samples}, {"neighbouring samples"}),
    "heads left out": ({"rows": rows_without_heads}, {"neighbouring heads"}),
}


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


# The definition.

SEEDS = (0, 1, 2, -1, 7 << 32, 0x123456789ABCDEF, 2**63 - 1, -(2**63))


@pytest.mark.parametrize("seed", SEEDS)
def test_keep_mask_is_the_documented_hash_bit_for_bit(seed):
    for lane, p in itertools.product((0, 1, 5), (0.0, 1e-9, 0.1, 0.5, 0.999, 1 - 1e-12)):
        expected = numpy_keep(seed, (2, 3, 5, 67), p, lane=lane)
        assert np.array_equal(keep_mask(seed, (2, 3, 5, 67), p, lane=lane).numpy(), expected)


def test_keep_mask_is_the_documented_hash_far_from_the_origin():
    for shape in ((1, 1, 1, 70_000), (1, 1, 70_000, 1), (300, 250, 1, 1)):
        assert np.array_equal(keep_mask(3, shape, 0.4).numpy(), numpy_keep(3, shape, 0.4))


def test_keep_mask_depends_on_nothing_but_its_arguments():
    first = keep_mask(11, (2, 2, 9, 9), 0.4)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    torch.rand(3)
    assert torch.equal(keep_mask(11, (2, 2, 9, 9), 0.4), first)
    torch.set_rng_state(state)
    keep_mask(11, (2, 2, 9, 9), 0.4)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.dtype == torch.bool
    assert first.shape == (2, 2, 9, 9)


def test_seed_as_tensor_gives_the_mask_of_the_int():
    for seed in SEEDS:
        assert torch.equal(keep_mask(torch.tensor(seed), (1, 2, 3, 40), 0.5), keep_mask(seed, (1, 2, 3, 40), 0.5))


def test_ints_beyond_64_bits_wrap_around():
    assert torch.equal(keep_mask(2**64 + 5, (1, 1, 4, 32), 0.5), keep_mask(5, (1, 1, 4, 32), 0.5))


def test_a_raised_rate_only_drops_more():
    masks = [keep_mask(5, (1, 2, 16, 64), p) for p in (0.0, 0.001, 0.1, 0.5, 0.9)]
    for less, more in itertools.pairwise(masks):
        assert not (more & ~less).any()


def test_threshold_has_the_full_32_bits():
    assert [threshold(p) + 2**31 for p in (0.0, 2**-32, 1e-9, 0.1, 0.5)] == [0, 1, 4, 429496730, 2**31]
    assert threshold(1 - 1e-12) == 2**31 - 1


def test_rate_zero_keeps_all():
    for seed in range(20):
        assert keep_mask(seed, (2, 2, 33, 65), 0.0).all()


def test_lanes_seeds_heads_samples_and_queries_all_differ():
    shape = (3, 4, 5, 64)
    mask = keep_mask(9, shape, 0.5)
    assert len({row.numpy().tobytes() for row in mask.view(-1, 64)}) == 3 * 4 * 5
    whole = [keep_mask(9, shape, 0.5, lane=lane) for lane in range(5)]
    whole += [keep_mask(seed, shape, 0.5) for seed in (8, 10, 9 + 2**32, 9 + 2**33, 9 - 2**63)]
    for a, b in itertools.combinations(whole, 2):
        assert 0.45 < (a != b).double().mean() < 0.55  # ± 4.5 standard errors or more


def test_a_smaller_call_sees_a_prefix_of_the_larger_one():
    large = keep_mask(4, (4, 3, 20, 50), 0.5)
    assert torch.equal(keep_mask(4, (2, 3, 20, 50), 0.5), large[:2])
    assert torch.equal(keep_mask(4, (4, 3, 7, 50), 0.5), large[:, :, :7])
    assert torch.equal(keep_mask(4, (4, 3, 20, 31), 0.5), large[..., :31])
    assert torch.equal(keep_mask(4, (1, 3, 1, 1), 0.5), large[:1, :, :1, :1])
    # Sample · H + head is what counts, so heads may be folded into the batch.
    assert torch.equal(keep_mask(4, (1, 12, 20, 50), 0.5).view(4, 3, 20, 50), large)


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 2, 3, 4, 5), (1, 1, -1, 4)])
def test_shape_that_is_not_four_sizes_is_refused(shape):
    with pytest.raises(ValueError, match="shape must be four sizes"):
        keep_mask(0, shape, 0.5)


@pytest.mark.parametrize("p", [-0.1, 1.0, 2, float("nan")])
def test_rate_outside_its_range_is_refused(p):
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\)"):
        keep_mask(0, (1, 1, 1, 1), p)


@pytest.mark.parametrize("seed", [torch.tensor([1]), torch.tensor(1.0), torch.tensor(1, dtype=torch.int32)])
def test_seed_tensor_of_another_kind_is_refused(seed):
    with pytest.raises(ValueError, match="0-dim int64"):
        keep_mask(seed, (1, 1, 1, 1), 0.5)


# Compiled code.


def draws_and_masks():
    first, second = draw_seed(CPU), draw_seed(CPU)
    masks = [keep_mask(first, (2, 3, 17, 33), p, lane=lane) for lane, p in enumerate((0.3, 0.001))]
    return first, second, *masks, keep_mask(second, (2, 3, 17, 33), 0.3)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_draws_the_seeds_and_masks_of_eager_code(backend):
    compiled = torch.compile(draws_and_masks, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.manual_seed(3)
        expected = draws_and_masks()
        torch.manual_seed(3)
        for got, want in zip(compiled(), expected, strict=True):
            assert torch.equal(got, want)
        assert not torch.equal(compiled()[0], expected[0])


def test_compiled_code_takes_new_rates_without_compiling_anew():
    counting = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda seed, p: keep_mask(seed, (2, 2, 4, 8), p), backend=counting, fullgraph=True)
    frames = []
    for p in (0.1, 0.2, 0.35, 0.9, 1 - 1e-12):
        seed = torch.tensor(int(p * 100))
        assert torch.equal(compiled(seed, p), keep_mask(seed, (2, 2, 4, 8), p))
        frames.append(counting.frame_count)
    assert frames[1:] == [frames[1]] * 4


# Seeds.


def test_drawn_seeds_come_from_torchs_generator():
    torch.manual_seed(5)
    first = [int(draw_seed(CPU)) for _ in range(200)]
    torch.manual_seed(5)
    assert [int(draw_seed(CPU)) for _ in range(200)] == first
    assert len(set(first)) == 200
    torch.manual_seed(6)
    assert int(draw_seed(CPU)) not in first


def test_drawn_seeds_use_all_64_bits():
    torch.manual_seed(0)
    seeds = np.array([int(draw_seed(CPU)) for _ in range(400)]).view(np.uint64)
    ones = np.array([int(((seeds >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)])
    assert (abs(ones - 200) < 40).all()  # 4 standard errors


def test_drawn_seed_is_a_scalar_on_its_device():
    seed = draw_seed(CPU)
    assert (seed.dtype, seed.shape, seed.device) == (torch.int64, (), CPU)


def test_drawing_a_seed_passes_torchs_operator_checks():
    results = torch.library.opcheck(torch.ops.attemper.draw_seed.default, (), {"device": CPU})
    assert set(results.values()) == {"SUCCESS"}
    assert torch.Tag.nondeterministic_seeded in torch.ops.attemper.draw_seed.default.tags


def test_drawing_under_fake_tensors_leaves_the_generator_alone():
    state = torch.get_rng_state()
    with FakeTensorMode():
        seed = draw_seed(CPU)
        mask = keep_mask(seed, (2, 2, 3, 4), 0.5)
    assert (seed.dtype, seed.shape) == (torch.int64, ())
    assert (mask.dtype, mask.shape) == (torch.bool, (2, 2, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
