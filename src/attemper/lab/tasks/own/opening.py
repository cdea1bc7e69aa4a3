"""From what somebody hands over, or what a function of theirs returns, to a task."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attemper.errors import ParameterError, first_line
from attemper.lab.call_syntax import check_count
from attemper.lab.own_code import call_own, find_own, hash_of_code
from attemper.lab.tasks import source as sources
from attemper.lab.tasks.base import InputShape, SequenceShape, Task
from attemper.lab.tasks.fingerprint import of_parts, of_tensors
from attemper.lab.tasks.notifications import note, progress
from attemper.lab.tasks.own.parts import Given, Pairs, pairs_of, take_apart
from attemper.lab.tasks.own.sources import SetSource, TensorSource, drawing_alone, inputs_of
from attemper.lab.tasks.own.task import OwnImages, OwnTask, SampleShape, read_metric
from attemper.lab.tasks.source import MemorySource, Source
from attemper.lab.tasks.split import hold_out, joined

SIZE = 64
"""Side of images in pixels, where they differ and nobody says."""
CHANNELS = (1, 3, 4)
LOOKED_AT = 64
"""Samples of a set that is not held in memory that go into its fingerprint."""


def open_own(label: str, name: str, options: Mapping[str, Any], open_named: Callable[[str], Task]) -> Task:
    """The task of 'module:function', or of data that a Python program has handed over.

    label: what the task is called. options: go to the function; train, test and size are read here where it has no such
    parameters: how many samples are kept, and the side of images. open_named: opens the task of a text.
    """
    thing = find_own(name, "task")
    data, options = thing, dict(options)
    ours: dict[str, int] = {}
    if _is_function(thing):
        import inspect

        known = inspect.signature(thing).parameters
        ours = {key: options.pop(key) for key in ("train", "test", "size") if key in options and key not in known}
        data = call_own(thing, name, "task", {}, options)
    else:
        ours = {key: options.pop(key) for key in ("train", "test", "size") if key in options}
        if options:
            raise ParameterError(f"'{label}' has no option '{next(iter(options))}'. Options: train, test, size.")
    for key, value in ours.items():
        check_count(f"'{label}': {key}", value)
    if isinstance(data, Task):
        return data
    if isinstance(data, str | Path):
        return open_named(text_of(data))
    return task_of(data, label, code=thing if _is_function(thing) else None, **ours)


def _is_function(thing: Any) -> bool:
    return callable(thing) and not hasattr(thing, "__getitem__")


def text_of(data: str | Path) -> str:
    """The task of a path: of a folder of images, or of a CSV with their names; a text is a task's name already."""
    path = Path(data)
    if isinstance(data, str) and not path.exists():
        return data
    return f"csv:{data}" if path.suffix.lower() in (".csv", ".tsv") else f"folder:{data}"


def task_of(
    data: Any,
    label: str,
    *,
    code: Any = None,
    train: int | None = None,
    test: int | None = None,
    size: int | None = None,
) -> OwnTask:
    """A task on data that was handed over.

    code: the function that gave it; counts where the data itself is not looked at as a whole.
    """
    given = take_apart(data)
    parts = {
        name: Part(pairs_of(part, name), name, given.collate)
        for name, part in (("train", given.train), ("validation", given.validation), ("test", given.test))
        if part is not None
    }
    labels = Labels.of(parts, given)
    kind = Kind.of(parts["train"], size, sum(part.pairs.count for part in parts.values()))
    opened = {name: part.source(labels, kind) for name, part in parts.items()}
    pool, held_out = opened["train"], opened.get("test")
    if held_out is None:
        kept, held = hold_out(pool.targets, getattr(pool, "groups", None))
        pool, held_out = pool.take(kept), pool.take(held)
    name, metric = read_metric(given.metric)
    marks = [parts[each].fingerprint(opened[each], code) for each in parts]
    marks += [hash_of_code(each) for each in (given.collate, metric) if each is not None]
    made = OwnImages if kind.images else OwnTask
    return made(
        name=label,
        shape=kind.shape(len(labels.names)),
        fingerprint=of_parts(name, *labels.names, *marks),
        pool=lambda: pool,
        held_out=lambda: held_out,
        classes=labels.names,
        train=train,
        test_images=test,
        primary=name,
        validate_on=(lambda: opened["validation"]) if "validation" in opened else None,
        metric=metric,
    )


