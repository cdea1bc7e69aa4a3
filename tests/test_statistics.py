"""Statistics: against scipy, against their definitions, by simulation, and in words."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attemper.lab.study.statistics import Rank, deviation, holm, mean, paired_difference, ranks
from attemper.lab.study.verdict import verdict

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


def row(name: str, test: list[float | None], difference: dict[str, Any] | None = None, diverged: int = 0) -> Any:
    recipe = "none" if name == "none" else f"{name}(0.1)"
    return {"name": name, "recipe": recipe, "test": test, "difference": difference, "diverged": diverged}


def study(baseline: list[float | None], diverged: int = 0, **others: list[float | None]) -> list[Any]:
    """Rows of a summary, compared."""
    found = {name: paired_difference(test, baseline) for name, test in others.items()}
    adjusted = holm([None if d is None else d.p for d in found.values()])
    rows = [
        row(name, others[name], None if d is None else {**vars(d), "adjusted": p}, diverged)
        for (name, d), p in zip(found.items(), adjusted, strict=True)
    ]
    return [row("none", baseline), *rows]


BASE: list[float | None] = [0.80, 0.82, 0.81, 0.79, 0.80]
BETTER: list[float | None] = [0.85, 0.875, 0.86, 0.842, 0.849]
LIKE: list[float | None] = [0.81, 0.80, 0.82, 0.79, 0.80]


def test_a_better_recipe_is_named_with_its_interval_and_corrected_p() -> None:
    said = verdict(study(BASE, dropkey=BETTER, cb=LIKE), seeds=5, missing=0)
    assert said.startswith("dropkey is better than the baseline `none` by +5.12 points (95 % interval +4.")
    assert "p < 0.001 after correction for 2 comparisons." in said
    assert said.endswith("The other recipe cannot be distinguished from the baseline with 5 seeds.")


def test_no_better_recipe_is_a_fine_answer() -> None:
    said = verdict(study(BASE, cb=LIKE), seeds=5, missing=0)
    assert said.startswith("No recipe is better than the baseline `none` at this budget, as far as 5 seeds can tell")


def test_a_worse_recipe_is_called_worse() -> None:
    said = verdict(study(BETTER, cb=BASE, blur=LIKE), seeds=5, missing=0)
    assert "No recipe is better than the baseline `none`" in said
    assert "blur (−5.12 points) are worse than the baseline." in said


def test_one_seed_is_no_evidence() -> None:
    said = verdict(study([0.8], cb=[0.9]), seeds=1, missing=0)
    assert said.startswith(
        "One seed cannot tell a difference from chance: here cb came out highest, +10.00 points above"
    )
    assert "better than" not in said


def test_two_seeds_come_with_a_warning() -> None:
    assert "Two seeds give very wide intervals" in verdict(study([0.8, 0.81], cb=[0.9, 0.95]), seeds=2, missing=0)


def test_the_same_numbers_everywhere_are_said_to_be_the_same() -> None:
    said = verdict(study(BASE, cb=BASE), seeds=5, missing=0)
    assert "cb scores exactly as the baseline on every seed." in said
    shifted: list[float | None] = [0.75, 0.5]
    said = verdict(study(shifted, cb=[1.0, 0.75]), seeds=2, missing=0)
    assert "cb differs by +25.00 points on every seed alike, which leaves no spread to judge it by." in said
    assert "cb is better" not in said


def test_missing_and_diverged_runs_are_said_first_and_last() -> None:
    said = verdict(study(BASE, diverged=2, cb=LIKE), seeds=5, missing=3, failed=1)
    assert said.startswith(
        "Not complete: 3 runs are missing (1 given up after errors), so what follows is provisional."
    )
    assert said.endswith("Runs diverged with cb (2 of 5); they count with what they had reached before.")


def test_nothing_to_compare_is_said_too() -> None:
    assert "nothing to compare" in verdict(study(BASE), seeds=5, missing=0)
    assert "can be compared with the baseline `none` yet" in verdict(study([None], cb=[0.5]), seeds=1, missing=1)
