"""A large data set as a source: samples are found by number, and read, decoded and augmented by worker processes.

timm's readers of WebDataset and of Hugging Face streams iterate, and deal whole shards to ranks and workers: their
order depends on both numbers, ragged shards are seen in part or twice, unreadable samples are skipped with a line in
a log, and nothing can begin in the middle. So those of timm's parts are used that can do what is needed (they find
shards and read what describes them, open Hugging Face data sets on disk, decode and cut images), and samples are
addressed by number instead.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from attemper.errors import UnreadableError
from attemper.lab.errors import DataError
from attemper.lab.tasks.augment import Augmentation
from attemper.lab.tasks.seed_streams import derive
from attemper.lab.tasks.source import start_method
from attemper.lab.tasks.streaming.order import EpochOrder, Selection
from attemper.lab.tasks.streaming.pixels import DEVIATION, MEAN, Preparation

MOST_WORKERS = 16
PIECE = 32
"""Images that a worker decodes at a time. All workers share a batch, so that its size decides neither how long the
first one takes nor how much memory the images take that are ready."""
PIECES_AHEAD = 4
"""Pieces per worker that are decoded before they are asked for."""
FILES_AHEAD = 64
"""Pieces whose files are handed out before a worker asks for them."""

T = TypeVar("T")


class Store(Protocol):
    """Where the samples of a data set lie. It is sent to worker processes."""

    def hand_out(self, samples: Tensor) -> list[Any]:
        """What a worker needs to fetch each of these samples; called in the training process, batch by batch."""
        ...

    def fetch(self, item: Any) -> tuple[bytes, int]:
        """The image file and the class of a sample; called in a worker."""
        ...

    def where(self, item: Any) -> str:
        """Which sample it is, for a message."""
        ...

    def labels(self) -> Tensor:
        """The class of every sample, int64 (N)."""
        ...


def default_workers() -> int:
    """Processes that decode images: the machine's cores, shared by the ranks that run on it."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return max(0, min(MOST_WORKERS, (os.cpu_count() or 1) // max(1, ranks) - 1))


