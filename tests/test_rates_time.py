"""Rates over the course of training: until, start, ramp, and the progress that drives them."""

import itertools
import warnings

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import attemper
from attemper.errors import ParameterError, ProgressError, RecipeError
from attemper.methods import Blur, DropKey
from attemper.methods.rates import Timed
from attemper.methods.registry import methods_by_name
from attemper.probes import gradient_variance

TIMED = sorted(name for name, kind in methods_by_name().items() if issubclass(kind, Timed))


def vit():
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=3
    )


def interpolated(t, start, until, ramp):
    """The factor by interpolation between corners, which steps come infinitely close to."""
    least = 1e-12
    corners = [(-1.0, 1.0)]
    if start is not None or (until is None and ramp):
        begin = start or 0.0
        corners = [(-1.0, 0.0), (begin - least, 0.0), (begin + (ramp or 0.0), 1.0)]
    if until is not None:
        corners += [(until - (ramp or 0.0) - least, 1.0), (until, 0.0), (2.0, 0.0)]
    x, y = zip(*corners, strict=True)
    return float(np.interp(t, x, y))


share = st.floats(0.01, 1.0)


@given(st.floats(0, 1), st.none() | share, st.none() | share, st.none() | share)
@settings(max_examples=200, deadline=None)
def test_the_factor_is_a_line_between_its_corners(t, start, until, ramp):
    ends = (start is not None or until is None) + (until is not None)
    assume((until or 1.0) - (start or 0.0) > ends * (ramp or 0.0) + 1e-6)
    assume(all(abs(t - corner) > 1e-6 for corner in (start, until) if corner is not None))
    method = DropKey(0.2, start=start, until=until, ramp=ramp)
    assert method.factor(t) == pytest.approx(interpolated(t, start, until, ramp), abs=1e-9)
    assert method.during(t).p == pytest.approx(0.2 * method.factor(t))


@given(st.integers(1, 40), st.integers(2, 50))
@settings(max_examples=50, deadline=None)
def test_epochs_count_from_either_end(epoch, epochs):
    assume(epoch < epochs)
    for fraction in (0.0, (epoch - 0.5) / epochs, (epoch + 0.5) / epochs, 1.0):
        assert DropKey(until=epoch).factor(fraction, epochs) == (fraction * epochs < epoch)
        assert DropKey(start=-epoch).factor(fraction, epochs) == (fraction * epochs >= epochs - epoch)
        assert DropKey(until=-epoch).factor(fraction, epochs) == 1 - DropKey(start=-epoch).factor(fraction, epochs)


def test_every_form_of_a_schedule_is_multiplied():
    schedules = ("decreasing", (0.3, 0.1), lambda l, blocks: 0.1 * (l + 1))
    for schedule, match in itertools.product(schedules, ("max", "mean")):
        method = DropKey(0.2, schedule=schedule, match=match, until=0.5, ramp=0.5)
        full = DropKey(0.2, schedule=schedule, match=match).rates(2)
        assert method.during(0.25).rates(2) == pytest.approx([0.5 * rate for rate in full])
    assert Blur([2.0, 1.0], until=0.5, ramp=0.5).during(0.25).sigma == (1.0, 0.5)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("dropkey(0.1, until=0)", "until must be a share of training in (0, 1]"),
        ("dropkey(0.1, until=1.5)", "until must be a share"),
        ("dropkey(0.1, ramp=-2)", "ramp must be a share of training in (0, 1], or a whole number from 1 on"),
        ("dropkey(0.1, start=true)", "start must be a share"),
        ("blur(1, start=0.5, until=0.5)", "start=0.5 must come before until=0.5"),
        ("dropkey(0.1, start=30, until=20)", "start=30 must come before until=20"),
        ("cb(cb, until=0.5)", "cb has no parameter 'until'"),
    ],
)
def test_times_that_make_no_sense_are_refused(recipe, words):
    with pytest.raises(RecipeError) as error:
        attemper.parse(recipe)
    assert words in str(error.value)


