"""Decisions, power and looks: against scipy, against formulas of others written anew, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attemper.lab.study.decisions import adjusted, decide, default_margin, holm_levels
from attemper.lab.study.looks import level_at, levels, schedule
from attemper.lab.study.power import chance_of_decision, seeds_to_decide, smallest_difference
from attemper.lab.study.statistics import Difference, holm, paired_difference

ps = st.lists(st.one_of(st.none(), st.floats(1e-9, 1)), min_size=1, max_size=8)


@given(ps)
def test_a_level_is_reached_exactly_where_the_corrected_p_is_significant(found: list[float | None]) -> None:
    for p, level, corrected in zip(found, holm_levels(found), holm(found), strict=True):
        assert p is None or corrected is None or (p <= level) == (corrected <= 0.05 * (1 + 1e-12))


def differences(rng: np.random.Generator, recipes: int, seeds: int, effect: float = 0.0) -> list[Difference]:
    found = [paired_difference(list(rng.normal(effect, 0.01, seeds)), [0.0] * seeds) for _ in range(recipes)]
    return [each for each in found if each is not None]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 12), st.floats(0.0, 0.02))
def test_one_interval_decides(seed: int, recipes: int, seeds: int, effect: float) -> None:
    """The interval excludes zero where the corrected p is at most 0.05; inside of the margin it is equivalent."""
    margin = 0.006
    for each in adjusted(differences(np.random.default_rng(seed), recipes, seeds, effect)):
        assert each is not None
        answer, inside = decide(each, margin).answer, -margin < each["low"] and each["high"] < margin
        assert abs(each["adjusted"] - 0.05) < 1e-6 or (each["low"] > 0 or each["high"] < 0) == (each["adjusted"] < 0.05)
        expected = "equivalent" if inside else "better" if each["low"] > 0 else "worse" if each["high"] < 0 else None
        assert answer == (expected or "undecided")
        half = scipy.stats.t.ppf(1 - each["level"] / 2, seeds - 1) * each["spread"] / math.sqrt(seeds)
        assert (each["low"], each["high"]) == pytest.approx((each["mean"] - half, each["mean"] + half))
        assert each["low"] <= each["alone"][0] + 1e-12
        assert each["high"] >= each["alone"][1] - 1e-12


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=10), st.floats(0.001, 0.05))
def test_probabilities_are_those_of_the_bayesian_t_test(values: list[float], margin: float) -> None:
    """As Corani and Benavoli (2015), and baycomp, have it for independent runs: a scaled t distribution, cut in "
    "three."""
    assume(np.std(values, ddof=1) > 1e-4)
    found = paired_difference(values, [0.0] * len(values))
    posterior = scipy.stats.t(len(values) - 1, np.mean(values), np.std(values, ddof=1) / math.sqrt(len(values)))
    decision = decide(adjusted([found])[0] or {}, margin)
    assert decision.better == pytest.approx(1 - posterior.cdf(0), abs=1e-9)
    assert decision.within == pytest.approx(posterior.cdf(margin) - posterior.cdf(-margin), abs=1e-9)


def test_the_default_margin_is_the_smaller_of_half_a_point_and_a_tenth_of_the_errors() -> None:
    assert default_margin("accuracy", 0.5) == 0.005
    assert default_margin("accuracy", 0.98) == pytest.approx(0.002)
    assert default_margin("mAP", 0.61) == pytest.approx(0.0122)
    assert default_margin("accuracy", None) is None


# ---------------------------------------------------------------------------------------------------------------- power
@pytest.mark.parametrize(
    ("seeds", "effect", "level"), [(2, 3.0, 0.05), (3, 1.0, 0.05), (5, 2.0, 0.01), (10, 1.0, 0.05), (40, 0.3, 0.005)]
)
def test_power_is_that_of_the_noncentral_t_distribution(seeds: int, effect: float, level: float) -> None:
    quantile = scipy.stats.t.ppf(1 - level / 2, seeds - 1)
    shifted = scipy.stats.nct(seeds - 1, effect * math.sqrt(seeds))
    expected = 1 - shifted.cdf(quantile) + shifted.cdf(-quantile)
    assert chance_of_decision(seeds, effect, 1.0, level) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("seeds", "effect"), [(5, 0.0), (12, 0.3), (40, 0.0), (40, 0.5), (25, 0.9)])
def test_the_chance_of_a_decision_is_how_often_simulated_studies_decide(seeds: int, effect: float) -> None:
    margin, level, studies = 0.6, 0.02, 20_000
    values = np.random.default_rng(3).normal(effect, 1.0, (studies, seeds))
    mean = values.mean(1)
    half = scipy.stats.t.ppf(1 - level / 2, seeds - 1) * values.std(1, ddof=1) / math.sqrt(seeds)
    decided = (np.abs(mean) > half) | (np.abs(mean) + half < margin)
    expected = chance_of_decision(seeds, effect, 1.0, level, margin)
    assert abs(decided.mean() - expected) < 4 * math.sqrt(0.25 / studies)


@settings(deadline=None, max_examples=30)
@given(st.floats(0.05, 3.0), st.floats(0.001, 0.1), st.sampled_from([0.0, 0.5]))
def test_so_many_seeds_decide_and_one_less_does_not(effect: float, level: float, margin: float) -> None:
    seeds = seeds_to_decide(effect, 1.0, level, margin)
    assert seeds is not None
    assert chance_of_decision(seeds, effect, 1.0, level, margin) >= 0.8
    assert seeds == 2 or chance_of_decision(seeds - 1, effect, 1.0, level, margin) < 0.8


