"""Files that hold what took long to compute: written atomically, checked when they are read."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from attemper.files import atomic_file, atomic_write, remove_parts
from attemper.lab.errors import DataError
from attemper.lab.tasks.notifications import note

FOLDER = ".attemper-cache"
"""Under the data root."""
FORGOTTEN = 24 * 3600
"""Seconds after which a part of a file was left behind by a process that was killed."""
PIECE = 2**24


class Growing:
    """A data file that is being written, and the hash of what is in it so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.meta: dict[str, Any] = {}
        """What describes the data; filled in by the caller."""

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)

    def described(self) -> str:
        return json.dumps({**self.meta, "sha256": self._hash.hexdigest()})


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
        with self._data_errors():
            atomic_write(self.folder / f"{stamps}.stamp", key, durable=False)

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
        with self._data_errors():
            for path in (self.meta(key), self.data(key)):
                with contextlib.suppress(FileNotFoundError):
                    path.rename(path.with_name(f"{path.name}.corrupt-{number}"))
        note(f"The cache of spectrograms '{self.meta(key)}' is damaged ({error}); it is set aside and made again.")

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[Growing]:
        """Context manager: a data file to write into, and when the block ends without an error, what describes it."""
        with self._data_errors():
            remove_parts(self.folder, older_than=FORGOTTEN)
            with atomic_file(self.data(key), durable=False) as file:
                growing = Growing(file)
                yield growing
            atomic_write(self.meta(key), growing.described(), durable=False)

    @contextlib.contextmanager
    def _data_errors(self) -> Iterator[None]:
        """Context manager: an `OSError` inside it becomes a `DataError`."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"'{self.folder}', where spectrograms are kept, cannot be written: {error.strerror or error}. Name "
                "another data root (or set ATTEMPER_DATA); audio folders can be given by their whole path."
            ) from error
