"""Audio: folders of sound files, ESC-50, ready spectrograms, and made-up tones."""

from attemper.lab.tasks.audio.opening import open_audio, open_esc50, open_mel
from attemper.lab.tasks.audio.task import AudioTask, MelSource
from attemper.lab.tasks.audio.tones import open_tones

__all__ = ["AudioTask", "MelSource", "open_audio", "open_esc50", "open_mel", "open_tones"]