def test_times_that_do_not_fit_the_training_are_refused_when_it_is_known():
    with pytest.raises(ParameterError, match="would never act"):
        DropKey(start=20).factor(0.5, 10)
    with pytest.raises(ParameterError, match="is too long"):
        DropKey(start=0.2, until=0.6, ramp=0.3).factor(0.3)
    tempered = attemper.apply(vit(), "dropkey(0.1, until=5)")
    with pytest.raises(ParameterError, match=r"until=5 of dropkey counts epochs, .* epochs=…"):
        tempered.progress(0.5)
    for fraction in (-0.1, 1.1, True, "half", float("nan")):
        with pytest.raises(ParameterError, match="from 0 to 1"):
            tempered.progress(fraction)
    with pytest.raises(ParameterError, match="epochs must be"):
        tempered.progress(0.5, epochs=0)


@pytest.mark.parametrize("name", TIMED)
def test_every_rate_ends_where_it_should_and_the_plain_model_is_left(name):
    text = f"{name}(0.5, until=0.5)"
    assert attemper.render(attemper.parse(text)) == text
    model, x = vit(), torch.randn(3, 3, 16, 16)
    plain = model.train()(x)
    tempered = attemper.apply(model, text)
    tempered.progress(0.3)
    torch.manual_seed(1)
    assert not torch.equal(model(x), plain)
    tempered.progress(0.5)
    assert torch.equal(model(x), plain)
    tempered.progress(0.49)
    torch.manual_seed(1)
    assert not torch.equal(model(x), plain)
    assert str(tempered.methods[0]) == text


def test_a_rate_that_begins_later_is_at_rest_from_the_start():
    model, x = vit(), torch.randn(3, 3, 16, 16)
    plain = model.train()(x)
    tempered = attemper.apply(model, "dropkey(0.5, start=-2) + droppath(0.2, ramp=0.1)")
    assert {row.rate for row in tempered.summary()} == {0.0}
    assert torch.equal(model(x), plain)
    tempered.progress(0.85, epochs=10)
    assert {row.method: row.rate for row in tempered.summary()} == {"dropkey": 0.5, "droppath": 0.2}


def test_training_without_progress_raises_at_the_second_pass():
    model, x = vit().train(), torch.randn(2, 3, 16, 16)
    tempered = attemper.apply(model, "dropkey(0.3, until=0.5)")
    model.eval()(x), model(x)
    model.train()(x)
    with tempered.disabled():
        model(x)
    with pytest.raises(ProgressError, match=r"dropkey depends on how far training is .* tempered.progress"):
        model(x)
    tempered.progress(0.0)
    model(x), model(x)


def test_two_passes_that_are_compared_count_once():
    model, x, y = vit().train(), torch.randn(2, 3, 16, 16), torch.tensor([0, 1])
    tempered = attemper.apply(model, "dropkey(0.3, until=0.5) + consistency")

    def step():
        tempered.loss(lambda: model(x), lambda out: F.cross_entropy(out, y)).backward()

    step()
    with pytest.raises(ProgressError):
        step()


def test_times_that_do_not_fit_are_found_at_the_beginning():
    with pytest.raises(ParameterError, match="is too long"):
        DropKey(0.1, start=0.5, ramp=0.3, until=0.9).factor(0.0)


def test_a_call_by_itself_knows_of_no_training():
    q = torch.randn(1, 1, 3, 4)
    for method in (DropKey(0.5, start=0.5), Blur(until=0.5)):
        with pytest.raises(ParameterError, match="one call knows of no training"):
            attemper.attention(q, q, q, methods=[method])


def test_a_ramp_is_not_cut_to_the_length_of_training():
    with pytest.raises(ParameterError, match="is too long"):
        DropKey(0.1, ramp=10).factor(0.0, 4)


def test_numbers_of_numpy_are_numbers():
    tempered = attemper.apply(vit(), "dropkey(0.2, until=5)")
    tempered.progress(np.float32(0.75), epochs=np.int64(10))
    assert tempered.summary()[0].rate == 0.0


