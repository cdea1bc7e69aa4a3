"""The order of large data sets: every sample once, wherever an epoch is entered, and whoever shares it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attemper.lab.tasks.streaming.order import EpochOrder, Selection
from attemper.lab.training.ranks import Ranks
from shards import members


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    counts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=60))
    ends = np.cumsum(counts)
    whole = Selection(ends - counts, np.array(counts), by_unit=draw(st.booleans()))
    held = draw(st.integers(0, len(whole)))
    return whole.divide(held, draw(st.integers(0, 3)))[draw(st.integers(0, 1))] if draw(st.booleans()) else whole


@settings(max_examples=60, deadline=None)
@given(selections(), st.integers(1, 5), st.integers(1, 20), st.integers(1, 9), st.integers(1, 6), st.data())
def test_an_epoch_has_every_sample_once_wherever_it_is_entered_and_whoever_shares_it(
    selection: Selection, lanes: int, buffer: int, batch_size: int, ranks: int, data: st.DataObject
) -> None:
    order = EpochOrder(selection, seed=1, epoch=2, lanes=lanes, buffer=buffer)
    assert len(order) == len(selection)
    batches = [order.stretch(b * batch_size, (b + 1) * batch_size) for b in range(len(selection) // batch_size)]
    rest = order.stretch(len(batches) * batch_size, len(selection))
    assert sorted(torch.cat([*batches, rest]).tolist()) == members(selection)

    entered = data.draw(st.integers(0, len(batches)))
    later = EpochOrder(selection, seed=1, epoch=2, lanes=lanes, buffer=buffer)
    for number in range(entered, len(batches)):
        again = later.stretch(number * batch_size, (number + 1) * batch_size)
        assert torch.equal(again, batches[number])
        parts = [again[Ranks(rank, ranks).part(batch_size)] for rank in range(ranks)]
        assert torch.equal(torch.cat(parts), batches[number])


@settings(max_examples=60, deadline=None)
@given(selections(), st.integers(0, 5), st.data())
def test_a_division_loses_nothing_shares_nothing_and_is_a_function_of_its_seed(
    selection: Selection, seed: int, data: st.DataObject
) -> None:
    held = data.draw(st.integers(0, len(selection)))
    exactly = data.draw(st.booleans())
    kept, out = selection.divide(held, seed, exactly=exactly)
    assert sorted(members(kept) + members(out)) == members(selection)
    assert not set(members(kept)) & set(members(out))
    assert members(selection.divide(held, seed, exactly=exactly)[1]) == members(out)
    if exactly or not selection.by_unit:
        assert len(out) == held
    for part in (kept, out):
        assert len(part) == len(members(part))
        assert part.stored(torch.arange(len(part))).tolist() == members(part)
        taken = data.draw(st.permutations(range(len(part))))[: len(part) // 2]
        assert members(part.take(torch.tensor(taken, dtype=torch.int64))) == [members(part)[each] for each in taken]


def many_units(by_unit: bool) -> Selection:
    starts = np.arange(0, 4000, 10)
    return Selection(starts, np.full(400, 10), by_unit)


def test_orders_and_divisions_differ_by_seed_and_epoch_and_are_well_mixed() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return EpochOrder(many_units(False), seed, epoch).stretch(0, 200).tolist()

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(*each)) for each in ((0, 1), (0, 2), (1, 1))}) == 3
    assert len({sample // 10 for sample in order(0, 1)}) > 100, "a batch comes from many units"
    assert members(many_units(False).divide(40, 0)[1]) != members(many_units(False).divide(40, 1)[1])


def test_units_that_are_read_as_a_whole_are_held_out_as_a_whole_and_shared_by_few_ranks() -> None:
    kept, out = many_units(by_unit=True).divide(800, seed=0)
    assert len(out.counts) == 80
    assert set(out.counts.tolist()) == {10}
    order = EpochOrder(kept, seed=0, epoch=1)
    read: list[set[int]] = [set() for _ in range(4)]
    for batch in range(3200 // 64):
        samples = order.stretch(64 * batch, 64 * batch + 64)
        for rank in range(4):
            read[rank] |= {sample // 10 for sample in samples[Ranks(rank, 4).part(64)].tolist()}
    assert sum(map(len, read)) <= 1.1 * 320, "together they read hardly more than one process would"


def test_a_class_that_fills_its_shards_is_held_out_in_its_proportion() -> None:
    _, out = Selection(np.arange(0, 1000, 100), np.full(10, 100)).divide(100, seed=5)
    assert out.counts.tolist() == [10] * 10