@dataclasses.dataclass
class StreamSource:
    """Samples of a store. selection: which."""

    store: Store
    selection: Selection
    preparation: Preparation
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    workers: int = dataclasses.field(default_factory=default_workers)
    in_memory: bool = dataclasses.field(default=False, init=False)

    def __len__(self) -> int:
        return len(self.selection)

    @cached_property
    def targets(self) -> Tensor:
        """As long as the data set; training does not ask for it."""
        return self.store.labels()[self.selection.stored(torch.arange(len(self)))]

    def take(self, indices: Tensor) -> StreamSource:
        return dataclasses.replace(self, selection=self.selection.take(indices.cpu()))

    def some(self, samples: int, seed: int) -> StreamSource:
        """About so many of the samples, by a seed, such that they are cheap to read."""
        if samples >= len(self):
            return self
        return dataclasses.replace(self, selection=self.selection.divide(samples, seed)[1])

    def to(self, device: torch.device) -> StreamSource:
        return dataclasses.replace(self, device=device)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """ImageNet's: to look at a million images for their mean would take as long as an epoch."""
        return 255 * torch.tensor(MEAN), 255 * torch.tensor(DEVIATION)

    # ------------------------------------------------------------------------------------------------------- reading
    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        jobs = (
            [(sample, 0) for sample in self.selection.stored(part).tolist()] for part in order.cpu().split(batch_size)
        )
        return self._load(jobs, self.preparation)

    def epoch(
        self,
        seed: int,
        epoch: int,
        batches: range,
        batch_size: int,
        part: slice,
        augmentation: Augmentation,
        repeats: int = 1,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of some batches of an epoch, each image augmented by itself.

        part: of every batch; it may begin at -1, the sample before the first, which is the last one.
        repeats: how often every batch holds each of its samples.
        """
        order = EpochOrder(self.selection, seed, epoch)
        each = batch_size // repeats
        positions = torch.arange(part.start, part.stop) % batch_size

        def jobs() -> Iterator[list[tuple[int, int]]]:
            for batch in batches:
                samples = order.stretch(batch * each, (batch + 1) * each).repeat(repeats)
                yield [
                    (sample, derive(seed, "augment", epoch, batch, position))
                    for position, sample in zip(positions.tolist(), samples[positions].tolist(), strict=True)
                ]

        return self._load(jobs(), self.preparation.augmented(augmentation)[0])

    def _load(self, jobs: Iterator[list[tuple[int, int]]], preparation: Preparation) -> Iterator[tuple[Tensor, Tensor]]:
        """jobs: for every batch, numbers of samples with the seeds of their augmentation."""
        handed = _HandedOut(self.store, jobs, ahead=self.workers > 0)
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            _Prepared(self.store, preparation),
            batch_sampler=handed,
            num_workers=self.workers,
            multiprocessing_context=start_method(self.workers),
            collate_fn=_collate,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=PIECES_AHEAD if self.workers else None,
            generator=torch.Generator(),  # else it would draw from the stream of the stochastic methods
        )
        with contextlib.closing(handed):
            pieces = map(self._moved, loader)
            for first in pieces:
                batch = [first, *itertools.islice(pieces, handed.lengths.popleft() - 1)]
                yield torch.cat([images for images, _ in batch]), torch.cat([targets for _, targets in batch])

    def _moved(self, loaded: tuple[Tensor, Tensor] | DataError) -> tuple[Tensor, Tensor]:
        if isinstance(loaded, DataError):
            raise loaded
        images, targets = loaded
        return images.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


@dataclasses.dataclass
class _Prepared(torch.utils.data.Dataset[Any]):
    """What a worker does with what was handed out to it."""

    store: Store
    preparation: Preparation

    def __getitem__(self, job: tuple[Any, int]) -> tuple[Tensor, int] | DataError:
        item, seed = job
        try:
            data, label = self.store.fetch(item)
            return self.preparation(data, seed), label
        except DataError as error:  # given back, since a loader would bury it in a traceback
            return error
        except UnreadableError as error:
            return DataError(f"{self.store.where(item)} is not an image that can be read: {error}")


def _collate(batch: list[tuple[Tensor, int] | DataError]) -> tuple[Tensor, Tensor] | DataError:
    images, targets = [], []
    for sample in batch:
        if isinstance(sample, DataError):
            return sample
        images.append(sample[0])
        targets.append(sample[1])
    return torch.stack(images), torch.tensor(targets)


class _HandedOut:
    """Jobs with what the store hands out for them, in pieces.

    ahead: prepare some of them in a thread, since a store may have to read for it. The thread is started by whoever
        asks for the first batch: by then a loader has forked its workers.
    """

    def __init__(self, store: Store, jobs: Iterator[list[tuple[int, int]]], ahead: bool) -> None:
        self.store, self.jobs, self.ahead = store, jobs, ahead
        self.reading: ReadAhead[list[tuple[Any, int]]] | None = None
        self.lengths: collections.deque[int] = collections.deque()
        """Of the batches that were begun, how many pieces they have."""

    def __iter__(self) -> Iterator[list[tuple[Any, int]]]:
        if not self.ahead:
            return self._pieces()
        self.reading = ReadAhead(self._pieces(), FILES_AHEAD)
        return iter(self.reading)

    def _pieces(self) -> Iterator[list[tuple[Any, int]]]:
        for job in filter(None, self.jobs):
            self.lengths.append(-(-len(job) // PIECE))
            for begin in range(0, len(job), PIECE):
                piece = job[begin : begin + PIECE]
                items = self.store.hand_out(torch.tensor([sample for sample, _ in piece]))
                yield [(item, seed) for item, (_, seed) in zip(items, piece, strict=True)]

    def close(self) -> None:
        if self.reading is not None:
            self.reading.close()


class ReadAhead(Generic[T]):
    """The same values, some of them made by a thread before they are asked for.

    What goes wrong is raised where it would have been. The thread begins when the first value is asked for.
    """

    def __init__(self, values: Iterable[T], most: int) -> None:
        self.values = values
        self.ready: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue(most)
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True, name="attemper reads ahead")

    def __iter__(self) -> Iterator[T]:
        self.thread.start()
        while True:
            value, error = self.ready.get()
            if error is not None:
                raise error
            if value is None:
                return
            yield value

    def close(self) -> None:
        """No more jobs are needed: wait for the thread, so that no two of them read at a time."""
        self.closed.set()
        if self.thread.ident is not None:
            self.thread.join()

    def _work(self) -> None:
        try:
            for value in self.values:
                if not self._put(value, None):
                    return
            self._put(None, None)
        except Exception as error:
            self._put(None, error)

    def _put(self, value: T | None, error: Exception | None) -> bool:
        while not self.closed.is_set():
            with contextlib.suppress(queue.Full):
                self.ready.put((value, error), timeout=0.1)
                return True
        return False
