"""Files: atomic writes, one way to read what somebody may have damaged, and weights from every kind of file."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from attemper.errors import MissingFileError, UnreadableError, first_line

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
"""The name of the weights in the folder of a finished run."""
DIGEST = 32
"""Bytes of the SHA-256 behind the data of our own checkpoints."""
NESTED = ("best", "state_dict", "model_state_dict", "model")
"""Names under which training scripts, ours among them, keep the weights in a checkpoint."""
WRAPPERS = ("module.", "_orig_mod.")
MOST_BYTES = 2**28
"""Of a file that is read as a whole: text, JSON, a table. Results of a run have some kilobytes."""


# ----------------------------------------------------------------------------------------------------- atomic writes
@contextlib.contextmanager
def atomic_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Context manager: a new file to write to, which takes the place of `path` when the block ends without an error.

    Until then, and after a crash, `path` is what it was before. Its folder is made if need be. Whatever goes wrong with
    the disk is an `OSError`, and no temporary file is left behind, unless the process is killed: see `remove_parts`.

    durable: wait until the disk has it; without, a power cut may bring the old file back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("wb") as file:
            yield file
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


def atomic_write(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write text (as UTF-8) or bytes as `atomic_file` does.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     atomic_write(Path(folder) / "new" / "notes.txt", "one")
    ...     (Path(folder) / "new" / "notes.txt").read_text()
    'one'
    """
    with atomic_file(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def remove_parts(folder: Path, pattern: str = ".*.part", *, older_than: float = 0.0) -> None:
    """Remove the temporary files of processes that were killed. older_than: seconds since they were last written."""
    parts = list(folder.glob(pattern))
    now = time_in(folder) if parts and older_than else math.inf
    for part in parts:
        with contextlib.suppress(OSError):
            if now - part.stat().st_mtime >= older_than:
                part.unlink()


def time_in(folder: Path) -> float:
    """The time by the clock that stamps files in a folder, which on a network file system is its server's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:  # a folder that we may only read
        return time.time()


def set_aside(path: Path, word: str) -> Path:
    """Rename a file that cannot be used, so that it can be made again and somebody can look at it; gives its new path.

    word: for its new name, such as 'damaged' for notes.txt.damaged-1.
    """
    number = 1
    while (aside := path.with_name(f"{path.name}.{word}-{number}")).exists():
        number += 1
    return path.rename(aside)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where the file system knows how."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ----------------------------------------------------------------------------------------------------------- reading
def read_bytes(path: Path, *, most: int = MOST_BYTES, pipes: bool = False) -> bytes:
    """The contents of a file. Whatever is wrong with it is an `UnreadableError` of one line that names it.

    most: bytes; a larger file is refused, and not read.
    pipes: take what is no file on a disk, too, such as /dev/stdin; otherwise it is refused, and never waited for.
    """
    try:
        with open(path, "rb", opener=None if pipes else open_at_once) as file:
            about = os.fstat(file.fileno())
            if stat.S_ISREG(about.st_mode):
                large = about.st_size > most
                data = b"" if large else file.read()
            elif pipes:
                data = file.read(most + 1)
                large = len(data) > most
            else:
                raise UnreadableError(f"'{path}' cannot be read: it is no file.")
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"There is no file '{path}'.") from None
    except (OSError, ValueError) as error:  # a loop of links, a folder, no permission; a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise UnreadableError(f"'{path}' cannot be read: {reason}.") from error
    if large:
        raise UnreadableError(f"'{path}' has more than {most:,} bytes, which is the most that is read of such a file.")
    return data


def open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for somebody to write to it, should it be a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_text(path: Path, *, most: int = MOST_BYTES, pipes: bool = False) -> str:
    """A file of text in UTF-8, read as `read_bytes` does."""
    try:
        return read_bytes(path, most=most, pipes=pipes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"'{path}' is no text in UTF-8: byte {error.start:,} is wrong.") from error


def read_json(path: Path, *, most: int = MOST_BYTES) -> Any:
    """The value in a JSON file, read as `read_bytes` does."""
    return parse_json(read_bytes(path, most=most), f"'{path}'")


def read_json_object(path: Path, *, most: int = MOST_BYTES) -> dict[str, Any]:
    """The same, where it must be an object."""
    found = read_json(path, most=most)
    if not isinstance(found, dict):
        raise UnreadableError(f"'{path}' holds a JSON {type(found).__name__}; it must be an object, {{…}}.")
    return found


def parse_json(data: bytes | str, where: str, *, finite: bool = False) -> Any:
    """The value that JSON stands for.

    where: what is read, for messages. finite: refuse NaN and Infinity, which Python writes and JSON does not have.

    >>> parse_json("[1, 2", "'numbers.json'")
    Traceback (most recent call last):
    attemper.errors.UnreadableError: 'numbers.json' is no JSON, or damaged (Expecting ',' delimiter: line 1 column 6 ...
    """
    try:
        return json.loads(data, parse_constant=_refuse_constant if finite else None)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{where} is no JSON, or damaged ({first_line(error)}).") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


# ----------------------------------------------------------------------------------------------------------- weights
@dataclass(frozen=True)
class Weights:
    """A model's weights as a file has them, on the CPU."""

    path: Path
    tensors: dict[str, Tensor]
    notes: dict[str, str] = field(default_factory=dict)
    """The metadata of a safetensors file; those of a run say which run it was."""


def read_weights(path: str | Path, wanted: Callable[[str], bool] = lambda name: True) -> Weights:
    """The weights in a safetensors file, in a checkpoint of torch, or in the folder of a finished run.

    A checkpoint may hold tensors and plain containers; nothing in it is executed. Weights that lie under a name such as
    "state_dict", or that were saved from a wrapped model ("module."), are found too.

    wanted: by their names, those to give; of a safetensors file, the others are not read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            path = weights_in(path)
        elif path.exists() and not path.is_file():
            raise UnreadableError(f"'{path}' cannot be read as weights: it is no file.")
        if _is_safetensors(path):
            return _read_safetensors(path, wanted)
        return Weights(path, {name: value for name, value in _read_torch(path).items() if wanted(name)})
    except FileNotFoundError:
        raise UnreadableError(f"There is no file '{path}' to read weights from.") from None
    except ModuleNotFoundError:
        raise UnreadableError(f"'{path}' needs the package safetensors: pip install safetensors") from None
    except UnreadableError:
        raise
    except Exception as error:  # damaged files, and files that would run code: torch raises many kinds
        raise UnreadableError(
            f"'{path}' cannot be read as weights ({first_line(error)}). Save model.state_dict() with torch.save or as "
            ".safetensors."
        ) from error


def read_notes(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, without its weights; those of a run say which run it was."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except Exception as error:  # damaged files, and files that are something else: safetensors raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnreadableError(f"'{path}' cannot be read as safetensors ({reason}).") from error


def weights_in(folder: Path) -> Path:
    """The file of weights in the folder of a finished run."""
    if (path := folder / WEIGHTS).is_file():
        return path
    raise UnreadableError(
        f"'{folder}' has no {WEIGHTS}: it is not the folder of a finished run. 'attemper train --folder {folder}' "
        "makes one."
    )


def _is_safetensors(path: Path) -> bool:
    """By its name, or because a JSON object stands behind eight bytes of length."""
    if path.suffix == ".safetensors":
        return True
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _read_safetensors(path: Path, wanted: Callable[[str], bool]) -> Weights:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if wanted(name)]  # noqa: SIM118
        return Weights(path, {name: file.get_tensor(name) for name in names}, file.metadata() or {})


def _read_torch(path: Path) -> dict[str, Tensor]:
    import torch

    data = path.read_bytes()
    found: Any = torch.load(io.BytesIO(without_digest(data) or data), map_location="cpu", weights_only=True)
    nested = (found[name] for name in NESTED if isinstance(found, dict) and isinstance(found.get(name), dict))
    found = next(nested, found)
    if not isinstance(found, dict) or not found or not all(isinstance(v, torch.Tensor) for v in found.values()):
        raise UnreadableError(
            f"'{path}' holds no weights: a state dict, or one under {', '.join(NESTED)}, was expected."
        )
    return _without_wrapper(found)


def without_digest(data: bytes) -> bytes | None:
    """What stands before a SHA-256 of itself; None where no such digest ends the data, or where it does not match."""
    return data[:-DIGEST] if hashlib.sha256(data[:-DIGEST]).digest() == data[-DIGEST:] else None


def _without_wrapper(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names that they have in the model itself, not in DDP's or torch.compile's wrapper."""
    for wrapper in WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): value for name, value in tensors.items()}
    return tensors