@dataclasses.dataclass(frozen=True)
class Labels:
    """Numbers of classes for labels of any kind."""

    names: tuple[str, ...]
    number: dict[Any, int]

    @classmethod
    def of(cls, parts: Mapping[str, Part], given: Given) -> Labels:
        """The classes of all parts together; they must all be in the training set."""
        found: dict[str, set[Any]] = {name: set(part.labels) for name, part in parts.items()}
        for name, labels in found.items():
            if odd := [each for each in labels if not isinstance(each, int | str) or isinstance(each, bool)]:
                raise ParameterError(
                    f"A label of '{name}' is {odd[0]!r}; labels are whole numbers or texts, one per sample."
                )
        training = found["train"]
        for name, labels in found.items():
            if more := sorted(map(str, labels - training)):
                raise ParameterError(f"The part '{name}' of the data has the class '{more[0]}', and 'train' has not.")
        if len({type(label) for label in training}) > 1:
            raise ParameterError("Some labels are numbers and some are texts; they must be of one kind.")
        names = given.classes or parts["train"].pairs.names
        if names is not None and all(isinstance(label, int) and 0 <= label < len(names) for label in training):
            return cls(tuple(map(str, names)), {number: number for number in range(len(names))})
        ordered = sorted(training)
        if len(ordered) < 2:
            raise ParameterError(f"The data has {len(ordered)} class; there must be at least 2.")
        if given.classes is not None and len(given.classes) != len(ordered):
            raise ParameterError(f"classes names {len(given.classes)}, and the data has {len(ordered)}.")
        return cls(tuple(map(str, given.classes or ordered)), {label: number for number, label in enumerate(ordered)})