def test_at_rest_every_rate_is_zero_until_one_is_set():
    model, x = vit().train(), torch.randn(2, 3, 16, 16)
    plain = model(x)
    tempered = attemper.apply(model, "dropkey(0.3, ramp=0.5) + blur + droppath(0.2)")
    tempered.progress(0.9)
    tempered.rest()
    assert torch.equal(model(x), plain)
    tempered.progress(0.95)
    assert torch.equal(model(x), plain)
    tempered.set_rate(0.1)
    assert {row.method: row.rate for row in tempered.summary()} == {"dropkey": 0.1, "blur": 1.0, "droppath": 0.1}


def test_a_recipe_at_rest_needs_no_progress():
    model, x = vit().train(), torch.randn(2, 3, 16, 16)
    plain = model(x)
    tempered = attemper.apply(model, "dropkey(0.3)")
    tempered.rest()
    assert all(torch.equal(model(x), plain) for _ in range(3))


def test_looking_at_gradients_needs_no_progress():
    model, y = vit().train(), torch.tensor([0, 1])
    attemper.apply(model, "dropkey(0.3, until=0.5)")
    batches = [torch.randn(2, 3, 16, 16) for _ in range(3)]
    gradient_variance(model, lambda x: F.cross_entropy(model(x), y), batches)
    model(batches[0])


def test_a_rate_that_is_set_still_follows_time():
    tempered = attemper.apply(vit(), "dropkey(0.3, until=0.5)")
    tempered.progress(0.2)
    tempered.set_rate(0.1)
    assert [row.rate for row in tempered.summary()] == [0.1, 0.1]
    tempered.progress(0.7)
    assert [row.rate for row in tempered.summary()] == [0.0, 0.0]
    tempered.set_rate(0.2)
    assert [row.rate for row in tempered.summary()] == [0.0, 0.0]
    tempered.progress(0.1)
    assert [row.rate for row in tempered.summary()] == [0.2, 0.2]


def test_a_method_is_asked_for_a_rate_only_where_it_acts():
    """Block DropKey needs a grid, which is known of attention, and of nothing where graying acts."""
    tempered = attemper.apply(vit(), "dropkey(0.3, structure=block, until=0.5) + graying + cb")
    tempered.progress(0.6)
    assert {row.rate for row in tempered.summary() if row.method == "dropkey"} == {0.0}
    tempered.set_rate(0.1)
    tempered.progress(0.4)
    assert {row.rate for row in tempered.summary() if row.method == "dropkey"} == {0.1}


def test_progress_of_a_recipe_without_times_is_free():
    tempered = attemper.apply(vit(), "dropkey(0.3)")
    tempered.progress(0.7)
    assert tempered.control.fraction is None
    assert tempered.summary()[0].rate == 0.3


def test_an_average_of_passes_that_do_nothing_says_so():
    model, x = vit().eval(), torch.randn(2, 3, 16, 16)
    tempered = attemper.apply(model, "dropkey(0.5, until=0.5) + cb")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        early = tempered.average(lambda: model(x), 2)
    tempered.progress(0.5)
    with pytest.warns(
        UserWarning, match=r"all passes of average\(\) are equal: the rates of 'dropkey\(.*\)' are 0 now"
    ):
        late = tempered.average(lambda: model(x), 2)
    torch.testing.assert_close(late, model(x), rtol=0, atol=0)
    assert not torch.equal(early, late)
    tempered.progress(0.0)
    tempered.set_rate(0.0)
    with pytest.warns(UserWarning, match="are 0 now; set_rate and progress change that"):
        tempered.average(lambda: model(x), 2)
    tempered.remove()
    tempered = attemper.apply(model, "cb")
    with pytest.warns(UserWarning, match=r"no method of 'cb\(cb\)' draws random numbers"):
        tempered.average(lambda: model(x), 2)
