"""Arrays of measurements and labels, under the names and in the layouts that people give them."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from attemper.lab.errors import DataError
from attemper.lab.tasks import source
from attemper.lab.tasks.actions.arrays import load_array, open_npz
from attemper.lab.tasks.broken import Broken, listed, settle, shown

Array = np.ndarray[Any, np.dtype[Any]]

Layout = Literal["ntc", "nct", "nt"]
LAYOUTS = {
    "ntc": "(windows, steps, channels)",
    "nct": "(windows, channels, steps)",
    "nt": "(windows, steps) of one channel",
}
USUAL = {
    "x": ("x", "data", "features", "signals", "inputs"),
    "y": ("y", "labels", "label", "targets", "target"),
    "groups": ("groups", "group", "subjects", "subject"),
}
"""What arrays are called, in any case; before or after it may stand train_ or _test."""


@dataclasses.dataclass(frozen=True)
class Names:
    """What the arrays are called, where they are not called as usual; None: as usual."""

    x: str | None = None
    y: str | None = None
    groups: str | None = None

    def of(self, what: str) -> tuple[str, ...]:
        given = getattr(self, what)
        return USUAL[what] if given is None else (given.lower(),)


@dataclasses.dataclass(frozen=True)
class Part:
    """Sequences float32 (N, steps, channels), the label of each, and its group where there are any."""

    values: Array
    labels: list[str]
    groups: list[str] | None
    skipped: tuple[str, ...] = ()


def read_parts(
    name: str, path: Path, names: Names, layout: Layout | None, broken: Broken
) -> tuple[Part, Part | None, tuple[str, ...], list[str]]:
    """The part for training, that for test if there is one, the classes, and what was left out, in sentences."""
    arrays = _Arrays(path)
    parts, notes = [], []
    suffixes = ("train", "test") if arrays.find(names.of("x"), "train") else ("",)
    for suffix in suffixes:
        x, y = (arrays.get(what, names.of(what), suffix) for what in ("x", "y"))
        groups = arrays.find(names.of("groups"), suffix)
        part, told = _part(name, arrays, (x, y, groups), layout, broken)
        parts.append(part)
        notes += told
    training, held = parts[0], parts[1] if len(parts) > 1 else None
    classes = tuple(sorted(set(training.labels), key=_in_order))
    if len(classes) < 2:
        raise DataError(f"'{path}' has {len(classes)} classes; there must be at least 2.")
    if held is not None:
        if odd := sorted(set(held.labels) - set(classes)):
            raise DataError(f"The test part of '{path}' has labels that training lacks: {listed(map(shown, odd))}.")
        if training.values.shape[1:] != held.values.shape[1:]:
            raise DataError(
                f"In '{path}', sequences for training are of {training.values.shape[1:]} steps and channels, and those "
                f"for test of {held.values.shape[1:]}."
            )
    return training, held, classes, notes


class _Arrays:
    """The arrays of an .npz file, or of a folder of .npy files, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir():
            self.names = sorted(each.stem for each in path.glob("*.npy") if not each.name.startswith("."))
        else:
            with open_npz(path) as inside:
                self.names = list(inside)

    def find(self, wanted: Sequence[str], suffix: str) -> str | None:
        """The array with one of these names; None: there is none."""
        spelt = [form for name in wanted for form in ((f"{name}_{suffix}", f"{suffix}_{name}") if suffix else (name,))]
        known = {name.lower(): name for name in reversed(self.names)}
        return next((known[form] for form in spelt if form in known), None)

    def get(self, what: str, wanted: Sequence[str], suffix: str) -> str:
        found = self.find(wanted, suffix)
        if found is None:
            behind = f" for {suffix}" if suffix else ""
            role = {"x": "the measurements", "y": "the labels"}[what]
            raise DataError(
                f"'{self.path}' has the arrays {listed(map(shown, self.names)) or '—'}, and none of them is {role}"
                f"{behind} (looked for {', '.join(wanted)}, in any case); name it with the option {what}."
            )
        return found

    def read(self, name: str) -> Array:
        if self.path.is_dir():
            return load_array(self.path / f"{name}.npy")
        with open_npz(self.path) as inside:
            try:
                found: Array = inside[name]
            except Exception as error:  # zipfile, zlib and numpy have many ways to say it
                raise DataError(f"The array '{shown(name)}' of '{self.path}' cannot be read: {error}") from None
            return found


