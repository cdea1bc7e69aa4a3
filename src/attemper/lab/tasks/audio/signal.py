"""From samples to a log-mel spectrogram, in torch, on the device where the samples are."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.errors import ParameterError

RATE = 16_000
"""Samples per second that spectrograms are made from."""
FRAMES_PER_SECOND = 32
HOP = RATE // FRAMES_PER_SECOND
WINDOW = 1024
"""Samples under a Hann window, 64 ms."""
BINS = 2048
"""Length of the Fourier transform: longer than the window, so that even the narrowest filter has a frequency in it."""
RANGE = 80.0
"""Decibels below the peak of a clip that a byte spans."""

ZEROS = 16
"""Zero crossings of the resampling filter on either side."""
ROLL_OFF = 0.95
"""Where the resampling filter cuts, as a share of the lower of the two Nyquist frequencies."""


# ---------------------------------------------------------------------------------------------------------- resampling
def resample(samples: Tensor, source: int, target: int = RATE) -> Tensor:
    """Samples at another rate: (T) → (⌈T · target / source⌉).

    Every new sample is a weighted sum of the old ones round its place in time, under a sinc with a Hann window. Its
    place among them repeats after target / gcd new samples, so that this many rows of weights serve any length.

    >>> resample(torch.ones(441), 44_100, 16_000).shape
    torch.Size([160])
    """
    if source == target:
        return samples
    common = math.gcd(source, target)
    down, up = source // common, target // common
    weights, first = _weights(down, up)
    weights, reach, taps = weights.to(samples), -int(first[0]), weights.shape[1]
    length = -(-len(samples) * up // down)
    periods = -(-length // up)
    padded = F.pad(samples, (reach, periods * down + taps))
    out = samples.new_empty(periods, up)
    for phase, begin in enumerate((first + reach).tolist()):
        out[:, phase] = padded.as_strided((periods, taps), (down, 1), begin) @ weights[phase]
    return out.flatten()[:length]


@functools.lru_cache(maxsize=8)
def _weights(down: int, up: int) -> tuple[Tensor, Tensor]:
    """For each of the `up` places of a period: its weights, float64 (up, taps), and the old sample of the first one."""
    cut = ROLL_OFF * min(1.0, up / down)  # relative to the old Nyquist frequency
    reach = ZEROS / cut
    taps = 2 * math.ceil(reach) + 1
    place = torch.arange(up, dtype=torch.float64) * down / up
    first = place.floor().long() - math.ceil(reach)
    distance = first[:, None] + torch.arange(taps) - place[:, None]
    hann = torch.where(distance.abs() < reach, (math.pi * distance / (2 * reach)).cos().square(), 0.0)
    return cut * torch.sinc(cut * distance) * hann, first


# ----------------------------------------------------------------------------------------------------------------- mel
def hertz_to_mel(hertz: float) -> float:
    """HTK's scale: 1000 Hz are 1000 mel."""
    return 2595 * math.log10(1 + hertz / 700)


def mel_to_hertz(mel: Tensor) -> Tensor:
    """The way back."""
    return 700 * (10 ** (mel / 2595) - 1)


@functools.lru_cache(maxsize=8)
def mel_filters(bands: int) -> Tensor:
    """Triangles of height 1, evenly spaced in mel from 0 Hz to the Nyquist frequency: float32 (bands, frequencies)."""
    corners = mel_to_hertz(torch.linspace(0, hertz_to_mel(RATE / 2), bands + 2, dtype=torch.float64))
    frequencies = torch.linspace(0, RATE / 2, BINS // 2 + 1, dtype=torch.float64)
    left, peak, right = (corners[at : at + bands, None] for at in range(3))
    filters = torch.minimum((frequencies - left) / (peak - left), (right - frequencies) / (right - peak)).clamp(min=0)
    if not (filters.sum(1) > 0).all():
        raise ParameterError(f"bands is {bands}; filters that narrow hold no frequency. 128 bands are fine.")
    return filters.float()


def log_mel(samples: Tensor, frames: int, bands: int) -> Tensor:
    """The log-mel spectrogram of samples at `RATE`, as bytes: (T) → uint8 (frames, bands).

    0 … 255 stand for −80 … 0 dB below the loudest place of the clip. Frame t is centred at t / 32 seconds. What is
    longer is cut off, and what is missing is silence.
    """
    filters = mel_filters(bands).to(samples.device)
    needed = (frames - 1) * HOP + WINDOW
    samples = F.pad(samples[: needed - WINDOW // 2], (WINDOW // 2, 0))
    windows = F.pad(samples, (0, max(0, needed - len(samples)))).unfold(0, WINDOW, HOP)
    hann = torch.hann_window(WINDOW, device=samples.device)
    power = torch.fft.rfft(windows * hann, n=BINS).abs().square()
    mel = power @ filters.T
    peak = mel.max()
    if peak <= 0:
        return torch.zeros(frames, bands, dtype=torch.uint8, device=samples.device)
    decibels = 10 * (mel / peak).clamp(min=1e-12).log10()
    levels: Tensor = 255 * (1 + decibels / RANGE)
    return levels.clamp(0, 255).round().to(torch.uint8)
