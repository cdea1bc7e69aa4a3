"""DropKey: what is dropped together, on which shapes, and how often."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view

from attemper import attention, keep_mask
from attemper.errors import ParameterError
from attemper.methods import DropKey, Place
from attemper.methods.dropkey import dropkey
from attemper.methods.structure import seed_rate
from attemper.ops.stream import Stream


def kept(method, shape, seed=0):
    """Which keys the method would keep, before any row is spared."""
    return method.keep(shape, Stream(torch.tensor(seed)))


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kept_in_attention(method, shape, seed=0, **arguments):
    """Which keys have weight in a real call: (B, H, Nq, Nk)."""
    batch, heads, queries, keys = shape
    eye = torch.eye(keys, dtype=torch.float64).expand(batch, heads, -1, -1)
    q, k = randn(batch, heads, queries, 4, seed=1), randn(batch, heads, keys, 4, seed=2)
    weights = attention(q, k, eye, methods=[method], seed=seed, **arguments)
    torch.testing.assert_close(weights.sum(-1), torch.ones(shape[:3], dtype=torch.float64))
    return weights > 0


def test_defaults_are_the_papers():
    assert dataclasses.asdict(DropKey()) == {
        **{"p": 0.1, "schedule": "constant", "match": "max", "share": "none", "structure": "none"},
        **{"w": None, "grid": None, "prefix": None},
        **{"until": None, "start": None, "ramp": None, "each": "block", "entropy": 0.01},
    }


def test_it_drops_exactly_what_keep_mask_says():
    for seed, p in ((0, 0.1), (2**40, 0.5)):
        mask = keep_mask(seed, (2, 3, 20, 30), p)
        assert torch.equal(kept(DropKey(p), (2, 3, 20, 30), seed), mask)
        assert torch.equal(kept_in_attention(DropKey(p), (2, 3, 20, 30), seed), mask)


def test_the_pure_function_renormalises_over_what_is_left():
    logits, keep = randn(2, 2, 5, 12), keep_mask(0, (2, 2, 5, 12), 0.5)
    powers = logits.exp() * keep
    torch.testing.assert_close(dropkey(logits, keep), powers / powers.sum(-1, keepdim=True), atol=1e-14, rtol=0)
    allowed = torch.zeros(12, dtype=torch.bool)
    allowed[3] = True
    masked = logits.masked_fill(~allowed, -torch.inf)
    assert torch.equal(dropkey(masked, keep, allowed), allowed.double().expand(2, 2, 5, 12))


# One key set for all queries, or for all heads too.


@pytest.mark.parametrize("share", ["queries", "heads"])
def test_shared_sets_are_the_same_where_they_are_shared_and_only_there(share):
    mask = kept_in_attention(DropKey(0.4, share=share), (6, 5, 4, 30))
    assert (mask == mask[:, :, :1]).all()
    sets = mask[:, :, 0]
    by_head = [len({row.numpy().tobytes() for row in sample}) for sample in sets]
    assert by_head == ([1] * 6 if share == "heads" else [5] * 6)
    assert len({row.numpy().tobytes() for row in sets[:, 0]}) == 6


@pytest.mark.parametrize("share", ["queries", "heads"])
@pytest.mark.parametrize(("keys", "p"), [(10, 0.25), (16, 0.25), (7, 0.8), (50, 0.1), (9, 0.05), (33, 0.5), (2, 0.3)])
def test_shared_sets_have_a_fixed_size_and_the_expected_rate(keys, p, share):
    mask = kept(DropKey(p, share=share), (400, 25, 1, keys))[:, :, 0]
    sizes = mask.sum(-1).double().flatten()
    assert sizes.numel() == (10_000 if share == "queries" else 400)
    whole, part = divmod(p * keys, 1)
    drawn = keys - int(whole)
    assert set(sizes.tolist()) <= {drawn, drawn - 1}
    error = 4 * math.sqrt(part * (1 - part) / sizes.numel())
    assert abs((sizes == drawn - 1).double().mean() - part) <= error + 1e-12
    assert abs(1 - sizes.mean() / keys - p) <= error / keys + 1e-12


@pytest.mark.parametrize("share", ["queries", "heads"])
@pytest.mark.parametrize("keys", [1, 2, 3, 4])
def test_shared_sets_keep_one_key_at_least(keys, share):
    assert (kept(DropKey(0.99, share=share), (300, 3, 1, keys)).sum(-1) == 1).all()


def test_shared_sets_choose_every_key_and_every_pair_equally_often():
    masks = [kept(DropKey(0.5, share="queries"), (100, 20, 1, 5), seed)[:, :, 0].flatten(0, 1) for seed in range(10)]
    dropped = (~torch.cat(masks)).numpy()
    sizes = dropped.sum(1)
    for size in (2, 3):  # ⌊2.5⌋ dropped, or one more: the coin must not favour any key either
        rows = dropped[sizes == size]
        counts = [rows[:, list(keys)].all(1).sum() for keys in itertools.combinations(range(5), size)]
        chance = 1 / len(counts)
        assert sum(counts) == len(rows) > 9000
        assert np.abs(np.array(counts) / len(rows) - chance).max() < 4 * math.sqrt(chance * (1 - chance) / len(rows))


def test_shared_keys_can_simply_be_gathered():
    q, k, v = randn(2, 3, 5, 8, seed=1), randn(2, 3, 16, 8, seed=2), randn(2, 3, 16, 8, seed=3)
    method = DropKey(0.25, share="queries")
    indices = kept(method, (2, 3, 5, 16), 4)[:, :, 0].nonzero()[:, 2].view(2, 3, 12, 1).expand(-1, -1, -1, 8)
    expected = F.scaled_dot_product_attention(q, k.gather(2, indices), v.gather(2, indices))
    torch.testing.assert_close(attention(q, k, v, methods=[method], seed=4), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("share", ["queries", "heads"])
def test_a_shared_set_spares_each_row_that_would_lose_all_that_it_sees(share):
    method, shape = DropKey(0.8, share=share), (20, 2, 5, 5)  # exactly one of five keys stays
    mask = kept_in_attention(method, shape, is_causal=True)
    keys = kept(method, shape).expand(-1, 2, 1, -1).double().argmax(-1)[..., 0]
    assert set(keys.flatten().tolist()) == set(range(5))
    for sample, head, query in itertools.product(range(20), range(2), range(5)):
        key = int(keys[sample, head])
        seen = [key] if key <= query else list(range(query + 1))
        assert mask[sample, head, query].nonzero().flatten().tolist() == seen


# Structures on the image grid.

GRIDS = [(8, 8), (6, 10), (9, 5)]


@pytest.mark.parametrize("p", [0.1, 0.4])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("w", [1, 3, 5])
@pytest.mark.parametrize("structure", ["block", "cross"])
def test_structures_drop_the_share_p(structure, w, grid, p):
    prefix = w // 2
    method = DropKey(p, structure=structure, w=w, grid=grid, prefix=prefix)
    mask = kept(method, (20, 5, 200, prefix + math.prod(grid)), seed=1)
    assert mask[..., :prefix].all()
    assert abs((~mask[..., prefix:]).double().mean() - p) < 0.01


def test_the_usual_dropblock_formula_would_miss_the_share():
    windows = np.minimum(np.minimum(np.arange(8) + 1, 8 - np.arange(8)), 3)  # of width 3 over each of 8 cells
    over = np.outer(windows, windows)
    usual = 0.3 / 9 * 64 / 36
    assert np.mean(1 - (1 - usual) ** over) == pytest.approx(0.256, abs=5e-4)
    assert np.mean(1 - (1 - seed_rate("block", (8, 8), 3, 0.3)) ** over) == pytest.approx(0.3, abs=1e-12)


def paint(structure, grid, w, row, column):
    """The cells that one seed drops; a block's seed is the middle of its window."""
    r, c = np.indices(grid)
    near_row, near_column = abs(r - row) <= w // 2, abs(c - column) <= w // 2
    return near_row & near_column if structure == "block" else near_row | near_column


