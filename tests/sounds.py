"""Small audio files for tests, and tasks opened by somebody who listens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from attemper.lab.tasks.notifications import listening
from attemper.lab.tasks.registry import open_task


def tone(hertz: float, seconds: float = 1.0, rate: int = 16_000, channels: int = 1, seed: int = 0) -> np.ndarray:
    """A sine in a little noise, float32 (T) or (T, channels)."""
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(0, 0.01, len(time))
    wave = (0.5 * np.sin(2 * np.pi * hertz * time) + noise).astype(np.float32)
    return wave if channels == 1 else np.stack([wave] * channels, 1)


def write(file: Path, samples: np.ndarray, rate: int = 16_000) -> Path:
    """Put samples into a file, in the format of its ending."""
    file.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(file, samples, rate)
    return file


def genres(folder: Path, classes: tuple[str, ...] = ("blues", "jazz"), each: int = 6, rate: int = 22_050) -> Path:
    """A folder like GTZAN's: one subfolder per class, every track another one."""
    for at, name in enumerate(classes):
        for track in range(each):
            samples = tone(300 * 2**at + 10 * track, rate=rate, seed=100 * at + track)
            write(folder / name / f"{name}.{track:05}.wav", samples, rate)
    return folder


def esc50(folder: Path, classes: int = 3, recordings: int = 2, takes: int = 2) -> Path:
    """A folder like ESC-50's: in each of five folds some recordings of every class, each cut into several clips."""
    rows = ["filename,fold,target,category,esc10,src_file,take"]
    for fold in range(1, 6):
        for target in range(classes):
            for recording in range(recordings):
                source = 1000 * fold + 10 * target + recording
                for take in range(takes):
                    name = f"{fold}-{source}-{'AB'[take]}-{target}.wav"
                    rows.append(f"{name},{fold},{target},kind{target},False,{source},{'AB'[take]}")
                    write(folder / "audio" / name, tone(200 * 2**target, seed=2 * source + take), 16_000)
    (folder / "meta").mkdir(parents=True, exist_ok=True)
    (folder / "meta" / "esc50.csv").write_text("\n".join(rows) + "\n")
    return folder


SHORT = "seconds=1, bands=16"


class Heard:
    """Remembers what tasks tell."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []
        self.notes: list[str] = []

    def progress(self, what: str, done: int, total: int) -> None:
        self.steps.append((what, done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)


def opened(text: str, root: Path) -> tuple[Any, Heard]:
    heard = Heard()
    with listening(heard):
        return open_task(text, root), heard


def parts(task: Any, seed: int = 0) -> list[Any]:
    return [*task.split(seed, 0.3), task.test()]


def clips(source: Any) -> list[bytes]:
    return [clip.numpy().tobytes() for clip in source.mel]
