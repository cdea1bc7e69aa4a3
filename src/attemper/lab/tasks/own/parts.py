"""What somebody hands over as data, taken apart: for training, for validation and for test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.errors import ParameterError, suggestion

TRAINING = ("train", "training")
VALIDATION = ("validation", "val", "valid", "dev")
TEST = ("test", "testing")
OPTIONS = ("collate", "metric", "classes")
COLUMNS = {
    "x": ("image", "img", "pixel_values", "x", "input", "inputs"),
    "y": ("label", "labels", "y", "target", "class"),
}
"""What the columns of rows are called, in any case."""
RIGHT = (
    "Data is arrays or tensors (x, y), a torch Dataset of such pairs, a Hugging Face data set, the path of a folder or "
    "of a CSV, the name of a task, or a dict with 'train' and maybe 'validation' and 'test', each one of these."
)


@dataclasses.dataclass(frozen=True)
class Given:
    """Data as it was handed over."""

    train: Any
    validation: Any = None
    test: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    """From a list of samples to inputs and targets of a batch."""
    metric: str | Callable[..., float] | None = None
    classes: Sequence[str] | None = None


def take_apart(data: Any) -> Given:
    """Which part of what was handed over is which."""
    if isinstance(data, Mapping):
        return _of_mapping(data)
    if isinstance(data, tuple | list):
        if len(data) == 4 and all(map(is_array, data)):
            return Given(train=(data[0], data[1]), test=(data[2], data[3]))
        if len(data) in (2, 3) and not any(map(is_array, data)) and all(map(is_set, data)):
            return Given(train=data[0], validation=data[1] if len(data) == 3 else None, test=data[-1])
    return Given(train=data)


def _of_mapping(data: Mapping[Any, Any]) -> Given:
    names = {str(name).lower(): name for name in data}
    known = {"train": TRAINING, "validation": VALIDATION, "test": TEST, **{name: (name,) for name in OPTIONS}}
    found = {part: data[names[word]] for part, words in known.items() for word in words if word in names}
    words = [word for each in known.values() for word in each]
    for name in names:
        if name not in words:
            raise ParameterError(f"The data has a part '{name}'.{suggestion(name, words)} {RIGHT}")
    if "train" not in found:
        raise ParameterError(f"The data has no part 'train'; it has {', '.join(names) or 'nothing'}. {RIGHT}")
    return Given(**found)


def is_array(thing: Any) -> bool:
    """Whether something is all samples, or all labels, in one."""
    if isinstance(thing, np.ndarray | Tensor):
        return True
    return isinstance(thing, list | tuple) and bool(thing) and isinstance(thing[0], int | float | str | np.generic)


def is_set(thing: Any) -> bool:
    """Whether something gives samples by their numbers, or is arrays that do."""
    return hasattr(thing, "__getitem__") and hasattr(thing, "__len__") and not isinstance(thing, str | Path)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Samples with their labels, read one by one or all at once."""

    count: int
    sample: Callable[[int], Any]
    """The x of one of them."""
    labels: Callable[[], list[Any]]
    """Of all of them."""
    whole: Tensor | None = None
    """All samples (N, …), where they came as one array."""
    item: Callable[[int], Any] | None = None
    """A sample as its set gives it, for a collate of somebody's own; None: there is no such thing."""
    names: tuple[str, ...] | None = None
    """Of the classes, where the set knows them and its labels are their numbers."""


def pairs_of(part: Any, what: str) -> Pairs:
    """One part of the data. what: such as 'train', for messages."""
    if isinstance(part, tuple | list) and len(part) == 2 and is_array(part[1]):
        return _of_arrays(part[0], part[1], what)
    if not is_set(part):
        kind = type(part).__name__
        streams = hasattr(part, "__iter__") and not isinstance(part, str)
        hint = " It can only be gone through from its beginning; its samples must have numbers." if streams else ""
        raise ParameterError(f"The part '{what}' of the data is a {kind}.{hint} {RIGHT}")
    if not len(part):
        raise ParameterError(f"The part '{what}' of the data is empty.")
    return _of_set(part, what)


def _of_arrays(x: Any, y: Any, what: str) -> Pairs:
    values = x if isinstance(x, Tensor) else _tensor(x, what)
    labels = y.tolist() if isinstance(y, np.ndarray | Tensor) else list(y)
    if len(values) != len(labels):
        raise ParameterError(f"The part '{what}' of the data has {len(values)} samples and {len(labels)} labels.")
    if not labels:
        raise ParameterError(f"The part '{what}' of the data is empty.")
    if any(isinstance(label, list) for label in labels[:1]):
        raise ParameterError(f"The labels of '{what}' have {np.ndim(labels)} axes; there must be one class per sample.")
    return Pairs(len(labels), lambda index: values[index], lambda: labels, values, lambda i: (values[i], labels[i]))


def _tensor(x: Any, what: str) -> Tensor:
    try:
        array = np.asarray(x)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        return torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError) as error:
        raise ParameterError(f"The samples of '{what}' are no array of numbers: {error}.") from None


def _of_set(part: Any, what: str) -> Pairs:
    first = part[0]
    if isinstance(first, Mapping):
        return _of_rows(part, first, what)
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise ParameterError(
            f"A sample of '{what}' is a {type(first).__name__}; it must be a pair (x, y), or a row with an image and a "
            f"label. {RIGHT}"
        )
    return Pairs(
        count=len(part),
        sample=lambda index: part[index][0],
        labels=lambda: _known_labels(part) or [part[index][1] for index in range(len(part))],
        item=lambda index: part[index],
        names=_names(getattr(part, "classes", None)),
    )


def _known_labels(part: Any) -> list[Any] | None:
    """The labels of torchvision's sets, without opening a sample."""
    known = getattr(part, "targets", None)
    if isinstance(known, list | np.ndarray | Tensor) and len(known) == len(part):
        if getattr(part, "target_transform", None) is None:
            return known.tolist() if not isinstance(known, list) else known
    return None


def _of_rows(part: Any, first: Mapping[str, Any], what: str) -> Pairs:
    """Rows of names and values, as Hugging Face's."""
    found = {}
    for role, usual in COLUMNS.items():
        columns = [name for name in first if str(name).lower() in usual]
        if not columns:
            kind = "sample" if role == "x" else "label"
            raise ParameterError(
                f"No column of '{what}' is the {kind}: there are {', '.join(map(str, first))}, and {', '.join(usual)} "
                "were looked for. Rename one."
            )
        found[role] = columns[0]
    x, y = found["x"], found["y"]
    features = getattr(part, "features", None)
    names = getattr(features.get(y), "names", None) if isinstance(features, Mapping) else None

    def labels() -> list[Any]:
        return list(part[y]) if features is not None else [part[index][y] for index in range(len(part))]

    return Pairs(len(part), lambda index: part[index][x], labels, item=lambda i: part[i], names=_names(names))


def _names(given: Any) -> tuple[str, ...] | None:
    return tuple(map(str, given)) if isinstance(given, list | tuple) and len(given) > 1 else None
