"""Made-up tones in noise: a task of sound that needs no files and is learnt in seconds."""

import functools
import math

import torch
from torch import Tensor

from attemper.lab.tasks.audio.signal import RATE, log_mel
from attemper.lab.tasks.audio.task import AudioTask, MelSource, token_shape
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.seed_streams import generator
from attemper.lab.tasks.split import hold_out

CLASSES = ("steady", "rising", "falling", "beeping", "wavering", "chord")
"""What a tone does over time; its pitch, its loudness and the noise over it are drawn for each clip."""
EACH = 120
"""Clips per class."""
SECONDS = 2
FRAMES, BANDS, TOKENS = 64, 32, 16
NOISE = 0.5
"""Largest deviation of the noise, against a tone of amplitude 1."""
VERSION = "1"


def open_tones(name: str, *, train: int | None = None, test: int | None = None) -> AudioTask:
    """Clips of 2 s with a tone that is steady, rises, falls, beeps, wavers or is a chord: 576, and 144 for test."""
    whole = _load()
    kept, held = hold_out(whole.targets, whole.groups)
    return AudioTask(
        name=name,
        shape=token_shape(name, FRAMES, BANDS, TOKENS, len(CLASSES)),
        fingerprint=of_parts("tones", VERSION),  # not of the spectrograms: machines round differently
        pool=lambda: whole.take(kept),
        held_out=lambda: whole.take(held),
        classes=CLASSES,
        train=train,
        test_images=test,
        bands=BANDS,
    )


@functools.cache
def _load() -> MelSource:
    targets = torch.arange(EACH * len(CLASSES)) % len(CLASSES)
    draw = generator(0, "tones", VERSION)
    mel = torch.stack([log_mel(_clip(CLASSES[target], draw), FRAMES, BANDS) for target in targets.tolist()])
    return MelSource(mel, targets, torch.arange(len(targets)))


def _clip(kind: str, draw: torch.Generator) -> Tensor:
    """Samples of one clip."""
    low, speed, loudness, noise = torch.rand(4, generator=draw).tolist()
    time = torch.arange(SECONDS * RATE) / RATE
    pitch = 300 * 2**low  # hertz
    bent = {"rising": time / SECONDS, "falling": -time / SECONDS}
    wave = 0.25 * torch.sin(2 * math.pi * (2 + 3 * speed) * time) if kind == "wavering" else torch.zeros_like(time)
    octaves = bent.get(kind, wave)
    phase = 2 * math.pi * (pitch * 2**octaves).cumsum(0) / RATE
    tone: Tensor = phase.sin()
    if kind == "chord":
        tone = (tone + (1.25 * phase).sin() + (1.5 * phase).sin()) / 3
    if kind == "beeping":
        tone = tone * (((2 + 3 * speed) * time) % 1 < 0.5)
    hiss = torch.randn(len(time), generator=draw)
    mixed: Tensor = tone * (0.4 + 0.6 * loudness) + hiss * (NOISE * noise)
    return mixed
