"""Audio files as samples of one channel, with soundfile."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attemper.errors import UnreadableError
from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import reason_of, reason_of_bytes

ENDINGS = (
    *(".wav", ".au", ".snd", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".aifc", ".caf", ".w64"),
    *(".m4a", ".aac", ".wma"),  # nothing here reads them: they are tried so that they are named, not passed over
)


def load_soundfile() -> Any:
    """The package; where it is missing, an error that says how to get it."""
    try:
        import soundfile  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise DataError(
            "Audio files are read with soundfile, which is not installed: pip install 'attemper[audio]'"
        ) from None
    except OSError as error:
        raise DataError(f"soundfile does not find libsndfile, the library that it wraps: {error}") from None
    return soundfile


def read(file: Path, seconds: int) -> tuple[Tensor, int]:
    """The first seconds of a file: the mean of its channels, float32 (T), and how many samples make a second.

    Not much more than these seconds is held in memory, however long the file is.
    """
    soundfile = load_soundfile()
    try:
        with soundfile.SoundFile(file) as sound:
            rate = int(sound.samplerate)
            samples = sound.read((seconds + 1) * rate, dtype="float32", always_2d=True)  # one more: filters look ahead
    except (soundfile.SoundFileError, OSError, ValueError) as error:
        raise UnreadableError(_reason(file) or str(getattr(error, "error_string", error)).rstrip(".")) from None
    if not len(samples):
        raise UnreadableError("it has no samples")
    mono = torch.from_numpy(samples).mean(1)
    if not torch.isfinite(mono).all():
        raise UnreadableError("some of its samples are not finite numbers")
    return mono, rate


def _reason(file: Path) -> str | None:
    """What can be said of a file that soundfile could not read, beside what soundfile says."""
    if not file.is_file():
        return "there is no such file"
    try:
        with file.open("rb") as opened:
            return reason_of_bytes(opened.read(64))
    except OSError as error:
        return reason_of(error, file)
