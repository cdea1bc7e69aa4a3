"""Sequences of measurements with one class each, such as windows of an accelerometer: arrays in .npz or .npy files."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks.augment import Augment, parse_augmentation
from attemper.lab.tasks.base import SequenceShape
from attemper.lab.tasks.broken import Broken
from attemper.lab.tasks.fingerprint import of_parts, of_tensors
from attemper.lab.tasks.notifications import note
from attemper.lab.tasks.pooled import PooledTask
from attemper.lab.tasks.sequence_files import Layout, Names, Part, read_parts
from attemper.lab.tasks.source import Source, found_under
from attemper.lab.tasks.split import hold_out, joined


@dataclasses.dataclass
class ArraySource:
    """Sequences in one float32 tensor (N, steps, channels), on the device where they are used.

    groups: sequences that must not be separated have the same number, int64 (N).
    """

    values: Tensor
    targets: Tensor
    groups: Tensor
    in_memory: bool = dataclasses.field(default=True, init=False)

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> Self:
        return type(self)(self.values[indices], self.targets[indices], self.groups[indices])

    def to(self, device: torch.device) -> Self:
        return type(self)(self.values.to(device), self.targets.to(device), self.groups.to(device))

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in order.to(self.targets.device).split(batch_size):
            yield self.values[indices], self.targets[indices]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of every channel, two float32 tensors (channels); a constant one has the deviation 1."""
        rows = self.values.cpu().double().flatten(0, 1)
        deviation = rows.std(0, correction=0)
        return rows.mean(0).float(), torch.where(deviation > 1e-12, deviation, 1.0).float()


@dataclasses.dataclass
class SequenceTask(PooledTask):
    """Sequences with one class each, cut into tokens of some steps."""

    samples: ClassVar[str] = "sequences"

    shape: SequenceShape

    def groups_of(self, source: Source) -> Tensor | None:
        return source.groups if isinstance(source, ArraySource) else None

    def to_input(self, stored: Tensor) -> Tensor:
        """(B, steps, channels) → (B, tokens, steps per token · channels), every channel with mean 0 and deviation 1."""
        mean, deviation = self.statistics_on(stored.device)
        return ((stored - mean) / deviation).reshape(len(stored), self.shape.tokens, self.shape.features)

    def augmentation(self, text: str) -> Augment:
        """There is none for measurements."""
        return parse_augmentation(text, {})


def open_sequences(
    name: str,
    path: str,
    root: Path,
    *,
    layout: Layout | None = None,
    tokens: int | None = None,
    x: str | None = None,
    y: str | None = None,
    groups: str | None = None,
    broken: Broken = "refuse",
    train: int | None = None,
    test: int | None = None,
) -> SequenceTask:
    """Windows of measurements from an .npz file, or from a folder of .npy files, with a label for each.

    path: relative to the data root or to where the program runs.
    layout: the axes of the measurements: ntc (windows, steps, channels), nct (windows, channels, steps), or nt
        (windows, steps) of one channel; none: ntc, if there are at least as many steps as channels.
    tokens: per sequence, each of as many steps; none: every step is a token.
    x, y, groups: what the arrays are called, where it is not one of the usual names.
    broken: what becomes of sequences with values that are no finite numbers: refuse, or skip.
    """
    found = found_under(root, path, Path.exists, "there")
    training, held, classes, notes = read_parts(name, found, Names(x, y, groups), layout, broken)
    pool = _source(training, classes)
    if held is None:
        kept, out = hold_out(pool.targets, pool.groups)
        pool, rest = pool.take(kept), pool.take(out)
    else:
        rest = _source(held, classes)
    for each in notes:
        note(each)
    _, steps, channels = pool.values.shape
    wanted = steps if tokens is None else tokens
    if steps % wanted:
        raise DataError(f"'{name}': {steps} steps cannot be cut into {wanted} equal tokens.")
    skipped = (f"skipped {part}" for part in (*training.skipped, *(held.skipped if held else ())))
    return SequenceTask(
        name=name,
        shape=SequenceShape(tokens=wanted, features=steps // wanted * channels, classes=len(classes)),
        fingerprint=of_parts(
            of_tensors(pool.values, pool.targets, pool.groups, rest.values, rest.targets), *classes, *skipped
        ),
        pool=lambda: pool,
        held_out=lambda: rest,
        classes=classes,
        train=train,
        test_images=test,
        notes=tuple(notes),
    )


def _source(part: Part, classes: tuple[str, ...]) -> ArraySource:
    """Copies, and sequences of one group, have the same number."""
    number = {label: target for target, label in enumerate(classes)}
    targets = torch.tensor([number[label] for label in part.labels])
    marks = range(len(targets)) if part.groups is None else part.groups
    groups = joined(len(targets), marks, (each.tobytes() for each in part.values))
    return ArraySource(torch.from_numpy(np.ascontiguousarray(part.values)), targets, groups)
