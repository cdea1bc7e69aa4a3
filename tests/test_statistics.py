"""Statistics: against scipy, against their definitions, by simulation, and in words."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attemper.lab.study.statistics import Rank, deviation, holm, mean, paired_difference, ranks, share_interval

shares = st.floats(0, 1)
samples = st.integers(2, 12).flatmap(lambda n: st.tuples(*[st.lists(shares, min_size=n, max_size=n)] * 2))


@given(st.lists(shares, min_size=2, max_size=20))
def test_mean_and_deviation_are_numpys(values: list[float]) -> None:
    assert mean(values) == pytest.approx(np.mean(values))
    assert deviation(values) == pytest.approx(np.std(values, ddof=1), abs=1e-12)


def test_nothing_has_no_mean_and_one_value_no_deviation() -> None:
    assert mean([]) is None
    assert deviation([0.5]) is None


@settings(deadline=None)
@given(samples, st.sampled_from([0.9, 0.95, 0.99]))
def test_the_paired_difference_is_scipys(pair: tuple[list[float], list[float]], confidence: float) -> None:
    ours, baseline = pair
    assume(np.std(np.subtract(ours, baseline), ddof=1) > 1e-6)
    found = paired_difference(ours, baseline, confidence)
    theirs = scipy.stats.ttest_rel(ours, baseline)
    interval = theirs.confidence_interval(confidence)
    assert found is not None
    assert found.mean == pytest.approx(np.mean(ours) - np.mean(baseline), abs=1e-12)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-9)
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-12)


@given(st.integers(1, 500), st.data())
def test_the_interval_of_a_share_is_scipys(items: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, items))
    theirs = scipy.stats.binomtest(right, items).proportion_ci(method="wilson")
    assert share_interval(right / items, items) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_pairs_with_a_missing_run_are_left_out() -> None:
    whole = paired_difference([0.9, 0.8, 0.7], [0.8, 0.75, 0.65])
    assert paired_difference([0.9, None, 0.8, 0.7, 0.1], [0.8, 0.2, 0.75, 0.65, None]) == whole
    assert paired_difference([None, 0.1], [0.1, None]) is None


def test_without_spread_there_is_a_mean_and_no_interval_and_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ours in ([0.8], [0.8, 0.9], [0.8, 0.8, 0.8]):
            found = paired_difference(ours, [value - 0.1 for value in ours])
            assert found is not None
            assert found.mean == pytest.approx(0.1)
            assert (found.low, found.high, found.p) == (None, None, None)
        same = paired_difference([0.5, 0.5], [0.5, 0.5])
        assert same is not None
        assert (same.mean, same.p) == (0.0, None)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_the_closure_of_bonferroni(ps: list[float]) -> None:
    """Its definition: a hypothesis falls when Bonferroni rejects every set of hypotheses that it belongs to."""
    sets = [s for size in range(1, len(ps) + 1) for s in itertools.combinations(range(len(ps)), size)]
    closed = [max(min(1.0, len(s) * min(ps[j] for j in s)) for s in sets if i in s) for i in range(len(ps))]
    assert holm(ps) == pytest.approx(closed)


def test_holm_counts_only_what_was_tested() -> None:
    assert holm([None, 0.02, None]) == [None, 0.02, None]
    assert holm([]) == []


def simulated(studies: int, recipes: int, seeds: int, effect: float) -> np.ndarray:
    """Accuracies (studies, recipes, seeds) as studies have them: the seed moves all recipes alike."""
    rng = np.random.default_rng(5)
    luck = rng.normal(0.8, 0.02, (studies, 1, seeds))
    values = luck + rng.normal(0, 0.01, (studies, recipes, seeds))
    values[:, 1:] += effect
    return values


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_holds_the_truth_in_95_of_100_studies(seeds: int) -> None:
    held = 0
    for study in simulated(2000, 2, seeds, effect=0.004):
        found = paired_difference(study[1].tolist(), study[0].tolist())
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.004 <= found.high
    assert 0.93 <= held / 2000 <= 0.97


def test_where_nothing_helps_a_study_says_otherwise_in_at_most_5_of_100() -> None:
    wrong = 0
    for study in simulated(2000, 8, 5, effect=0.0):
        baseline, *others = study.tolist()
        found = [paired_difference(row, baseline) for row in others]
        adjusted = holm([difference.p for difference in found if difference is not None])
        wrong += any(p is not None and p <= 0.05 for p in adjusted)
    assert wrong / 2000 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 2000)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(shares, min_size=n, max_size=n), min_size=1, max_size=5)))
def test_ranks_are_scipys_and_their_interval_is_around_them(rows: list[list[float]]) -> None:
    found = ranks({str(index): row for index, row in enumerate(rows)})
    plain = scipy.stats.rankdata([-round(float(np.mean(row)), 12) for row in rows])
    for index, row in enumerate(rows):
        rank = found[str(index)]
        assert rank is not None
        assert 1 <= rank.mean <= len(rows)
        if len(row) == 1:
            assert rank == Rank(plain[index], None, None)
        else:
            assert rank.low is not None
            assert rank.high is not None
            assert 1 <= rank.low <= rank.high <= len(rows)
    total = sum(rank.mean for rank in found.values() if rank is not None)
    assert total == pytest.approx(len(rows) * (len(rows) + 1) / 2)


def test_a_rank_is_as_certain_as_its_seeds_are() -> None:
    clear = ranks({"a": [0.9, 0.91, 0.92], "b": [0.8, 0.81, 0.82]})
    assert clear == {"a": Rank(1, 1, 1), "b": Rank(2, 2, 2)}
    mixed = ranks({"a": [0.9, 0.7, 0.8], "b": [0.8, 0.8, 0.79]})["a"]
    assert mixed is not None
    assert (mixed.low, mixed.high) == (1, 2)
    assert ranks({"a": [0.8, 0.7], "b": [0.7, 0.8]}) == ranks({"a": [0.8, 0.7], "b": [0.7, 0.8]})
    tied = ranks({"a": [0.1, 0.2, 0.3], "b": [0.3, 0.1, 0.2], "c": [None, None, None]})
    assert tied["c"] is None
    assert ranks({"a": [0.1], "b": [None]}) == {"a": Rank(1, None, None), "b": None}
    assert ranks({"a": [0.1, None], "b": [None, 0.2]}) == {"a": None, "b": None}
