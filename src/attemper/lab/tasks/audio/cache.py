"""Files that hold what took long to compute: written atomically, checked when they are read."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from attemper.errors import MissingFileError, UnreadableError
from attemper.files import atomic_file, atomic_write, read_json_object, read_text, remove_parts
from attemper.lab.errors import DataError
from attemper.lab.tasks.fingerprint import of_parts
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
            key, _, check = read_text(self.folder / f"{stamps}.stamp").partition(" ")
        except UnreadableError:
            return None
        return key if check == of_parts(stamps, key) else None  # else somebody has changed it: all files are read again

    def write_stamp(self, stamps: str, key: str) -> None:
        with self._data_errors():
            atomic_write(self.folder / f"{stamps}.stamp", f"{key} {of_parts(stamps, key)}", durable=False)

    def read(self, key: str, size: int, clips: int) -> tuple[dict[str, Any], np.ndarray[Any, Any]] | None:
        """What describes the data, and the data as bytes, mapped into memory; None where there is none to be used.

        size: bytes of each row. clips: how many files there were.
        """
        try:
            meta = read_json_object(self.meta(key))
            if not self.data(key).is_file():
                raise ValueError("the spectrograms are missing")
            if not _fits(meta, clips):
                raise ValueError("it does not describe these files")
            if not meta["rows"]:
                return meta, np.zeros((0,), np.uint8)
            data = np.memmap(self.data(key), np.uint8, "r")
            digest = hashlib.sha256()
            for begin in range(0, len(data), PIECE):
                digest.update(data[begin : begin + PIECE].tobytes())
            if len(data) != len(meta["rows"]) * size or digest.hexdigest() != meta["sha256"]:
                raise ValueError("the spectrograms are not those that were written")
        except (FileNotFoundError, MissingFileError):
            return None
        except (UnreadableError, OSError, ValueError, KeyError) as error:
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
            path = error.filename2 or error.filename or self.folder
            raise DataError(
                f"'{path}', where spectrograms are kept, cannot be written: {error.strerror or error}. Name another "
                "data root (or set ATTEMPER_DATA); audio folders can be given by their whole path."
            ) from error


def _fits(meta: dict[str, Any], clips: int) -> bool:
    """Whether a description is one of so many files: rows, equal rows and problems, with numbers that there are."""
    rows, equal, problems = meta.get("rows"), meta.get("equal"), meta.get("problems")
    if not isinstance(rows, list) or not isinstance(equal, list) or not isinstance(problems, dict):
        return False
    numbers = [*rows, *equal, *(int(index) for index in problems if index.isdecimal())]
    return (
        len(rows) == len(equal)
        and len(rows) + len(problems) == clips
        and all(isinstance(number, int) and 0 <= number < clips for number in numbers)
        and all(index.isdecimal() and isinstance(reason, str) for index, reason in problems.items())
        and sorted([*rows, *map(int, problems)]) == list(range(clips))
    )
