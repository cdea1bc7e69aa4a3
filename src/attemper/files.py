"""Files: atomic writes, and weights from every kind of file that holds them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from attemper.errors import UnreadableError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
"""The name of the weights in the folder of a finished run."""
DIGEST = 32
"""Bytes of the SHA-256 behind the data of our own checkpoints."""
NESTED = ("best", "state_dict", "model_state_dict", "model")
"""Names under which training scripts, ours among them, keep the weights in a checkpoint."""
WRAPPERS = ("module.", "_orig_mod.")


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
    for part in folder.glob(pattern):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime >= older_than:
                part.unlink()


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
    if path.is_dir():
        path = weights_in(path)
    try:
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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnreadableError(
            f"'{path}' cannot be read as weights ({reason}). Save model.state_dict() with torch.save or as "
            ".safetensors."
        ) from error


def weights_in(folder: Path) -> Path:
    """The file of weights in the folder of a finished run."""
    if (path := folder / WEIGHTS).is_file():
        return path
    raise UnreadableError(
        f"'{folder}' has no {WEIGHTS}: it is not the folder of a finished run. 'attemper train --folder {folder}' "
        "makes one; a study keeps results, and no weights."
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
