"""Per-layer rates: every kind of schedule, what p means in it, and how a new rate changes it."""

from __future__ import annotations

import math

import pytest

from attemper import parse
from attemper.errors import ParameterError
from attemper.methods import DropAttention, DropKey, Place

BOTH = pytest.mark.parametrize("kind", [DropKey, DropAttention])


def wave(l, L):
    return 0.1 + 0.2 * l / L


def label(schedule):
    return getattr(schedule, "__name__", str(schedule))


# The rates of each kind.


@BOTH
@pytest.mark.parametrize("blocks", [1, 2, 7, 12])
def test_decreasing_goes_from_p_down_to_p_over_L(kind, blocks):
    rates = kind(0.3, schedule="decreasing").rates(blocks)
    assert rates == pytest.approx([0.3 * (blocks - l) / blocks for l in range(blocks)], abs=1e-15)
    assert rates[0] == 0.3
    assert rates[-1] == pytest.approx(0.3 / blocks)


@BOTH
@pytest.mark.parametrize("blocks", [1, 2, 7, 12])
def test_increasing_is_the_mirror_image_of_decreasing(kind, blocks):
    for match in ("max", "mean"):
        increasing = kind(0.3, schedule="increasing", match=match).rates(blocks)
        assert increasing == kind(0.3, schedule="decreasing", match=match).rates(blocks)[::-1]


@BOTH
def test_constant_is_the_default(kind):
    for match in ("max", "mean"):
        assert kind(0.3, match=match).rates(5) == [0.3] * 5
    assert kind(0.3) == kind(0.3, schedule="constant", match="max")


@BOTH
def test_a_list_gives_each_block_its_rate(kind):
    assert kind(schedule=[0.1, 0, 0.5]).rates(3) == [0.1, 0.0, 0.5]
    assert kind(schedule=(0.1, 0, 0.5)) == kind(schedule=[0.1, 0, 0.5])
    assert hash(kind(schedule=[0.1, 0, 0.5])) == hash(kind(schedule=(0.1, 0, 0.5)))


@BOTH
def test_a_function_of_block_and_blocks_gives_the_rate(kind):
    assert kind(schedule=wave).rates(4) == [wave(l, 4) for l in range(4)]


# p as the largest rate, or as the mean.


@pytest.mark.parametrize("schedule", ["constant", "decreasing", "increasing"])
@pytest.mark.parametrize("blocks", [1, 2, 3, 12])
def test_match_says_what_p_is_of_the_rates(blocks, schedule):
    assert max(DropKey(0.3, schedule=schedule).rates(blocks)) == pytest.approx(0.3)
    mean = DropKey(0.3, schedule=schedule, match="mean").rates(blocks)
    assert sum(mean) / blocks == pytest.approx(0.3)


@pytest.mark.parametrize("blocks", [1, 2, 3, 12])
def test_mean_starts_a_decreasing_schedule_at_p_2L_over_L_plus_1(blocks):
    rates = DropKey(0.3, schedule="decreasing", match="mean").rates(blocks)
    first = 0.3 * 2 * blocks / (blocks + 1)
    assert rates == pytest.approx([first * (blocks - l) / blocks for l in range(blocks)])


@pytest.mark.parametrize("schedule", ["decreasing", "increasing"])
def test_a_mean_that_needs_a_rate_of_one_is_refused(schedule):
    limit = 13 / 24  # (L + 1) / 2L with L = 12
    fits = DropKey(limit - 1e-6, schedule=schedule, match="mean")
    assert max(fits.rates(12)) < 1
    for p in (limit + 1e-9, 0.9):
        with pytest.raises(ParameterError, match=rf"schedule={schedule}, match=mean over 12 blocks needs a rate of 1"):
            DropKey(p, schedule=schedule, match="mean").rates(12)
    with pytest.raises(ParameterError, match="needs a rate of 1 in one of them"):
        DropKey(0.75, schedule=schedule, match="mean").rates(2)


# One block's rate.


@BOTH
@pytest.mark.parametrize("schedule", ["decreasing", "increasing", (0.1, 0.2, 0.3, 0.4), wave], ids=label)
def test_a_place_settles_the_rate(kind, schedule):
    method = kind(0.4, schedule=schedule)
    for l, rate in enumerate(method.rates(4)):
        here = method.at(Place(block=l, blocks=4))
        assert here == kind(rate)
        assert here.at(Place(block=0, blocks=9)) == here


def test_a_place_keeps_every_other_parameter():
    method = DropAttention(0.4, schedule="decreasing", unit="column", w=3, rescale="inverted")
    assert method.at(Place(1, 2)) == DropAttention(0.2, unit="column", w=3, rescale="inverted")


def test_only_a_constant_rate_of_zero_is_idle():
    assert DropKey(0.0).idle
    assert DropKey(0.4, schedule=[0.0, 0.4]).at(Place(0, 2)).idle
    for method in (DropKey(0.1), DropKey(0.0, schedule=[0.0, 0.1]), DropKey(0.0, schedule=wave)):
        assert not method.idle


# A new rate for a schedule.


