"""Sentences for what a file system refuses, and for files that a command would write over."""

import contextlib
import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attemper.errors import MissingFileError, ParameterError, UnreadableError
from attemper.files import read_bytes
from attemper.lab.errors import FolderError, UnreadableFolderError

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
    """The same error as a sentence, with the path that it is about."""
    reason = REASONS.get(error.errno or 0, error.strerror or str(error))
    return FolderError(f"{path} cannot be written: {reason}.")


def unreadable(path: Path, error: Exception) -> UnreadableFolderError:
    """For a file that can be made again."""
    return UnreadableFolderError(f"{path} cannot be read ({error}); remove it and run the same command again.")


def disk_error_behind(error: BaseException | None) -> OSError | None:
    """The full disk or read-only file system that caused an error, if that is what it comes from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL_OR_LOCKED:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def folder_errors(path: Path) -> Iterator[None]:
    """Context manager: an `OSError` inside it becomes a `FolderError`."""
    try:
        yield
    except OSError as error:
        raise folder_error(error, path) from error


def refuse_foreign(path: Path, is_ours: Callable[[bytes], bool], what: str) -> None:
    """Raise if a file is there that a command would write over, and that is not the same kind of file.

    is_ours: whether its content is. what: in words, such as 'a page of Attemper'. An empty file may be written over.
    """
    try:
        data = read_bytes(path)
    except MissingFileError:
        return
    except UnreadableError as error:
        if path.is_dir():
            raise ParameterError(f"{path} is a folder; give the name of a file in it.") from None
        if isinstance(error.__cause__, OSError):
            raise folder_error(error.__cause__, path) from error
        raise
    if data.strip() and not is_ours(data):
        raise ParameterError(f"{path} is there already, and is not {what}. Give another name, or remove it.")


def read_object(data: bytes) -> Mapping[str, Any]:
    """The JSON object that a file holds; an empty one where it holds anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def study_folder(task: str, model: str, *, evaluated: bool = False, mark: str = "") -> Path:
    """runs/<task>-<model>, in characters that every file system takes; runs that are evaluated are other runs.

    mark: tells apart what has the same names.
    """
    name = f"{task}-{model}{'-evaluated' if evaluated else ''}"
    words = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[:80] or "study"
    return Path("runs") / (f"{words}-{mark}" if mark else words)
