"""From audio files to spectrograms on disk: done once, then read back as long as neither files nor settings change.

Next to each other in the cache lie, for a set of files under some settings,

    <stamps>.stamp    names, sizes and times of the files (hashed: its name) → the hash of their contents
    <contents>.json   which files became spectrograms, which did not and why, and which are equal
    <contents>.mel    the spectrograms, one after another

so that a second start looks at the files' names, sizes and times, and opens none of them.
"""

import collections
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attemper.errors import UnreadableError
from attemper.lab.errors import DataError
from attemper.lab.tasks.audio.cache import Cache
from attemper.lab.tasks.audio.reading import load_soundfile, read
from attemper.lab.tasks.audio.signal import FRAMES_PER_SECOND, log_mel, resample
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.listing import Listing
from attemper.lab.tasks.notifications import progress

VERSION = 1
"""Raised when the same samples would give another spectrogram than before."""
WORKERS = max(1, min(4, os.cpu_count() or 1))

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a spectrogram depends on beside its file."""

    seconds: int
    bands: int

    @property
    def frames(self) -> int:
        return self.seconds * FRAMES_PER_SECOND

    @property
    def size(self) -> int:
        return self.frames * self.bands

    def __str__(self) -> str:
        return f"log-mel {VERSION}, {self.seconds} s, {self.bands} bands"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The spectrograms of a listing's files.

    mel: uint8 (rows, frames, bands); its pages come from disk when they are touched.
    rows: which file of the listing each row is of.
    equal: for every row, the first row with the same spectrogram.
    problems: file of the listing → why it has no row.
    contents: a hash of the files' contents and of the settings.
    """

    mel: np.ndarray[Any, Any]
    rows: list[int]
    equal: list[int]
    problems: dict[int, str]
    contents: str


def prepare(listing: Listing, settings: Settings, root: Path) -> Prepared:
    """The spectrograms, from the cache under the data root or made now and put there.

    Memory holds a few clips at a time. A cache file that is damaged is set aside and made again.
    """
    cache = Cache(root)
    stamps = _stamps(listing, settings)
    key = cache.read_stamp(stamps)
    if key is None:
        key = of_parts(str(settings), *_hashes(listing))
        cache.write_stamp(stamps, key)
    found = _load(cache, key, settings, len(listing.items))
    if found is None:
        _make(cache, key, listing, settings)
        found = _load(cache, key, settings, len(listing.items))
    if found is None:
        raise DataError(f"The spectrograms in '{cache.folder}' changed while they were being read; try again.")
    return found


def _stamps(listing: Listing, settings: Settings) -> str:
    parts = [str(settings), str(listing.folder.resolve())]
    for item in listing.items:
        try:
            stat = (listing.folder / item.name).stat()
            parts.append(f"{item.name} {stat.st_size} {stat.st_mtime_ns}")
        except OSError:
            parts.append(f"{item.name} missing")
    return of_parts(*parts)


def _hashes(listing: Listing) -> Iterator[str]:
    """Name and hash of every file, in order."""

    def hashed(name: str) -> str:
        try:
            with (listing.folder / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:  # missing, or not ours to read: it will be named when it is to be decoded
            return f"unreadable {error.errno}"

    names = [item.name for item in listing.items]
    for name, found in _reported("reading files", names, _in_parallel(hashed, names)):
        yield f"{name} {found}"


def _load(cache: Cache, key: str, settings: Settings, clips: int) -> Prepared | None:
    found = cache.read(key, settings.size, clips)
    if found is None:
        return None
    meta, data = found
    return Prepared(
        mel=data.reshape(-1, settings.frames, settings.bands),
        rows=meta["rows"],
        equal=meta["equal"],
        problems={int(index): reason for index, reason in meta["problems"].items()},
        contents=key,
    )


def _make(cache: Cache, key: str, listing: Listing, settings: Settings) -> None:
    """Every file's spectrogram into the cache, one after another."""
    load_soundfile()  # if it is missing, one error and not one per file
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def spectrogram(name: str) -> Tensor | str:
        try:
            samples, rate = read(listing.folder / name, settings.seconds)
        except UnreadableError as error:
            return str(error)
        return log_mel(resample(samples.to(device), rate), settings.frames, settings.bands).cpu()

    names = [item.name for item in listing.items]
    rows: list[int] = []
    equal: list[int] = []
    problems: dict[int, str] = {}
    seen: dict[bytes, int] = {}
    made = _reported("computing spectrograms", names, _in_parallel(spectrogram, names))
    with cache.writing(key) as file:
        for index, (_, mel) in enumerate(made):
            if isinstance(mel, str):
                problems[index] = mel
                continue
            data = mel.numpy().tobytes()
            equal.append(seen.setdefault(hashlib.sha256(data).digest(), len(rows)))
            rows.append(index)
            file.write(data)
        file.meta = {"rows": rows, "equal": equal, "problems": problems}


def _reported(what: str, names: list[str], made: Iterator[Made]) -> Iterator[tuple[str, Made]]:
    """The names with what was made of them, while progress is reported."""
    progress(what, 0, len(names))
    for done, (name, each) in enumerate(zip(names, made, strict=True), start=1):
        yield name, each
        progress(what, done, len(names))


def _in_parallel(function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """The results in order, a few items ahead of the caller: soundfile and torch let threads run."""
    with ThreadPoolExecutor(WORKERS) as pool:
        ahead: collections.deque[Future[Made]] = collections.deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * WORKERS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
