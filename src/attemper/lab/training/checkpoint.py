"""Checkpoints: whole or absent, never half; a damaged one is set aside and named."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch

from attemper.errors import AttemperError

__all__ = [
    "CHECKPOINT",
    "DamagedError",
    "StorageError",
    "load_checkpoint",
    "make_ready",
    "save_checkpoint",
    "set_aside",
]

CHECKPOINT = "checkpoint.pt"
"""The name of the one checkpoint in a run's folder."""

DIGEST = 32  # bytes of a SHA-256, which stand behind what torch wrote


class StorageError(AttemperError):
    """A file could not be written: a full disk, a folder without permission."""


class DamagedError(AttemperError):
    """A checkpoint cannot be read, or belongs to another run."""


def make_ready(folder: Path) -> None:
    """See that checkpoints can be written to a folder, before hours are spent on what they shall hold.

    What a killed process has left half-written there is removed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for remnant in folder.glob(f".{CHECKPOINT}.*"):
            remnant.unlink()
        probe = _temporary(folder)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageError(f"No checkpoint can be written to '{folder}': {error.strerror or error}.") from error


def _temporary(folder: Path) -> Path:
    return folder / f".{CHECKPOINT}.{os.getpid()}"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint of tensors and plain containers in place of the one before.

    It is written under another name, forced to the disk and then renamed, so that at every moment either the old or the
    new one is there in full.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    temporary = _temporary(folder)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.write(hashlib.sha256(data).digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / CHECKPOINT)
        _sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(
            f"The checkpoint '{folder / CHECKPOINT}' could not be written: {error.strerror or error}. "
            "The one before it, if there was one, is unharmed."
        ) from error


def _sync_folder(folder: Path) -> None:
    """Force the new name itself to the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """What `save_checkpoint` wrote, on the CPU; None where there is none. Nothing in the file is executed."""
    file = folder / CHECKPOINT
    try:
        whole = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"The checkpoint '{file}' could not be read: {error.strerror or error}.") from error
    data, digest = whole[:-DIGEST], whole[-DIGEST:]
    if hashlib.sha256(data).digest() != digest:
        raise DamagedError(f"The checkpoint '{file}' is damaged ({len(whole):,} bytes)")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whole, and yet not ours: torch raises many kinds
        raise DamagedError(f"The checkpoint '{file}' cannot be read ({type(error).__name__}: {error})") from error
    return state


def set_aside(folder: Path) -> Path:
    """Give the checkpoint a name under which nobody looks for it, and say which."""
    number = 1
    while (aside := folder / f"{CHECKPOINT}.damaged-{number}").exists():
        number += 1
    (folder / CHECKPOINT).rename(aside)
    return aside