@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
@pytest.mark.parametrize(
    ("structure", "grid", "w"),
    [
        *[("block", (2, 3), 1), ("block", (3, 3), 3), ("block", (5, 4), 3), ("block", (4, 6), 3)],
        *[("cross", (3, 3), 1), ("cross", (2, 5), 1), ("cross", (3, 3), 3), ("cross", (3, 4), 3)],
    ],
)
def test_seed_rate_agrees_with_every_outcome_counted(structure, grid, w, p):
    margin = w // 2 if structure == "block" else 0
    seeds = itertools.product(range(margin, grid[0] - margin), range(margin, grid[1] - margin))
    shapes = np.array([paint(structure, grid, w, *seed).ravel() for seed in seeds])
    outcomes = np.array(list(itertools.product((0, 1), repeat=len(shapes))))
    shares = ((outcomes @ shapes) > 0).mean(1)
    gamma = seed_rate(structure, grid, w, p)
    chances = gamma ** outcomes.sum(1) * (1 - gamma) ** (1 - outcomes).sum(1)
    assert chances @ shares == pytest.approx(p, abs=1e-9)


@pytest.mark.parametrize("grid", [(1, 1), (4, 5), (14, 14)], ids=str)
def test_cross_of_width_one_has_the_closed_form(grid):
    for p in (0.1, 0.5, 0.9):
        assert seed_rate("cross", grid, 1, p) == pytest.approx(1 - (1 - p) ** (1 / (sum(grid) - 1)), abs=1e-12)
        assert seed_rate("block", grid, 1, p) == pytest.approx(p, abs=1e-12)


