"""Checkpoints, written atomically; a damaged one is set aside and named."""

import hashlib
import io
import tempfile
from pathlib import Path
from typing import Any

import torch

from attemper.errors import MissingFileError, UnreadableError, first_line
from attemper.files import atomic_file, read_bytes, remove_parts, without_digest
from attemper.lab.errors import DamagedError, StorageError

CHECKPOINT = "checkpoint.pt"
"""The name of the one checkpoint in a run's folder."""
MOST_BYTES = 2**42
"""Of a checkpoint: four terabytes."""


def make_ready(folder: Path) -> None:
    """See that checkpoints can be written to a folder, before hours are spent on what they shall hold.

    What a killed process has left half-written there is removed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_parts(folder, f".{CHECKPOINT}.*")
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{CHECKPOINT}."):
            pass
    except OSError as error:
        raise StorageError(f"No checkpoint can be written to '{folder}': {error.strerror or error}.") from error


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint of tensors and plain containers, with its SHA-256 behind it, in place of the one before."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    try:
        with atomic_file(folder / CHECKPOINT) as file:
            file.write(data)
            file.write(hashlib.sha256(data).digest())
    except OSError as error:
        raise StorageError(
            f"The checkpoint '{folder / CHECKPOINT}' could not be written: {error.strerror or error}. "
            "The one before it, if there was one, is unharmed."
        ) from error


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """What `save_checkpoint` wrote, on the CPU; None where there is none. Nothing in the file is executed."""
    file = folder / CHECKPOINT
    try:
        whole = read_bytes(file, most=MOST_BYTES)
    except MissingFileError:
        return None
    except UnreadableError as error:
        raise UnreadableError(f"The checkpoint could not be read: {error}") from error
    if (data := without_digest(whole)) is None:
        raise DamagedError(f"The checkpoint '{file}' is damaged ({len(whole):,} bytes)")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # not damaged, and yet not ours: torch raises many kinds
        raise DamagedError(
            f"The checkpoint '{file}' cannot be read ({type(error).__name__}: {first_line(error)})"
        ) from error
    return state
