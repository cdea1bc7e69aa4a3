"""Parquet files as a store, local or on the hub, read row group by row group.

Their footers say how many rows each group has, so that every sample has a number before any image is read. The process
that trains reads whole groups, in a thread; its workers get the files of single images and decode them.
"""

import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.errors import MissingFileError, UnreadableError, first_line, suggestion
from attemper.files import atomic_write, read_json_object
from attemper.lab.errors import DataError
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.notifications import note
from attemper.lab.tasks.scan_files import CACHE, look_through
from attemper.lab.tasks.streaming.order import BUFFER, LANES, Selection

OPEN = 32
"""Files that are kept open."""

PAUSES = (1.0, 4.0, 16.0, 64.0)
"""Seconds between two tries to read what is not on this machine."""

LARGE = 8 * 1024**3
"""Bytes of row groups in memory above which there is a note."""


@dataclasses.dataclass
class RowGroupStore:
    """Samples in row groups of parquet files.

    rows, sizes: of every group, samples and bytes. places: file and number in it of every group.
    class_names: as the data set has them; none: it has numbers only. classes: how many there are; others are an error.
    """

    files: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    image: str
    label: str
    class_names: tuple[str, ...] | None
    classes: int | None = None
    _open: dict[int, Any] = dataclasses.field(default_factory=dict, repr=False)
    _groups: collections.OrderedDict[int, Any] = dataclasses.field(default_factory=collections.OrderedDict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """A worker gets what was read for it, and reads nothing."""
        return {**self.__dict__, "_open": {}, "_groups": collections.OrderedDict()}

    @property
    def fingerprint(self) -> str:
        """Of the names of the files, and of rows and bytes of their groups."""
        names = [each.rpartition("/")[2] for each in self.files]
        return of_parts(*names, repr((self.places, self.rows, self.sizes)), repr(self.class_names))

    @property
    def selection(self) -> Selection:
        return Selection(self._starts, np.array(self.rows, dtype=np.int64), by_unit=True)

    @cached_property
    def _starts(self) -> Any:
        return np.cumsum([0, *self.rows[:-1]]).astype(np.int64)

    @cached_property
    def _capacity(self) -> int:
        """Samples that are in memory at most: as many as the lanes of an epoch shuffle."""
        return LANES * (BUFFER + max(self.rows))

    # ------------------------------------------------------------------------------------------------------- reading
    def hand_out(self, samples: Tensor) -> list[Any]:
        groups = np.searchsorted(self._starts, samples.numpy(), side="right") - 1
        items = []
        for sample, group in zip(samples.tolist(), groups.tolist(), strict=True):
            row = sample - int(self._starts[group])
            images, labels = self._group(group)
            items.append((images[row].as_py(), labels[row].as_py(), group, row))
        return items

    def _group(self, group: int) -> tuple[Any, Any]:
        """Files and classes of a row group; the groups that were used last are kept."""
        if group in self._groups:
            self._groups.move_to_end(group)
        else:
            held = sum(self.rows[each] for each in self._groups)
            while self._groups and held + self.rows[group] > self._capacity:
                held -= self.rows[self._groups.popitem(last=False)[0]]
            table = self._read(group, [self.image, self.label])
            images = table.column(self.image).combine_chunks()
            self._groups[group] = images.field("bytes"), table.column(self.label).combine_chunks()
        kept: tuple[Any, Any] = self._groups[group]
        return kept

    def _read(self, group: int, columns: list[str]) -> Any:
        """Some columns of a group. Over a network it is tried again: a run of days shall survive a hitch."""
        file, number = self.places[group]
        pauses = PAUSES if is_remote(self.files[file]) else ()
        for pause in (*pauses, None):
            try:
                return self._file(file).read_row_group(number, columns=columns)
            except Exception as error:  # pyarrow's are OSError and ValueError; networks have many more
                if opened := self._open.pop(file, None):
                    opened.close(force=True)
                if pause is None:
                    raise DataError(
                        f"Row group {number} of '{self.files[file]}' cannot be read: {first_line(error)}"
                    ) from error
                time.sleep(pause)
        raise AssertionError

    def _file(self, file: int) -> Any:
        if file not in self._open:
            if len(self._open) >= OPEN:
                self._open.pop(next(iter(self._open))).close(force=True)
            self._open[file] = open_parquet(self.files[file])
        return self._open[file]

    def fetch(self, item: tuple[bytes | None, int | None, int, int]) -> tuple[bytes, int]:
        data, label, _, _ = item
        if data is None:
            raise DataError(f"{self.where(item)} has no image in '{self.image}'.")
        return data, self._checked(label, item)

    def check_classes(self, classes: int) -> None:
        """Raise if a sample of the first or of the last group has no class; the others are seen when they are read."""
        self.classes = classes
        for group in {0, len(self.rows) - 1}:
            labels = self._read(group, [self.label]).column(self.label)
            for row, label in enumerate(labels.to_pylist()):
                self._checked(label, (None, label, group, row))

    def _checked(self, label: int | None, item: tuple[Any, Any, int, int]) -> int:
        if label is None or self.classes is None or not 0 <= label < self.classes:
            raise no_class(self.where(item), label, self.label, self.classes)
        return label

    def where(self, item: tuple[Any, Any, int, int]) -> str:
        _, _, group, row = item
        file, number = self.places[group]
        return f"Row {row} of row group {number} in '{self.files[file]}'"

    def labels(self) -> Tensor:
        columns = [
            self._read(group, [self.label]).column(self.label).fill_null(-1).to_numpy()
            for group in range(len(self.rows))
        ]
        return torch.from_numpy(np.concatenate(columns).astype(np.int64))


def no_class(where: str, label: int | None, column: str, classes: int | None) -> DataError:
    """What to say of a sample whose class is none of those that there are."""
    return DataError(
        f"{where} has class {label} in '{column}', and there are {classes}, counted from 0. A test split may come "
        "without classes: choose another with the option held_out."
    )


# ---------------------------------------------------------------------------------------------------------- the footers
def open_row_groups(files: Sequence[str], image: str, label: str, root: Path) -> RowGroupStore:
    """The row groups of some parquet files, and the classes that they name."""
    schema = _translated(files[0], lambda: open_parquet(files[0]).schema_arrow)
    class_names = _check_columns(schema, files[0], image, label)
    footers = _footers(files, root)
    places, rows, sizes = [], [], []
    for file, groups in enumerate(footers):
        for number, (count, size) in enumerate(groups):
            if count:
                places.append((file, number))
                rows.append(count)
                sizes.append(size)
    if not rows:
        raise DataError(f"There is no row in '{files[0]}'{' and the other files of its split' if files[1:] else ''}.")
    if LANES * max(sizes) > LARGE:
        note(
            f"The largest row group of '{files[places[int(np.argmax(sizes))][0]]}' has {max(sizes) / 1e9:.1f} GB, and "
            f"up to {LANES} are in memory at a time. With streaming=false the data set is prepared on disk instead."
        )
    return RowGroupStore(tuple(files), tuple(places), tuple(rows), tuple(sizes), image, label, class_names)


def _check_columns(schema: Any, file: str, image: str, label: str) -> tuple[str, ...] | None:
    """See that there are images and classes; the names of the classes, if there are any."""
    import pyarrow  # type: ignore[import-untyped]
    from datasets import ClassLabel, Features  # type: ignore[import-untyped]

    for option, column in (("image", image), ("label", label)):
        if column not in schema.names:
            raise DataError(
                f"'{file}' has no column '{column}'.{suggestion(column, schema.names)} It has: "
                f"{', '.join(schema.names)}; choose with the option {option}."
            )
    kind = schema.field(image).type
    if not pyarrow.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        raise DataError(f"The column '{image}' of '{file}' holds {kind}, and no images with their bytes.")
    if not pyarrow.types.is_integer(schema.field(label).type):
        raise DataError(
            f"The column '{label}' of '{file}' holds {schema.field(label).type}, and no numbers of classes."
        )
    feature = Features.from_arrow_schema(schema)[label]
    return tuple(feature.names) if isinstance(feature, ClassLabel) else None


def _footers(files: Sequence[str], root: Path) -> list[list[list[int]]]:
    """Rows and bytes of the groups of every file: remembered under the data root, or read."""
    cache = root / CACHE / f"{of_parts('parquet', *map(_stamp, files))}.json"
    try:
        held = read_json_object(cache)
        known: list[list[list[int]]] = held["footers"]
        if held["check"] == of_parts(cache.name, json.dumps(known)):
            return known
        raise ValueError("it is not what was written")
    except MissingFileError:
        pass
    except (UnreadableError, ValueError, KeyError) as error:
        note(f"The notes on parquet files in '{cache}' are damaged ({first_line(error)}); they are made again.")
    found = look_through("Reading what the parquet files hold", files, _footer)
    with contextlib.suppress(OSError):  # then they are read again the next time
        text = json.dumps({"footers": found, "check": of_parts(cache.name, json.dumps(found))})
        atomic_write(cache, text, durable=False)
    return found


def _stamp(file: str) -> str:
    """What changes when a file does; the address of one on the hub has its revision in it."""
    if is_remote(file):
        return file
    try:
        status = Path(file).stat()
    except OSError as error:
        raise DataError(f"'{file}' cannot be read: {error.strerror or error}.") from None
    return f"{file} {status.st_size} {status.st_mtime_ns}"


def _footer(file: str) -> list[list[int]]:
    def read() -> list[list[int]]:
        opened = open_parquet(file)
        groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
        opened.close(force=True)
        return [[group.num_rows, group.total_byte_size] for group in groups]

    found: list[list[int]] = _translated(file, read)
    return found


def _translated(file: str, read: Any) -> Any:
    try:
        return read()
    except (OSError, ValueError) as error:  # pyarrow's errors are among them
        raise DataError(f"'{file}' is damaged, or not a parquet file: {first_line(error)}") from None


def is_remote(file: str) -> bool:
    """Whether a file is on the hub, not on a disk."""
    return "://" in file


def open_parquet(file: str) -> Any:
    """A parquet file, here or on the hub."""
    import fsspec  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    if not is_remote(file):
        return pyarrow.parquet.ParquetFile(file)
    return pyarrow.parquet.ParquetFile(fsspec.open(file, "rb").open(), pre_buffer=True)  # few large reads
