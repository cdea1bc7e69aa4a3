"""How a study's runs are watched: what does not change their results, and what a study remembers when it is resumed."""

import dataclasses
import json
from pathlib import Path

from attemper.errors import MissingFileError, ParameterError, UnreadableError
from attemper.files import atomic_write, read_json_object
from attemper.lab.folders import unreadable

FILE = "settings.json"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Kept in the study's folder, so that the study is watched in the same way when it goes on."""

    probe_every: int | None = None
    """Steps between two looks at attention during every run."""
    track: tuple[str, ...] = ()
    """Where curves are sent while runs go on: trackers of `attemper.lab.tracking`."""

    def __post_init__(self) -> None:
        if self.probe_every is not None and self.probe_every < 1:
            raise ParameterError(f"--probe-every is {self.probe_every}; it must be at least 1.")


def read_settings(folder: Path) -> Settings:
    """What a folder remembers; the defaults where it remembers nothing."""
    path = folder / FILE
    try:
        held = read_json_object(path)
        every, track = held["probe_every"], held["track"]
        if not (every is None or type(every) is int) or not isinstance(track, list):
            raise ValueError(f"probe_every is {every!r} and track is {track!r}")
        return Settings(every, tuple(map(str, track)))
    except MissingFileError:
        return Settings()
    except (UnreadableError, ValueError, KeyError) as error:
        raise unreadable(path, error) from None


def write_settings(folder: Path, settings: Settings) -> None:
    """Remember; the defaults need no file."""
    if settings == read_settings(folder):
        return
    if settings == Settings():
        (folder / FILE).unlink(missing_ok=True)
    else:
        atomic_write(folder / FILE, json.dumps(dataclasses.asdict(settings), indent=1) + "\n")