@given(st.integers(2, 50), st.floats(1e-4, 0.1), st.floats(0.001, 0.1))
@settings(deadline=None, max_examples=30)
def test_the_smallest_difference_is_found_in_80_of_100_studies(seeds: int, spread: float, level: float) -> None:
    smallest = smallest_difference(seeds, spread, level)
    assert smallest is not None
    assert chance_of_decision(seeds, smallest, spread, level) == pytest.approx(0.8, abs=1e-3)


def test_what_cannot_be_decided_is_not_promised() -> None:
    assert seeds_to_decide(0.0, 1.0, 0.05, most=1000) is None
    assert smallest_difference(1, 1.0, 0.05) is None
    assert chance_of_decision(1, 10.0, 1.0, 0.05) == 0


# ---------------------------------------------------------------------------------------------------------------- looks
def obrien_fleming(share: float) -> float:
    """Lan and DeMets's spending function of that name, two-sided at 5 %, as a share of it."""
    return float(4 * (1 - scipy.special.ndtr(scipy.special.ndtri(1 - 0.0125) / math.sqrt(share))) / 0.05)


@pytest.mark.parametrize(
    ("items", "seeds", "answer"), [(120, 3, "undecided"), (120, 12, "equivalent"), (5000, 3, "equivalent")]
)
def test_equal_counts_of_few_items_are_no_proof_of_equality(items: int, seeds: int, answer: str) -> None:
    (found,) = adjusted([paired_difference([0.73] * seeds, [0.73] * seeds)])
    assert found is not None
    decision = decide(found, 0.005, 1 / items)
    assert decision.answer == answer
    assert (decision.more is not None) == (answer == "undecided")
    # What two roundings to whole items hide has the variance of two uniform numbers of that width.
    reach = scipy.stats.t.ppf(0.975, seeds - 1) * math.sqrt(2 / 12) / items / math.sqrt(seeds)
    assert (reach < 0.005) == (answer == "equivalent")
    assert decide(found, 0.005).answer == "equivalent"  # of what is known to be the same thing


def test_levels_are_those_of_published_tables() -> None:
    """Bounds of five looks: Jennison and Turnbull (2000), Lan-DeMets with the O'Brien-Fleming kind of spending."""
    bounds = [-scipy.special.ndtri(level / 2) for level in levels((1, 2, 3, 4, 5), 0.05, obrien_fleming)]
    assert bounds == pytest.approx([4.877, 3.357, 2.680, 2.290, 2.031], abs=2e-3)
    assert levels((7,), 0.05) == pytest.approx([0.05])


def test_a_second_look_spends_what_an_integral_says() -> None:
    first, second = (-scipy.special.ndtri(level / 2) for level in levels((10, 20), 0.05))
    assert 2 * (1 - scipy.special.ndtr(first)) == pytest.approx(0.05 / 8)
    step = math.sqrt(0.5)

    def stopped(z: float) -> float:
        """A path that was at z·√½ half-way crosses the second bound."""
        normal = scipy.stats.norm
        beyond = normal.sf((second - z * step) / step) + normal.cdf((-second - z * step) / step)
        return float(beyond * normal.pdf(z))

    assert scipy.integrate.quad(stopped, -first, first)[0] == pytest.approx(0.05 * 7 / 8, rel=1e-4)


def test_looks_are_few_and_end_with_all_seeds() -> None:
    for initial, most in ((5, 40), (3, 4), (2, 100), (5, 5)):
        looks = schedule(initial, most)
        assert (looks[0], looks[-1]) == (initial, most)
        assert len(looks) <= 11
        assert list(looks) == sorted(set(looks))
        assert level_at(initial - 1, 0.05, looks) == 0
        assert level_at(most, 0.05, looks) == levels(looks, 0.05)[-1]


def sequential(effect: float, studies: int, *, initial: int = 5, most: int = 40, recipes: int = 1) -> tuple[float, ...]:
    """Shares of simulated studies: any false or true "differs" when looked at on the way, and with all seeds at "
    "once."""
    looks = schedule(initial, most)
    values = np.random.default_rng(11).normal(effect, 1.0, (studies, recipes, most))
    on_the_way = np.zeros((studies, recipes), bool)
    for n in looks:
        now = values[..., :n]
        t = now.mean(-1) / (now.std(-1, ddof=1) / math.sqrt(n))
        on_the_way |= 2 * scipy.special.stdtr(n - 1, -np.abs(t)) <= level_at(n, 0.05 / recipes, looks)
    at_once = 2 * scipy.special.stdtr(most - 1, -np.abs(t)) <= 0.05 / recipes
    return float(on_the_way.any(1).mean()), float(at_once.any(1).mean())


@pytest.mark.parametrize(("initial", "most"), [(5, 40), (3, 10), (3, 40)])
def test_looking_finds_what_is_not_there_in_at_most_6_of_100_studies(initial: int, most: int) -> None:
    assert sequential(0.0, 20_000, initial=initial, most=most)[0] <= 0.06
    assert sequential(0.0, 20_000, initial=initial, most=most, recipes=4)[0] <= 0.06


@pytest.mark.parametrize("effect", [0.3, 0.4545, 0.6])
def test_looking_costs_at_most_3_points_of_power(effect: float) -> None:
    on_the_way, at_once = sequential(effect, 20_000)
    assert on_the_way >= at_once - 0.03