@dataclasses.dataclass
class Part:
    """One part of the data, looked at once."""

    pairs: Pairs
    name: str
    collate: Callable[[list[Any]], Any] | None

    @cached_property
    def labels(self) -> list[Any]:
        given = self.pairs.labels()
        return [each.item() if hasattr(each, "item") else each for each in given]

    @cached_property
    def first(self) -> Any:
        with drawing_alone(0):
            return self.pairs.sample(0)

    @cached_property
    def draws(self) -> bool:
        """Whether a set gives other samples each time it is asked, as one that augments them does."""
        if self.pairs.whole is not None:
            return False
        for index in range(min(3, self.pairs.count)):
            seen = []
            for seed in (1, 2):
                with drawing_alone(seed):
                    seen.append(_as_tensor(self.pairs.sample(index)))
            if seen[0].shape != seen[1].shape or not torch.equal(seen[0], seen[1]):
                return True
        return False

    def source(self, labels: Labels, kind: Kind) -> Source:
        targets = torch.tensor([labels.number[label] for label in self.labels])
        if self.collate is not None:
            assert self.pairs.item is not None
            return SetSource(self.pairs.item, targets, collate=self.collate)
        if not kind.whole or self.draws:
            if self.draws and self.name != "train":
                note(f"the samples of '{self.name}' are other ones each time they are asked for: it augments them, too")
            return SetSource(partial(_fitted, kind, self.pairs.sample, self.name), targets)
        values = self._read(kind)
        marks = (hashlib.sha256(each.contiguous().view(torch.uint8).numpy()).digest() for each in values)
        groups = joined(len(values), marks)
        alone = None if len(groups.unique()) == len(groups) else groups
        return MemorySource(values, targets, groups=alone) if kind.images else TensorSource(values, targets, alone)

    def _read(self, kind: Kind) -> Tensor:
        if self.pairs.whole is not None:
            return torch.stack([_fitted(kind, self.pairs.sample, self.name, i) for i in range(self.pairs.count)])
        found = []
        for index in range(self.pairs.count):
            if index % 100 == 0:
                progress(f"reading '{self.name}'", index, self.pairs.count)
            with drawing_alone(index):
                found.append(_fitted(kind, self.pairs.sample, self.name, index))
        progress(f"reading '{self.name}'", self.pairs.count, self.pairs.count)
        return torch.stack(found)

    def fingerprint(self, opened: Source, code: Any) -> str:
        """Of all values in memory; else of labels, some samples and the code that gives them."""
        held = getattr(opened, "values", None) if isinstance(opened, TensorSource) else getattr(opened, "images", None)
        if held is not None:
            return of_tensors(held, opened.targets)
        step = max(1, self.pairs.count // LOOKED_AT)
        some = []
        for index in range(0, self.pairs.count, step):
            with drawing_alone(0):
                some.append(_as_tensor(self.pairs.sample(index)))
        return of_parts(of_tensors(opened.targets, *some), *([] if code is None else [hash_of_code(code)]))


@dataclasses.dataclass(frozen=True)
class Kind:
    """What samples are, and what becomes of them."""

    images: bool
    """Bytes of pixels, which can be normalised and augmented."""
    whole: bool
    """Whether all of them fit into memory."""
    looks_like: Tensor
    """Two samples as the model takes them, or as images are stored."""
    size: int | None = None
    """Side that images are resized to; None: they are as they are."""
    channels_last: bool = False

    @classmethod
    def of(cls, part: Part, size: int | None, samples: int) -> Kind:
        count = min(2, part.pairs.count)
        if part.collate is not None:
            assert part.pairs.item is not None
            with drawing_alone(0):
                return cls(False, False, inputs_of(part.collate([part.pairs.item(i) for i in range(count)])))
        first = part.first
        picture = hasattr(first, "getbands") and hasattr(first, "convert")
        if picture:
            sides = {part.pairs.sample(index).size for index in range(min(LOOKED_AT, part.pairs.count))}
            alike = len(sides) == 1 and len(set(next(iter(sides)))) == 1
            kind = cls(True, True, torch.empty(0), size or (next(iter(sides))[0] if alike else SIZE))
        else:
            tensor = _as_tensor(first)
            images = tensor.dtype == torch.uint8 and tensor.ndim in (2, 3)
            last = images and tensor.ndim == 3 and tensor.shape[-1] in CHANNELS and tensor.shape[0] not in CHANNELS
            kind = cls(images, True, torch.empty(0), size if images else None, last)
            if size is not None and not images:
                raise ParameterError(f"size is {size}, and the samples are no images in bytes that could be resized.")
        example = [_fitted(kind, part.pairs.sample, part.name, 0)]
        kind = dataclasses.replace(kind, looks_like=torch.stack(example))
        example += [_fitted(kind, part.pairs.sample, part.name, index) for index in range(1, count)]
        whole = example[0].numel() * example[0].element_size() * samples <= sources.MEMORY_LIMIT
        return dataclasses.replace(kind, whole=whole, looks_like=torch.stack(example))

    def shape(self, classes: int) -> Any:
        """What a model must take and give."""
        size = tuple(self.looks_like.shape[1:])
        if (len(size) == 3 and self.looks_like.is_floating_point()) or self.images:
            return InputShape(channels=size[0], height=size[1], width=size[2], classes=classes)
        if len(size) == 2 and self.looks_like.is_floating_point():
            return SequenceShape(tokens=size[0], features=size[1], classes=classes)
        return SampleShape(size, classes, self.looks_like)


def _fitted(kind: Kind, sample: Callable[[int], Any], part: str, index: int) -> Tensor:
    """One sample as it is stored."""
    try:
        given = sample(index)
        if hasattr(given, "getbands"):
            return sources.decode(given, kind.size or SIZE, turn=True)
        value = _as_tensor(given)
    except Exception as error:  # whatever somebody's own set does
        raise ParameterError(
            f"Sample {index} of '{part}' cannot be read: {type(error).__name__}: {first_line(error)}"
        ) from error
    if kind.images:
        value = value[None] if value.ndim == 2 else value.movedim(-1, 0) if kind.channels_last else value
        if kind.size is not None and tuple(value.shape[-2:]) != (kind.size, kind.size):
            from torchvision.transforms.v2.functional import center_crop, resize

            value = resize(center_crop(value, [min(value.shape[-2:])]), [kind.size, kind.size], antialias=True)
    if len(kind.looks_like) and value.shape != kind.looks_like.shape[1:]:
        raise ParameterError(
            f"Sample {index} of '{part}' is {tuple(value.shape)}, and the first is {tuple(kind.looks_like.shape[1:])}: "
            "give samples of one shape, a collate that brings them to one, or size for images."
        )
    return value


def _as_tensor(given: Any) -> Tensor:
    import numpy as np

    if isinstance(given, Tensor):
        return given.float() if given.dtype == torch.float64 else given
    array = np.array(given)
    if array.dtype == object or array.dtype.kind in "USmM":
        raise ParameterError(f"it is a {type(given).__name__}, and must be an image or numbers")
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)
