"""WebDataset's tar files as a store: one pass over their headers finds every sample, and is remembered.

A tar file has no table of contents, so its headers are read once, with seeks over the images. The index that comes of
it has 20 bytes per sample. It lies in a file that is mapped into memory, so that it costs a process next to nothing.
"""

import contextlib
import dataclasses
import hashlib
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from attemper.files import DIGEST, atomic_file
from attemper.lab.errors import DataError
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.notifications import note
from attemper.lab.tasks.scan_files import CACHE, look_through
from attemper.lab.tasks.streaming.order import Selection

UNIT = 128
"""Samples of a shard that are read near each other."""

OPEN = 64
"""Shards that a worker keeps open."""

PIECE = 2**20
"""Entries that are hashed at a time."""

ENTRY = np.dtype([("offset", "<i8"), ("size", "<u4"), ("label", "<i4"), ("shard", "<i4")])
"""Where an image begins in its shard, how long it is, and its class."""

Index = np.ndarray[tuple[int, ...], Any]


@dataclasses.dataclass(frozen=True)
class Members:
    """Which files of a sample are which, by their endings: images, the first that is there, and the class."""

    images: tuple[str, ...]
    label: str


# ------------------------------------------------------------------------------------------------------------ the store
@dataclasses.dataclass
class TarStore:
    """Samples in tar files.

    index: an `ENTRY` per sample, shard by shard in the order of the files.
    """

    shards: tuple[Path, ...]
    index: Index
    _open: dict[int, BinaryIO] = dataclasses.field(default_factory=dict, repr=False)
    _opener: int = 0
    """The process that opened them: a forked one would share their positions with it."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    @property
    def fingerprint(self) -> str:
        """Of the names and sizes of the shards, of the places of all images in them, and of the classes.

        Other pixels in as many bytes at the same places would go unnoticed; to look at them all takes hours.
        """
        names = [f"{shard.name} {_stamp(shard)[0]}" for shard in self.shards]
        return of_parts(*names, _digest(self.index))

    @property
    def selection(self) -> Selection:
        """All samples, in units that end where shards do."""
        counts = np.bincount(self.index["shard"], minlength=len(self.shards))
        cuts = [np.arange(end - count, end, UNIT) for count, end in zip(counts, np.cumsum(counts), strict=True)]
        starts = np.concatenate(cuts).astype(np.int64)
        return Selection(starts, np.diff(starts, append=len(self.index)))

    def hand_out(self, samples: Tensor) -> list[Any]:
        return [tuple(entry) for entry in self.index[samples.numpy()].tolist()]

    def fetch(self, item: tuple[int, int, int, int]) -> tuple[bytes, int]:
        offset, size, label, shard = item
        try:
            file = self._file(shard)
            file.seek(offset)
            data = file.read(size)
        except OSError as error:
            raise DataError(f"The shard '{self.shards[shard]}' cannot be read: {error.strerror or error}.") from None
        if len(data) < size:
            raise DataError(
                f"'{self.shards[shard]}' ends in the middle of a sample; it has changed since it was opened."
            )
        return data, label

    def _file(self, shard: int) -> BinaryIO:
        if self._opener != os.getpid():
            self._open, self._opener = {}, os.getpid()
        if shard not in self._open:
            if len(self._open) >= OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[shard] = self.shards[shard].open("rb")
        return self._open[shard]

    def where(self, item: tuple[int, int, int, int]) -> str:
        offset, _, _, shard = item
        with contextlib.suppress(OSError, tarfile.TarError), tarfile.open(self.shards[shard], "r:") as tar:
            for member in tar:
                if member.offset_data == offset:
                    return f"'{member.name}' in '{self.shards[shard]}'"
        return f"The sample at byte {offset} of '{self.shards[shard]}'"

    def labels(self) -> Tensor:
        return torch.from_numpy(self.index["label"].astype(np.int64))


# ------------------------------------------------------------------------------------------------------------ the index
def index_shards(shards: Sequence[Path], members: Members, root: Path) -> Index:
    """Where the samples of some shards lie: remembered under the data root, or found in one pass over their headers."""
    stamps = [(str(shard.absolute()), *_stamp(shard)) for shard in shards]
    file = root / CACHE / f"{of_parts('tars', repr(members), repr(stamps))}.npy"
    if (known := _mapped(file)) is not None:
        return known
    found = look_through("Reading the headers of the shards", shards, lambda shard: scan(shard, members))
    for number, entries in enumerate(found):
        entries["shard"] = number
    return _remembered(np.concatenate(found), file)


def _mapped(file: Path) -> Index | None:
    """The index in a file; None where there is none, or where it is not what was written, so that it is made again."""
    try:
        index: Index = np.load(file, mmap_mode="r", allow_pickle=False)
        with file.open("rb") as opened:
            opened.seek(-DIGEST, os.SEEK_END)
            whole = opened.read() == _digest(index, file.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception:  # numpy has many ways to say that a file is no array
        whole = False
    if whole and index.dtype == ENTRY and index.ndim == 1:
        return index
    note(f"The index of the shards in '{file}' is damaged; it is made again.")
    return None


def _digest(index: Index, name: str = "") -> bytes:
    """name: of the file, so that one that was copied over another is no index of its shards."""
    digest = hashlib.sha256(name.encode())
    for begin in range(0, len(index), PIECE):
        digest.update(index[begin : begin + PIECE].tobytes())
    return digest.digest()


def _stamp(shard: Path) -> tuple[int, int]:
    try:
        status = shard.stat()
    except OSError as error:
        raise DataError(f"The shard '{shard}' cannot be read: {error.strerror or error}.") from None
    return status.st_size, status.st_mtime_ns


def _remembered(index: Index, file: Path) -> Index:
    """The index, mapped from its file if that can be written."""
    try:
        with atomic_file(file, durable=False) as opened:
            np.save(opened, index)
            opened.write(_digest(index, file.name))
        mapped = _mapped(file)
        return index if mapped is None else mapped
    except OSError as error:
        note(
            f"The index of the shards cannot be kept in '{file.parent}' ({error.strerror or error}): every start reads "
            "all headers again. Name a data root that can be written, with --data or the variable ATTEMPER_DATA."
        )
        return index


def scan(shard: Path, members: Members) -> Index:
    """The samples of one shard, by its headers."""
    found = []
    try:
        with tarfile.open(shard, "r:") as tar:
            for key, files in _samples(tar):
                found.append(_entry(tar, shard, key, files, members))
            _check_end(tar)
    except tarfile.TarError as error:
        raise DataError(
            f"'{shard}' is damaged, or not a tar file without compression: {error}. Copy or make it again; a .tar.gz "
            "has to be unpacked to .tar."
        ) from None
    except OSError as error:
        raise DataError(f"The shard '{shard}' cannot be read: {error.strerror or error}.") from None
    if not found:
        raise DataError(f"The shard '{shard}' has no sample in it. Leave it out, or make it again.")
    return np.array(found, dtype=ENTRY)


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise unless a shard ends as a tar file does: tarfile stops without a word at what is not a header."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"at byte {tar.offset:,} there is neither a file nor the end")


def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Neighbours whose names agree up to the first dot, as WebDataset groups them: name, and files by ending."""
    from webdataset.tariterators import base_plus_ext  # type: ignore[import-untyped]

    last: str | None = None
    files: dict[str, tarfile.TarInfo] = {}
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
        key, ending = base_plus_ext(member.name)
        if not member.isfile() or key is None or member.name.startswith("__"):
            continue
        if key != last and last is not None:
            yield last, files
            files = {}
        last = key
        files[ending.lower()] = member
    if last is not None:
        yield last, files


def _entry(
    tar: tarfile.TarFile, shard: Path, key: str, files: dict[str, tarfile.TarInfo], members: Members
) -> tuple[int, int, int, int]:
    image = next((files[ending] for ending in members.images if ending in files), None)
    there = ", ".join(f".{ending}" for ending in files)
    if image is None:
        wanted = ", ".join(f".{ending}" for ending in members.images)
        raise DataError(f"Sample '{key}' in '{shard}' has no image: it has {there}, and none of {wanted}.")
    if members.label not in files:
        raise DataError(
            f"Sample '{key}' in '{shard}' has no class: it has {there}, and no .{members.label}. If another file has "
            "the class, name its ending with the option label."
        )
    opened = tar.extractfile(files[members.label])
    text = opened.read(64) if opened is not None else b""
    try:
        label = int(text)
    except ValueError:
        raise DataError(
            f"'{files[members.label].name}' in '{shard}' is {text!r}; it must be the number of a class, such as 7."
        ) from None
    if not 0 <= label < 2**31:
        raise DataError(
            f"Sample '{key}' in '{shard}' has class {label}, and classes are counted from 0. A test part may come "
            "without classes: choose another with the option held_out."
        )
    return image.offset_data, image.size, label, 0
