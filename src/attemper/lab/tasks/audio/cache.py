"""Files that hold what took long to compute: whole or absent, checked when they are read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from attemper.lab.tasks.errors import DataError
from attemper.lab.tasks.notifications import note

__all__ = ["FOLDER", "Cache", "Growing"]

FOLDER = ".attemper-cache"
"""Under the data root."""
FORGOTTEN = 24 * 3600
"""Seconds after which a part of a file was left behind by a process that was killed."""
PIECE = 2**24


class Growing:
    """A data file that is being written; it and its description appear when it is closed, and not before."""

    def __init__(self, cache: Cache, key: str, file: BinaryIO, part: Path) -> None:
        self._cache, self._key, self._file, self._part = cache, key, file, part
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)

    def close(self, meta: dict[str, Any]) -> None:
        """Put the file in its place, then what describes it."""
        self._file.close()
        self._part.replace(self._cache.data(self._key))
        text = json.dumps({**meta, "sha256": self._hash.hexdigest()})
        self._cache.write_text(self._cache.meta(self._key), text)


class Cache:
    """The folder of files that can be made again."""

    def __init__(self, root: Path) -> None:
        self.folder = root / FOLDER

    def data(self, key: str) -> Path:
        return self.folder / f"{key}.mel"

    def meta(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def read_stamp(self, stamps: str) -> str | None:
        """The key of the contents of files that had these names, sizes and times before."""
        try:
            return (self.folder / f"{stamps}.stamp").read_text(encoding="ascii").strip() or None
        except (OSError, UnicodeDecodeError):
            return None

    def write_stamp(self, stamps: str, key: str) -> None:
        self.write_text(self.folder / f"{stamps}.stamp", key)

    def read(self, key: str, size: int) -> tuple[dict[str, Any], np.ndarray[Any, Any]] | None:
        """What describes the data, and the data as bytes, mapped into memory; None where there is none to be used.

        size: bytes of each row.
        """
        try:
            meta = json.loads(self.meta(key).read_text(encoding="utf-8"))
            if not self.data(key).exists():
                raise ValueError("the spectrograms are missing")
            if not meta["rows"]:
                return meta, np.zeros((0,), np.uint8)
            data = np.memmap(self.data(key), np.uint8, "r")
            digest = hashlib.sha256()
            for begin in range(0, len(data), PIECE):
                digest.update(data[begin : begin + PIECE].tobytes())
            if len(data) != len(meta["rows"]) * size or digest.hexdigest() != meta["sha256"]:
                raise ValueError("the spectrograms are not those that were written")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._set_aside(key, error)
            return None
        return meta, data

    def _set_aside(self, key: str, error: Exception) -> None:
        """Rename what cannot be used, so that it can be made again and somebody can look at it."""
        number = 1
        while any(self.folder.glob(f"{key}.*.corrupt-{number}")):
            number += 1
        with self._translated():
            for path in (self.meta(key), self.data(key)):
                with contextlib.suppress(FileNotFoundError):
                    path.rename(path.with_name(f"{path.name}.corrupt-{number}"))
        note(f"The cache of spectrograms '{self.meta(key)}' is damaged ({error}); it is set aside and made again.")

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[Growing]:
        """A data file to write into; nothing is left of one that is not closed."""
        part = self._part(self.data(key))
        with self._translated():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            try:
                with part.open("wb") as file:
                    yield Growing(self, key, file, part)
            finally:
                part.unlink(missing_ok=True)

    def write_text(self, path: Path, text: str) -> None:
        """Write a small file so that it is whole or absent."""
        part = self._part(path)
        with self._translated():
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                part.write_text(text, encoding="utf-8")
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)

    def _part(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")

    def _sweep(self) -> None:
        for part in self.folder.glob(".*.part"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > FORGOTTEN:
                    part.unlink()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"'{self.folder}', where spectrograms are kept, cannot be written: {error.strerror or error}. Name "
                "another data root (or set ATTEMPER_DATA); audio folders can be given by their whole path."
            ) from error
