"""Files that are whole or absent, and words for what a file system refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from attemper.lab.errors import FolderError

__all__ = ["folder_error", "is_folder_trouble", "translated", "write_whole"]

REASONS = {
    errno.ENOSPC: "no space is left on the disk; make room and run the same command again",
    errno.EDQUOT: "your disk quota is used up; make room and run the same command again",
    errno.EROFS: "the file system is read-only; choose a folder that you may write to",
    errno.EACCES: "permission is denied; choose a folder that you may write to",
    errno.EPERM: "permission is denied; choose a folder that you may write to",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
}
FULL_OR_LOCKED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def folder_error(error: OSError, path: Path) -> FolderError:
    """The same trouble in words, with the path that it is about."""
    reason = REASONS.get(error.errno or 0, error.strerror or str(error))
    return FolderError(f"{path} cannot be written: {reason}.")


def is_folder_trouble(error: BaseException | None) -> OSError | None:
    """The full disk or read-only file system behind an error, if that is what it comes from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL_OR_LOCKED:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn whatever the file system refuses inside into a `FolderError`."""
    try:
        yield
    except OSError as error:
        raise folder_error(error, path) from error


def write_whole(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a file so that at every moment, even that of a crash, it is whole, as it was before, or absent.

    durable: wait until the disk has it; without, a power cut may bring the old file back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where the file system knows how."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