@pytest.mark.parametrize("structure", ["block", "cross"])
def test_rate_zero_drops_nothing(structure):
    assert seed_rate(structure, (8, 8), 3, 0.0) == 0
    assert kept(DropKey(0.0, structure=structure, grid=(8, 8)), (2, 2, 50, 64)).all()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("w", [1, 3, 5])
def test_block_masks_are_unions_of_windows(w, grid):
    mask = kept(DropKey(0.3, structure="block", w=w, grid=grid, prefix=2), (5, 4, 10, 2 + math.prod(grid)))
    dropped = ~mask[..., 2:].reshape(-1, *grid).numpy()
    assert dropped.any()
    assert not dropped.all((1, 2)).all()
    full = sliding_window_view(dropped, (w, w), (1, 2)).all((-1, -2))
    painted = np.zeros_like(dropped)
    for i, j in itertools.product(range(w), range(w)):
        painted[:, i : i + full.shape[1], j : j + full.shape[2]] |= full
    assert np.array_equal(painted, dropped)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("w", [1, 3, 5])
def test_cross_masks_are_unions_of_whole_rows_and_columns(w, grid):
    mask = kept(DropKey(0.4, structure="cross", w=w, grid=grid), (5, 4, 30, math.prod(grid)))
    dropped = ~mask.reshape(-1, *grid).numpy()
    partial = dropped[dropped.any((1, 2)) & ~dropped.all((1, 2))]
    assert len(partial) > 20
    for image in partial:
        rows, columns = image.all(1), image.all(0)
        assert np.array_equal(image, rows[:, None] | columns)
        assert rows.any()
        assert columns.any()
        for stripes in (rows, columns):
            near = abs(np.subtract.outer(np.arange(len(stripes)), np.arange(len(stripes)))) <= w // 2
            middles = (~near | stripes).all(1)  # where a stripe of full width, cut at the border, could stand
            assert np.array_equal(near[middles].any(0), stripes)


def test_default_widths_are_three_for_block_and_one_for_cross():
    for structure, w in (("block", 3), ("cross", 1)):
        default, given = (DropKey(0.3, structure=structure, grid=(6, 6), w=width) for width in (None, w))
        assert torch.equal(kept(default, (2, 2, 5, 36)), kept(given, (2, 2, 5, 36)))


@pytest.mark.parametrize("structure", ["block", "cross"])
@pytest.mark.parametrize(("share", "sets"), [("none", 3 * 4 * 5), ("queries", 3 * 4), ("heads", 3)])
def test_structures_are_shared_like_single_keys(share, sets, structure):
    mask = kept_in_attention(DropKey(0.4, structure=structure, share=share, grid=(12, 12)), (3, 4, 5, 144))
    # A few sets have no window or stripe at all, and are alike.
    assert 0.8 * sets <= len({row.numpy().tobytes() for row in mask.reshape(-1, 144)}) <= sets
    first = mask[:, :1, :1] if share == "heads" else mask[:, :, :1] if share == "queries" else mask
    assert (mask == first).all()