def _part(
    name: str, arrays: _Arrays, named: tuple[str, str, str | None], layout: Layout | None, broken: Broken
) -> tuple[Part, list[str]]:
    where = f"'{named[0]}' of '{arrays.path}'"
    values = _in_order_of_axes(name, where, arrays.read(named[0]), layout)
    labels = _labels(f"'{named[1]}' of '{arrays.path}'", arrays.read(named[1]), len(values))
    groups = (
        None if named[2] is None else _labels(f"'{named[2]}' of '{arrays.path}'", arrays.read(named[2]), len(values))
    )
    good = np.isfinite(values).all((1, 2))
    problems = {f"sequence {at}": "some of its values are not finite numbers" for at in np.flatnonzero(~good)}
    notes = settle(problems, len(values), f"sequences in {where}", broken, verb="cannot be used")
    kept = np.flatnonzero(good).tolist()
    if not kept:
        raise DataError(f"None of the sequences in {where} can be used.")
    chosen = None if groups is None else [groups[at] for at in kept]
    return Part(values[good], [labels[at] for at in kept], chosen, tuple(problems)), notes


def _in_order_of_axes(name: str, where: str, values: Array, layout: Layout | None) -> Array:
    """float32 (N, steps, channels)."""
    if values.dtype.kind not in "fiub":
        raise DataError(f"{where} holds {values.dtype}; measurements must be numbers.")
    if values.size * 4 > source.MEMORY_LIMIT:
        raise DataError(f"{where} has the shape {values.shape}, more than fits into {source.MEMORY_LIMIT >> 30} GiB.")
    if not values.size or values.ndim not in (2, 3):
        raise DataError(f"{where} has the shape {values.shape}; it must be {' or '.join(LAYOUTS.values())}.")
    ways: Mapping[str, str] = {key: about for key, about in LAYOUTS.items() if len(key) == values.ndim}
    if layout is None and (values.ndim == 2 or values.shape[1] < values.shape[2]):
        more = ""
        if values.ndim == 2:
            more = " A long recording with a label per step has to be cut into windows first."
        raise DataError(
            f"{where} has the shape {values.shape}, which can be read in several ways; say which in '{name}': "
            f"{' or '.join(f'layout={key} for {about}' for key, about in ways.items())}.{more}"
        )
    if layout is not None and layout not in ways:
        raise DataError(f"{where} has the shape {values.shape}; layout={layout} is for {LAYOUTS[layout]}.")
    if layout == "nct":
        values = values.transpose(0, 2, 1)
    elif layout == "nt":
        values = values[..., None]
    return np.ascontiguousarray(values, dtype=np.float32)


def _labels(where: str, values: Array, count: int) -> list[str]:
    """A text for every sequence. Whole numbers may be stored as floating-point ones, and in a column of their own."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (count,):
        hint = " One-hot rows become labels by argmax(1)." if values.ndim == 2 and len(values) == count else ""
        raise DataError(f"{where} has the shape {values.shape}; there are {count} sequences, each with one.{hint}")
    if values.dtype.kind == "f":
        if not (np.isfinite(values).all() and (values == np.round(values)).all()):
            raise DataError(f"{where} holds {values.dtype} with fractions; it must be whole numbers or words.")
        values = values.astype(np.int64)
    if values.dtype.kind not in "iubUS":
        raise DataError(f"{where} holds {values.dtype}; it must be whole numbers or words.")
    return [each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in values.tolist()]


def _in_order(label: str) -> tuple[int, int, str]:
    """Numbers by their value, before words."""
    try:
        return (0, int(label), label)
    except ValueError:
        return (1, 0, label)
