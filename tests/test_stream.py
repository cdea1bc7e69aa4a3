"""The random stream: its definition, values that never change, and where its seeds come from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from attemper import keep_mask
from attemper.errors import ParameterError
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import Offsets, Stream, column_words, row_words, signed, site_word, stream_words, threshold
from stream_hashes import numpy_keep

CPU = torch.device("cpu")

# Values that never change. Masks changed once, with this definition; whoever logged a seed finds its masks again.
# `word_by_word` is the definition in plain Python, as `docs/randomness.md` has it.

GOLDEN_SITES = {"": 0, "blocks.0.attn": -1295928240, "model.layers.31.self_attn": -822538540}
GOLDEN_WORDS = [
    # seed, lane, site, call, (sample, head, query, key), row word, column word
    (0, 0, "", 0, (0, 0, 0, 0), 0x2233E613, 0xBBC90DE1),
    (1, 0, "", 0, (0, 0, 0, 0), 0xFB234D3F, 0x9368488B),
    (7, 0, "", 0, (1, 2, 4, 7), 0x8E5FA6B7, 0x8DD342B9),
    (-1, 2, "blocks.0.attn", 0, (5, 11, 196, 1023), 0xF7F901DB, 0xC8F8190D),
    (4294967296, 0, "", 1, (0, 0, 0, 1), 0x163102E1, 0xFD748EE1),
    (2**63 - 1, 255, "model.layers.31.self_attn", 8388607, (9, 127, 1048576, 2147483647), 0x0EBA650B, 0x9731E2D3),
    (-(2**63), 3, "blocks.0.attn", 2, (0, 1, 2, 3), 0x27009E6B, 0xDF80F88B),
    (0x123456789ABCDEF, 1, "model.layers.31.self_attn", 1, (63, 31, 4095, 8191), 0xB9F4CB7D, 0xF0E87959),
]
GOLDEN_MASKS = [
    # seed, lane, site, call, at, p, and one bit for every entry of a mask (2, 2, 2, 8): 1 = kept
    (0, 0, "", 0, (0, 0, 0, 0), 0.5, "e22d7114b1380edb"),
    (7, 0, "", 0, (0, 0, 0, 0), 0.25, "f5fd1b786caf3fef"),
    (7, 1, "", 0, (0, 0, 0, 0), 0.25, "7f77d7bf0bb77bbd"),
    (7, 0, "blocks.0.attn", 0, (0, 0, 0, 0), 0.25, "feb71bdfe3f7fec7"),
    (7, 0, "blocks.0.attn", 1, (0, 0, 0, 0), 0.25, "fff9dbfda3efeb37"),
    (7, 0, "blocks.0.attn", 1, (3, 5, 17, 64), 0.25, "ff75d7fbd6ece7b9"),
    (4294967303, 0, "", 0, (0, 0, 0, 0), 0.1, "7fdff7fe7ffffff7"),
    (-2, 2, "model.layers.31.self_attn", 3, (1, 1, 1, 1), 0.9, "04d8004040030002"),
]


def mix_word(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def word_by_word(seed: int, lane: int, site: int, call: int, place: tuple[int, ...]) -> tuple[int, int]:
    """The row word and the column word of one entry."""
    low, high = seed % 2**32, (seed >> 32) % 2**32
    t = mix_word((low + 0x9E3779B9) % 2**32)
    a = mix_word(((mix_word(high ^ t) ^ site % 2**32) + call * 256 + lane) % 2**32)
    b = mix_word(((t ^ site % 2**32) + a) % 2**32)
    c = mix_word(a ^ 0xA511E9B3)
    d = mix_word((b + c) % 2**32)
    sample, head, query, key = place
    x = mix_word((a + sample * 0x9E3779B9) % 2**32)
    y = mix_word(((x ^ b) + head * 0x632BE5AB) % 2**32)
    z = mix_word((y + query * 0x85EBCA6B) % 2**32)
    return mix_word(z ^ x) | 1, mix_word(mix_word((c + key * 0x9E3779B9) % 2**32) ^ d) | 1


def bits_by_word(seed, lane, site, call, at, p) -> str:
    bits = ""
    for place in itertools.product(*(range(first, first + n) for first, n in zip(at, (2, 2, 2, 8), strict=True))):
        row, column = word_by_word(seed, lane, site, call, place)
        product = row * column % 2**32
        bits += str(int((product ^ 2**31) >= round(p * 2**32)))
    return f"{int(bits, 2):016x}"


@pytest.mark.parametrize("name", GOLDEN_SITES)
def test_words_of_sites_never_change(name):
    assert site_word(name) == GOLDEN_SITES[name]


@pytest.mark.parametrize(("seed", "lane", "site", "call", "place", "row", "column"), GOLDEN_WORDS)
def test_words_never_change(seed, lane, site, call, place, row, column):
    assert word_by_word(seed, lane, site_word(site), call, place) == (row, column)
    rows, columns = stream_words(torch.tensor(seed), lane, site_word(site), call)
    assert row_words(rows, (1, 1, 1), Offsets(*place), CPU).item() == signed(row)
    assert column_words(columns, 1, place[3], CPU).item() == signed(column)


@pytest.mark.parametrize(("seed", "lane", "site", "call", "at", "p", "bits"), GOLDEN_MASKS)
def test_masks_never_change(seed, lane, site, call, at, p, bits):
    assert bits_by_word(seed, lane, site_word(site), call, at, p) == bits
    mask = keep_mask(seed, (2, 2, 2, 8), p, lane=lane, site=site, call=call, at=Offsets(*at))
    assert np.packbits(mask.numpy()).tobytes().hex() == bits


# The definition.

SEEDS = (0, 1, 2, -1, 7 << 32, 0x123456789ABCDEF, 2**63 - 1, -(2**63))


@pytest.mark.parametrize("seed", SEEDS)
def test_keep_mask_is_the_documented_hash_bit_for_bit(seed):
    for lane, p in itertools.product((0, 1, 5), (0.0, 1e-9, 0.1, 0.5, 0.999, 1 - 1e-12)):
        expected = numpy_keep(seed, (2, 3, 5, 67), p, lane=lane)
        assert np.array_equal(keep_mask(seed, (2, 3, 5, 67), p, lane=lane).numpy(), expected)
    for site, call, at in (("blocks.3", 0, (0, 0, 0, 0)), ("x", 5, (7, 1, 2, 3)), ("", 999, (0, 2**31 - 9, 2**30, 9))):
        expected = numpy_keep(seed, (2, 3, 5, 67), 0.4, lane=1, site=site_word(site), call=call, at=at)
        given = keep_mask(seed, (2, 3, 5, 67), 0.4, lane=1, site=site, call=call, at=Offsets(*at))
        assert np.array_equal(given.numpy(), expected)


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


@given(st.data())
def test_a_part_of_a_mask_is_the_mask_of_the_part(data):
    size = data.draw(st.tuples(*(st.integers(1, 6) for _ in range(4))))
    at = tuple(data.draw(st.integers(0, n - 1)) for n in size)
    many = tuple(data.draw(st.integers(1, n - first)) for n, first in zip(size, at, strict=True))
    shift = data.draw(st.tuples(*(st.sampled_from([0, 5, 2**20, 2**31 - 7]) for _ in range(4))))
    places = [slice(first, first + n) for first, n in zip(at, many, strict=True)]
    whole = keep_mask(13, size, 0.5, at=Offsets(*shift))
    part = keep_mask(13, many, 0.5, at=Offsets(*(a + b for a, b in zip(at, shift, strict=True))))
    assert torch.equal(part, whole[tuple(places)])


@pytest.mark.parametrize("at", [Offsets(sample=-1), Offsets(head=1.0), Offsets(query=True), Offsets(key=2**31)])
def test_offsets_that_are_no_numbers_of_anything_are_refused(at):
    name = next(name for name, value in at._asdict().items() if value)
    with pytest.raises(ParameterError, match=f"at.{name} must be"):
        keep_mask(0, (1, 1, 1, 1), 0.5, at=at)


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
    return first, second, *masks, keep_mask(second, (2, 3, 17, 33), 0.3, call=1)


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


def test_compiled_code_takes_new_calls_and_places_without_compiling_anew():
    counting = CompileCounterWithBackend("aot_eager")

    def mask_of(seed, site, call, first):
        return Stream(seed, 1, site=site, call=call, at=Offsets(*first)).keep((2, 2, 4, 8), 0.5)

    compiled = torch.compile(mask_of, backend=counting, fullgraph=True)
    frames = []
    for i in range(2, 7):
        told = torch.tensor(i), site_word(f"blocks.{i}"), i, (3 * i, 4 * i, 5 * i, 6 * i)
        assert torch.equal(compiled(*told), mask_of(*told))
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
