"""The weights that a finished run chose, as safetensors, with the run that they belong to."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from torch import Tensor

from attemper.lab.training.checkpoint import DamagedError, StorageError
from attemper.lab.training.spec import RunSpec

__all__ = ["WEIGHTS", "load_weights", "save_weights"]

WEIGHTS = "model.safetensors"
"""The name of the file in a run's folder."""


def save_weights(folder: Path, weights: dict[str, Tensor], spec: RunSpec, fingerprint: str) -> None:
    """Write weights, on the CPU, in place of those that were there; at every moment either are there in full.

    fingerprint: of the data that the run saw.
    """
    from safetensors.torch import save

    notes = {"format": "pt", "spec": json.dumps(spec.to_dict()), "fingerprint": fingerprint}
    data = save({name: value.contiguous() for name, value in weights.items()}, metadata=notes)
    temporary = folder / f".{WEIGHTS}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / WEIGHTS)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(
            f"The weights '{folder / WEIGHTS}' could not be written: {error.strerror or error}."
        ) from error


def load_weights(folder: Path) -> tuple[dict[str, Tensor], RunSpec, str]:
    """The weights in a run's folder, the run that they belong to, and the fingerprint of its data."""
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS
    if not path.is_file():
        raise StorageError(
            f"'{folder}' has no {WEIGHTS}: it is not the folder of a finished run. 'attemper train --folder {folder}' "
            "makes one; a study keeps results, and no weights."
        )
    try:
        with safe_open(path, framework="pt") as file:
            notes = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return weights, RunSpec.from_dict(json.loads(notes["spec"])), notes["fingerprint"]
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"The weights '{path}' cannot be read: {error}.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"'{path}' does not say which run its weights belong to ({error!r}).") from error
