"""Resampling and spectrograms, against formulas that are not ours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.signal
import torch

from attemper.errors import ParameterError
from attemper.lab.tasks.audio.signal import (
    FRAMES_PER_SECOND,
    RATE,
    ROLL_OFF,
    ZEROS,
    hertz_to_mel,
    log_mel,
    mel_filters,
    mel_to_hertz,
    resample,
)

RATES = [8_000, 11_025, 22_050, 22_051, 32_000, 44_100, 48_000, 96_000]


def sine(hertz: float, rate: int, count: int) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(count, dtype=torch.float64) / rate)


# ---------------------------------------------------------------------------------------------------------- resampling
@pytest.mark.parametrize("rate", RATES)
def test_a_resampled_tone_is_the_same_tone_sampled_at_the_other_rate(rate: int) -> None:
    found = resample(sine(440.3, rate, rate // 2), rate)
    assert abs(len(found) - RATE / 2) <= 1
    expected = sine(440.3, RATE, len(found))
    assert float((found - expected)[300:-300].abs().max()) < 0.005


@pytest.mark.parametrize("rate", RATES)
def test_resampling_is_scipys_with_the_same_filter(rate: int) -> None:
    """`resample_poly` stuffs zeros and filters at the product of both rates: another way to the same sums."""
    common = math.gcd(rate, RATE)
    up, down = RATE // common, rate // common
    cut = ROLL_OFF * min(1.0, up / down)
    reach = math.ceil(ZEROS / cut) * up
    distance = np.arange(-reach, reach + 1) / up
    inside = np.abs(distance) < ZEROS / cut
    window = np.where(inside, np.cos(np.pi * distance * cut / (2 * ZEROS)) ** 2, 0.0)
    samples = np.random.default_rng(rate).normal(size=700)
    # It scales the filter by `up`; nothing in ours does.
    expected = scipy.signal.resample_poly(samples, up, down, window=cut * np.sinc(cut * distance) * window / up)
    found = resample(torch.from_numpy(samples), rate).numpy()
    np.testing.assert_allclose(found, expected[: len(found)], atol=1e-9)
    assert len(found) == math.ceil(700 * up / down)


def test_frequencies_that_the_new_rate_cannot_hold_are_gone() -> None:
    found = resample(sine(10_000, 44_100, 22_050), 44_100)
    assert float(found[300:-300].abs().max()) < 0.01


def test_samples_at_the_right_rate_are_left_alone() -> None:
    samples = torch.randn(50)
    assert resample(samples, RATE) is samples


# ----------------------------------------------------------------------------------------------------------------- mel
def test_the_mel_scale_is_htks() -> None:
    assert hertz_to_mel(1000) == pytest.approx(1000, abs=0.02)
    assert hertz_to_mel(0) == 0
    assert float(mel_to_hertz(torch.tensor(hertz_to_mel(4321.0)))) == pytest.approx(4321, rel=1e-5)


@pytest.mark.parametrize("bands", [8, 64, 128])
def test_filters_are_triangles_between_neighbouring_corners(bands: int) -> None:
    """Made by hand: interpolation between the three corners of every band."""
    top = 1127 * math.log(1 + RATE / 2 / 700)
    corners = [700 * (math.exp(top * at / (bands + 1) / 1127) - 1) for at in range(bands + 2)]
    frequencies = np.arange(1025) * RATE / 2048
    expected = [np.interp(frequencies, corners[at : at + 3], [0, 1, 0], left=0, right=0) for at in range(bands)]
    np.testing.assert_allclose(mel_filters(bands).numpy(), np.array(expected), atol=2e-3)


def test_so_many_bands_that_some_would_be_empty_are_refused() -> None:
    with pytest.raises(ParameterError, match="bands is 1000"):
        mel_filters(1000)


def test_a_tone_is_loudest_in_its_own_band_and_the_peak_is_255() -> None:
    mel = log_mel(sine(1000, RATE, 2 * RATE).float(), 64, 64)
    assert mel.dtype == torch.uint8
    assert mel.shape == (64, 64)
    band = round(hertz_to_mel(1000) / hertz_to_mel(RATE / 2) * 65) - 1
    assert set(mel[4:-4].argmax(1).tolist()) == {band}
    assert int(mel.max()) == 255


def test_a_spectrogram_is_that_of_a_fourier_sum_written_out() -> None:
    draw = torch.Generator().manual_seed(0)
    samples = torch.randn(RATE, generator=draw)
    mel = log_mel(samples, FRAMES_PER_SECOND, 16).double()
    powers = []
    for frame in range(FRAMES_PER_SECOND):  # scipy's spectrum of every window, with silence before and behind the clip
        window = np.zeros(1024)
        first = frame * 500 - 512
        known = samples.numpy()[max(0, first) : first + 1024]
        window[max(0, -first) : max(0, -first) + len(known)] = known
        spectrum = np.fft.rfft(window * scipy.signal.get_window("hann", 1024), 2048)
        powers.append(mel_filters(16).numpy() @ np.abs(spectrum) ** 2)
    decibels = 10 * np.log10(np.array(powers) / np.max(powers))
    expected = np.round(255 * np.clip(1 + decibels / 80, 0, 1))
    assert np.abs(mel.numpy() - expected).max() <= 1


def test_loudness_does_not_matter_and_what_is_missing_is_silence() -> None:
    samples = sine(500, RATE, RATE).float()
    assert torch.equal(log_mel(samples, 64, 32), log_mel(samples / 8, 64, 32))
    assert int(log_mel(samples, 64, 32)[36:].max()) == 0
    assert int(log_mel(torch.zeros(RATE), 32, 32).max()) == 0
    assert log_mel(torch.ones(1), 32, 32).shape == (32, 32)


def test_what_comes_after_the_clip_is_cut_off() -> None:
    quiet, loud = 0.1 * sine(500, RATE, RATE).float(), sine(700, RATE, 3 * RATE).float()
    assert torch.equal(
        log_mel(torch.cat([quiet, torch.zeros(RATE)]), 30, 32), log_mel(torch.cat([quiet, loud]), 30, 32)
    )
