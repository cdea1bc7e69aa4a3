"""Reading arrays and JSON, with messages that name the file."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attemper.errors import UnreadableError, first_line
from attemper.files import read_json_object
from attemper.lab.errors import DataError
from attemper.lab.tasks.actions.videos import Array


@dataclasses.dataclass(frozen=True)
class InMemory:
    """Features that are there already."""

    values: Array

    def read(self) -> Array:
        return self.values


@dataclasses.dataclass(frozen=True)
class FeatureFiles:
    """Features in one file, or in several whose columns stand side by side (RGB and flow)."""

    files: tuple[Path, ...]

    def read(self) -> Array:
        parts = [_open(file) for file in self.files]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def window(self, indices: Array) -> Array:
        """(indices, width): only these steps are read, where the files allow it."""
        return np.concatenate([_open(file)[indices] for file in self.files], axis=1)

    def __str__(self) -> str:
        """Folders, names and sizes: enough to recognise them."""
        return "; ".join(f"{file.parent.name}/{file.name} {file.stat().st_size}" for file in self.files)

    def check(self) -> tuple[int, int, np.dtype[Any]]:
        """Steps, width and type; a file that is not a table of numbers is refused."""
        shapes: list[tuple[int, ...]] = []
        kinds = []
        for file in self.files:
            values = _open(file)
            if values.ndim != 2 or not len(values) or not values.shape[1]:
                raise DataError(f"'{file}' has the shape {values.shape}; it must be (steps, features).")
            if values.dtype.kind not in "fiu":
                raise DataError(f"'{file}' holds {values.dtype}; features must be numbers.")
            if shapes and shapes[0][0] != len(values):
                raise DataError(f"'{file}' has {len(values)} steps and '{self.files[0]}' {shapes[0][0]}.")
            shapes.append(values.shape)
            kinds.append(values.dtype)
        return shapes[0][0], sum(shape[1] for shape in shapes), np.result_type(*kinds)


def _open(file: Path) -> Array:
    """An array to take windows of: a view of an .npy file; an .npz file is held until another video is read."""
    if file.suffix != ".npz":
        return load_array(file)
    with reading(file, "an array"):
        about = file.stat()
    return _held(file, about.st_mtime_ns, about.st_size)


@functools.lru_cache(maxsize=2)  # RGB and flow: memory is bounded by one video
def _held(file: Path, changed: int, size: int) -> Array:
    return load_array(file)


@contextlib.contextmanager
def reading(file: Path, what: str) -> Iterator[None]:
    """Context manager: whatever goes wrong inside it with a file of arrays is a `DataError` that names the file.

    what: such as 'an array'.
    """
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"'{file}' is not there.") from None
    except Exception as error:  # numpy, zipfile and zlib have many ways to say that a file is damaged
        raise DataError(f"'{file}' is not {what} that can be read: {first_line(error)}") from None


def load_array(file: Path) -> Array:
    """An array: a view of an .npy file, or what an .npz file holds under 'features' or as its only array."""
    with reading(file, "an array"):
        if file.suffix == ".npy":
            values: Array = np.load(file, mmap_mode="r", allow_pickle=False)
            return values
        with open_npz(file) as inside:
            names = list(inside)
            if "features" not in names and len(names) != 1:
                raise DataError(f"'{file}' holds {', '.join(names) or 'nothing'}; it needs an array named 'features'.")
            found: Array = inside["features" if "features" in names else names[0]]
            return found


def open_npz(file: Path) -> Any:
    """An .npz file, closed by `with`."""
    with reading(file, "an .npz file"):
        opened = np.load(file, allow_pickle=False)
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise DataError(f"'{file}' is a single array; an .npz file of several is needed.")
    return opened


def load_json(file: Path) -> dict[str, Any]:
    """A JSON file whose outermost value is an object."""
    try:
        return read_json_object(file)
    except UnreadableError as error:
        raise DataError(str(error)) from None