def test_a_window_over_the_whole_grid_is_spared():
    method = DropKey(0.5, structure="block", grid=(3, 3))
    assert not kept(method, (4, 4, 9, 9)).all()
    assert kept_in_attention(method, (4, 4, 9, 9)).all()
    with_class_token = dataclasses.replace(method, prefix=1)
    assert torch.equal(kept_in_attention(with_class_token, (4, 4, 9, 10)), kept(with_class_token, (4, 4, 9, 10)))


def test_the_place_fills_in_grid_and_prefix():
    method = DropKey(0.4, structure="block", schedule="decreasing")
    here = method.at(Place(block=1, blocks=4, grid=(7, 5), prefix=2))
    assert here == DropKey(0.4 * 3 / 4, structure="block", grid=(7, 5), prefix=2)
    given = DropKey(0.4, structure="block", grid=(3, 9), prefix=1)
    assert given.at(Place(0, 4, grid=(7, 5), prefix=2)) == given
    plain = DropKey(0.4)
    assert plain.at(Place(0, 4, grid=(7, 5), prefix=2)) == plain


# Errors.


def test_a_structure_without_a_grid_is_refused():
    with pytest.raises(
        ParameterError, match=r"structure=cross needs .* grid.*'layers\.3\.attn'.*grid=\[rows, columns\]"
    ):
        DropKey(0.1, structure="cross").at(Place(0, 4, name="layers.3.attn"))
    with pytest.raises(ParameterError, match="grid=None"):
        kept(DropKey(0.1, structure="cross"), (1, 1, 4, 4))


@pytest.mark.parametrize("structure", ["block", "cross"])
def test_a_window_larger_than_the_grid_is_refused(structure):
    for grid in ((3, 8), (8, 3)):
        with pytest.raises(ParameterError, match=rf"{structure} of width w=5 is larger than the grid of {grid[0]} × "):
            DropKey(0.1, structure=structure, w=5, grid=grid)
        with pytest.raises(ParameterError, match=rf"{structure} of width w=5 is larger than the grid"):
            DropKey(0.1, structure=structure, w=5).at(Place(0, 1, grid=grid))
    assert DropKey(0.1, structure=structure, w=3, grid=(3, 8)).width == 3


@pytest.mark.parametrize(("keys", "prefix"), [(15, None), (16, 1), (18, 1), (17, None)])
def test_keys_that_do_not_fill_the_grid_are_refused(keys, prefix):
    method = DropKey(0.1, structure="block", grid=(4, 4), prefix=prefix)
    with pytest.raises(ParameterError, match=rf"this call has {keys} keys, grid=\(4, 4\), prefix={prefix or 0}"):
        attention(*(randn(1, 1, keys, 4) for _ in range(3)), methods=[method])


@pytest.mark.parametrize("w", [0, 2, 4, -1, 1.5, True, "3"])
def test_width_must_be_odd(w):
    with pytest.raises(ParameterError, match=rf"w must be an odd integer of at least 1, got {w!r}"):
        DropKey(0.1, structure="block", w=w)


@pytest.mark.parametrize("p", [-0.01, 1, 1.0, 3, math.nan, math.inf, "0.1", None, True])
def test_rate_must_be_a_number_below_one(p):
    with pytest.raises(ParameterError, match=rf"p must be a number in \[0, 1\), got {p!r}"):
        DropKey(p)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": "query"}, "share must be one of none, queries, heads; got 'query'"),
        ({"structure": "stripe"}, "structure must be one of none, block, cross; got 'stripe'"),
        ({"w": 3}, "w belongs to structure"),
        ({"grid": (4, 4)}, "grid belongs to structure"),
        ({"prefix": 1}, "prefix belongs to structure"),
        ({"structure": "block", "grid": (4,)}, "grid must be"),
        ({"structure": "block", "grid": (4, 4, 4)}, "grid must be"),
        ({"structure": "block", "grid": (0, 4)}, "grid must be"),
        ({"structure": "block", "grid": (4, 4.5)}, "grid must be"),
        ({"structure": "block", "grid": 14}, "grid must be"),
        ({"structure": "block", "grid": (4, 4), "prefix": -1}, "prefix must be"),
        ({"structure": "block", "grid": (4, 4), "prefix": 0.5}, "prefix must be"),
        ({"structure": "block", "prefix": -1}, "prefix must be"),
    ],
)
def test_wrong_parameters_are_named(arguments, message):
    with pytest.raises(ParameterError, match=message):
        DropKey(0.1, **arguments)
