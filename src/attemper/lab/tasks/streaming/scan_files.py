"""One look at every file of a large data set, several at a time, and what came of it kept for the next time."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from attemper.lab.tasks.notifications import progress

__all__ = ["CACHE", "look_through", "write_whole"]

CACHE = ".attemper-cache"
"""Under the data root."""

AT_ONCE = 8
"""Files that are looked at side by side: a disk far away answers late, but it answers several questions at once."""

File = TypeVar("File")
Found = TypeVar("Found")


def look_through(what: str, files: Sequence[File], look: Callable[[File], Found]) -> list[Found]:
    """What is found in every file, in their order; the first error ends it.

    what: a few words for the progress bar.
    """
    found: list[Found] = []
    progress(what, 0, len(files))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for each in pool.map(look, files):
                found.append(each)
                progress(what, len(found), len(files))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def write_whole(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that it is whole or absent; what goes wrong is an `OSError`."""
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb") as opened:
            write(opened)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