@BOTH
@pytest.mark.parametrize("match", ["max", "mean"])
@pytest.mark.parametrize("schedule", ["constant", "decreasing", "increasing"])
def test_a_named_schedule_takes_a_new_rate_as_its_p(kind, schedule, match):
    method = kind(0.3, schedule=schedule, match=match)
    assert method.with_rate(0.1) == kind(0.1, schedule=schedule, match=match)
    assert method == kind(0.3, schedule=schedule, match=match)


@BOTH
@pytest.mark.parametrize("schedule", [(0.1, 0.2, 0.4), wave], ids=label)
def test_given_rates_are_scaled_to_a_new_largest_or_mean_rate(kind, schedule):
    for match in ("max", "mean"):
        method = kind(schedule=schedule, match=match)
        old, new = method.rates(3), method.with_rate(0.05).rates(3)
        assert (max(new) if match == "max" else sum(new) / 3) == pytest.approx(0.05)
        assert [rate / new[0] for rate in new] == pytest.approx([rate / old[0] for rate in old])
        assert method.rates(3) == old
        assert method.with_rate(0.05).p == 0.05


def test_a_new_rate_keeps_every_other_parameter():
    method = DropAttention(0.4, schedule=[0.2, 0.4], unit="column", w=3, rescale="inverted").with_rate(0.2)
    assert (method.unit, method.w, method.rescale, method.match) == ("column", 3, "inverted", "max")
    assert method.rates(2) == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("schedule", ["decreasing", (0.1, 0.2, 0.4), wave], ids=label)
@pytest.mark.parametrize("between", [0.3, 0.0])
def test_only_the_last_of_several_new_rates_counts(schedule, between):
    method = DropKey(0.4, schedule=schedule)
    assert method.with_rate(0.0).rates(3) == [0.0] * 3
    twice = method.with_rate(between).with_rate(0.2)
    assert twice.rates(3) == pytest.approx(method.with_rate(0.2).rates(3))


@pytest.mark.parametrize("rate", [-0.1, 1, math.nan, "0.1", None])
def test_a_new_rate_is_checked(rate):
    with pytest.raises(ParameterError, match=rf"rate must be a number in \[0, 1\), got {rate!r}"):
        DropKey(0.3).with_rate(rate)


def test_a_new_mean_that_pushes_a_rate_to_one_is_refused():
    method = DropKey(schedule=[0.1, 0.4], match="mean").with_rate(0.7)
    with pytest.raises(ParameterError, match=r"must be a number in \[0, 1\), got 1\.1"):
        method.rates(2)


def test_methods_with_any_schedule_can_be_printed():
    for schedule in ("decreasing", (0.1, 0.2), wave):
        for method in (DropKey(0.3, schedule=schedule), DropKey(0.3, schedule=schedule).with_rate(0.05)):
            assert str(method).startswith("dropkey(")


# Errors.


@BOTH
@pytest.mark.parametrize("rates", [[], [0.1], [0.1] * 3], ids=str)
def test_a_list_of_the_wrong_length_is_refused(kind, rates):
    message = rf"schedule of {kind.name} .* 2 blocks, the list has {len(rates)} rates"
    with pytest.raises(ParameterError, match=message):
        kind(schedule=rates).rates(2)
    with pytest.raises(ParameterError, match=message):
        kind(schedule=rates).at(Place(0, 2))


def test_a_list_of_the_wrong_length_is_refused_at_a_new_rate_too():
    with pytest.raises(ParameterError, match="3 rates, the model has 2 blocks"):
        DropKey(schedule=[0.1, 0.2, 0.3]).with_rate(0.1).rates(2)


@BOTH
@pytest.mark.parametrize("bad", [-0.1, 1, 1.0, math.nan, "0.1", None, [0.1]], ids=str)
def test_every_rate_of_a_list_is_checked(kind, bad):
    with pytest.raises(ParameterError, match=r"schedule\[1\] must be a number in \[0, 1\)"):
        kind(schedule=[0.1, bad, 0.2])


@BOTH
def test_every_rate_of_a_function_is_checked(kind):
    with pytest.raises(ParameterError, match=r"schedule\(2, 3\) must be a number in \[0, 1\), got 1"):
        kind(schedule=lambda l, L: l / 2).rates(3)


@BOTH
@pytest.mark.parametrize("schedule", ["linear", "", 0.3, None, True, {"a": 0.1}], ids=repr)
def test_an_unknown_schedule_is_refused(kind, schedule):
    with pytest.raises(ParameterError, match="schedule must be one of constant, decreasing, increasing"):
        kind(schedule=schedule)


@BOTH
@pytest.mark.parametrize("match", ["min", None, 1, ["max"]], ids=repr)
def test_an_unknown_match_is_refused(kind, match):
    with pytest.raises(ParameterError, match="match must be one of max, mean"):
        kind(match=match)


def test_schedules_are_read_from_recipes():
    assert parse("dropkey(0.3, schedule=decreasing, match=mean)") == [DropKey(0.3, schedule="decreasing", match="mean")]
    assert parse("dropattention(schedule=[0.1, 0.2])") == [DropAttention(schedule=[0.1, 0.2])]
