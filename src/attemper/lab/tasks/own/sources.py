"""Samples of one's own by index: in memory where they fit, else asked for while training runs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.tasks.seed_streams import derive, drawing_from
from attemper.lab.tasks.source import LazySource, chosen, start_method


@dataclasses.dataclass
class TensorSource:
    """Samples in one tensor (N, …), on the device where they are used."""

    values: Tensor
    targets: Tensor
    groups: Tensor | None = None
    in_memory: bool = dataclasses.field(default=True, init=False)

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> Self:
        return type(self)(self.values[indices], self.targets[indices], chosen(self.groups, indices))

    def to(self, device: torch.device) -> Self:
        return type(self)(self.values.to(device), self.targets.to(device), self.groups)

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in order.to(self.targets.device).split(batch_size):
            yield self.values[indices], self.targets[indices]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """None are taken out: numbers go to the model as they are."""
        return torch.zeros(1), torch.ones(1)


@dataclasses.dataclass
class SetSource(LazySource):
    """Samples that are asked for when they are needed; what they draw is a function of the batch that they are in.

    So a set that augments its samples does so in the same way for every recipe, and after an interruption.

    collate: from a list of samples to inputs and targets; none: samples are tensors of one shape.
    """

    collate: Callable[[list[Any]], Any] | None = None

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.indices is not None
        order = order.cpu()
        wanted: list[tuple[int, int, int]] = []
        for part in order.split(batch_size):
            own = self.indices[part]
            seed = int.from_bytes(hashlib.sha256(own.numpy().tobytes()).digest()[:7], "big")
            wanted += zip(
                own.tolist(), self.targets[part].tolist(), [derive(seed, i) for i in range(len(own))], strict=True
            )
        method = start_method(self.workers)
        loader = torch.utils.data.DataLoader(
            _Wanted(self.load, wanted, raw=self.collate is not None),
            batch_size=batch_size,
            num_workers=self.workers if method else 0,
            multiprocessing_context=method,
            generator=torch.Generator(),
            collate_fn=None if self.collate is None else self._collated,
        )
        for inputs, targets in loader:
            yield inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def _collated(self, pairs: list[tuple[Any, int]]) -> tuple[Tensor, Tensor]:
        """What the collate makes of samples, with our own numbers of their classes."""
        assert self.collate is not None
        return inputs_of(self.collate([item for item, _ in pairs])), torch.tensor([target for _, target in pairs])


def inputs_of(batch: Any) -> Tensor:
    """The inputs in what a collate gives."""
    found = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(found, Tensor):
        raise ParameterError(
            f"collate gave {type(found).__name__} as inputs; it must give a tensor, or a pair of inputs and targets."
        )
    return found


@dataclasses.dataclass
class _Wanted(torch.utils.data.Dataset[tuple[Any, int]]):
    load: Callable[[int], Any]
    wanted: list[tuple[int, int, int]]
    raw: bool

    def __len__(self) -> int:
        return len(self.wanted)

    def __getitem__(self, position: int) -> tuple[Any, int]:
        index, target, seed = self.wanted[position]
        with drawing_alone(seed):
            return self.load(index), target


@contextlib.contextmanager
def drawing_alone(seed: int) -> Iterator[None]:
    """Context manager: whatever code inside it draws on the CPU comes from a stream of its own."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with drawing_from(seed):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
