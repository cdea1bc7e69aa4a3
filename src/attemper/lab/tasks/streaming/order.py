"""Which samples of a large data set belong to a part of it, and in which order an epoch sees them. Arithmetic only.

Samples are numbered as they are stored, and lie in *units*: runs of neighbours that are cheap to read together, such as
a piece of a tar file or a row group. Nothing here is as long as the data set; all of it is a function of seed and epoch
that can be entered at any position. So the order depends neither on the number of ranks nor on that of worker
processes, and a run that goes on inside of an epoch reads nothing twice.
"""

from __future__ import annotations

import heapq
import itertools
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attemper.lab.tasks.seed_streams import generator

LANES = 16
"""So many units are read at a time; the samples of a batch come from all of them alike. Fixed, since the order depends
on it."""

BUFFER = 256
"""Samples of a lane that are shuffled together, at least: with all lanes, a batch is drawn from some 4,000."""

LISTED = 128
"""Samples of a list that make a unit."""

WHOLE = 20
"""Where so many units or more would be held out, whole ones are, if units cannot be read in part."""

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Selection:
    """Some samples of a data set, unit by unit.

    starts, counts: the first sample of every unit, and how many of its samples are in the selection.
    by_unit: whether a unit is read as a whole, so that a few samples of every unit cost as much as all.
    """

    def __init__(self, starts: Integers, counts: Integers, by_unit: bool = False) -> None:
        self.starts, self.counts, self.by_unit = starts, counts, by_unit

    def __len__(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def ends(self) -> Integers:
        """How many samples the units have up to and including each."""
        return np.cumsum(self.counts)

    def unit(self, unit: int) -> Tensor:
        """The samples of a unit, in increasing order."""
        return torch.arange(int(self.starts[unit]), int(self.starts[unit] + self.counts[unit]))

    def stored(self, positions: Tensor) -> Tensor:
        """From positions in the selection to numbers of samples."""
        if not len(positions):
            return positions
        places = positions.numpy()
        units = np.searchsorted(self.ends, places, side="right")
        inside = places - (self.ends[units] - self.counts[units])
        found = torch.empty(len(positions), dtype=torch.int64)
        by_unit = np.argsort(units, kind="stable")
        present, begins = np.unique(units[by_unit], return_index=True)
        for unit, mine in zip(present.tolist(), np.split(by_unit, begins[1:]), strict=True):
            found[torch.from_numpy(mine)] = self.unit(unit)[torch.from_numpy(inside[mine])]
        return found

    def take(self, positions: Tensor) -> Selection:
        """Only these samples, in this order."""
        return _Listed(self.stored(positions), self.by_unit)

    def divide(self, held: int, seed: int, *, exactly: bool = False) -> tuple[Selection, Selection]:
        """What is kept, and about `held` samples that are not.

        Of every unit its share is held out, at random: a hash of seed, unit and sample decides. If units are read as
        a whole and there are many, whole ones are held out instead, chosen by the seed.

        exactly: exactly so many, whatever it costs to read them.
        """
        units = round(len(self.counts) * held / max(1, len(self)))
        if self.by_unit and not exactly and WHOLE <= units <= len(self.counts) - WHOLE:
            out = np.zeros(len(self.counts), dtype=bool)
            out[torch.randperm(len(self.counts), generator=generator(seed, "split"))[:units].numpy()] = True
            return _Units(self, np.flatnonzero(~out)), _Units(self, np.flatnonzero(out))
        return _Share(self, held, seed, held_out=False), _Share(self, held, seed, held_out=True)


class _Units(Selection):
    """Some units of a selection."""

    def __init__(self, whole: Selection, units: Integers) -> None:
        super().__init__(whole.starts[units], whole.counts[units], whole.by_unit)
        self.whole, self.units = whole, units

    def unit(self, unit: int) -> Tensor:
        return self.whole.unit(int(self.units[unit]))


class _Listed(Selection):
    """Samples by their numbers, in any order."""

    def __init__(self, samples: Tensor, by_unit: bool) -> None:
        starts = np.arange(0, len(samples), LISTED)
        super().__init__(starts, np.diff(starts, append=len(samples)), by_unit)
        self.samples = samples

    def unit(self, unit: int) -> Tensor:
        return self.samples[super().unit(unit)]

    def stored(self, positions: Tensor) -> Tensor:
        return self.samples[positions]


class _Share(Selection):
    """Of every unit of a selection its share of `held` samples, or the others."""

    def __init__(self, whole: Selection, held: int, seed: int, *, held_out: bool) -> None:
        total = max(1, len(whole))
        ends = whole.ends * held // total  # of sums, so that the shares of all units add up to what was asked for
        quotas = np.diff(ends, prepend=0)
        super().__init__(whole.starts, quotas if held_out else whole.counts - quotas, whole.by_unit)
        self.whole, self.quotas, self.seed, self.held_out = whole, quotas, seed, held_out

    def unit(self, unit: int) -> Tensor:
        everything = self.whole.unit(unit)
        quota = int(self.quotas[unit])
        drawn = torch.randperm(len(everything), generator=generator(self.seed, "split", unit))
        return everything[(drawn[:quota] if self.held_out else drawn[quota:]).sort().values]


class EpochOrder:
    """The order of a selection's samples in one epoch.

    The units are shuffled and dealt to lanes, each to the one that has least. A lane shuffles some units at a time, and
    the lanes take turns. A stretch of the order is given lane by lane, if units are read as a whole: ranks that share a
    batch then share few units.
    """

    def __init__(
        self, selection: Selection, seed: int, epoch: int, *, lanes: int = LANES, buffer: int = BUFFER
    ) -> None:
        self.by_unit = selection.by_unit
        shuffled = torch.randperm(len(selection.counts), generator=generator(seed, "order", epoch)).tolist()
        dealt: list[list[int]] = [[] for _ in range(lanes)]
        load = [(0, lane) for lane in range(lanes)]
        for unit in shuffled:
            samples, lane = load[0]
            heapq.heapreplace(load, (samples + int(selection.counts[unit]), lane))
            dealt[lane].append(unit)
        self.lanes = [
            _Lane(selection, units, buffer, (seed, "order", epoch, lane)) for lane, units in enumerate(dealt) if units
        ]
        self.lengths = np.array([lane.length for lane in self.lanes], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def stretch(self, start: int, stop: int) -> Tensor:
        """The samples from one position of the order up to another, int64 (stop - start)."""
        begins, ends = self._turns(start), self._turns(stop)
        parts = [lane.slice(int(a), int(b)) for lane, a, b in zip(self.lanes, begins, ends, strict=True)]
        samples = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        if self.by_unit:
            return samples
        turns = np.concatenate([np.arange(a, b) for a, b in zip(begins, ends, strict=True)])
        return samples[torch.from_numpy(np.argsort(turns, kind="stable"))]

    def _turns(self, position: int) -> Integers:
        """How many samples each lane has given when so many have been given by all. Empty ones are skipped."""
        low, high = 0, int(self.lengths.max(initial=0))
        while low < high:  # the last whole round that fits
            middle = (low + high + 1) // 2
            low, high = (middle, high) if np.minimum(self.lengths, middle).sum() <= position else (low, middle - 1)
        given = np.minimum(self.lengths, low)
        more = np.flatnonzero(self.lengths > low)[: position - int(given.sum())]
        given[more] += 1
        return given


class _Lane:
    """Units that are read one after the other, some of them shuffled together."""

    def __init__(self, selection: Selection, units: list[int], buffer: int, stream: tuple[int | str, ...]) -> None:
        self.selection, self.stream = selection, stream
        self.groups: list[list[int]] = [[]]
        sizes = [0]
        for unit in units:
            if sizes[-1] >= buffer:
                self.groups.append([])
                sizes.append(0)
            self.groups[-1].append(unit)
            sizes[-1] += int(selection.counts[unit])
        self.ends = list(itertools.accumulate(sizes))
        self.length = self.ends[-1]
        self._open: tuple[int, Tensor] | None = None

    def slice(self, start: int, stop: int) -> Tensor:
        parts = [torch.empty(0, dtype=torch.int64)]
        group = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            samples = self._group(group)
            begin = self.ends[group] - len(samples)
            end = min(stop, self.ends[group])
            parts.append(samples[start - begin : end - begin])
            start, group = end, group + 1
        return torch.cat(parts)

    def _group(self, group: int) -> Tensor:
        if self._open is None or self._open[0] != group:
            samples = torch.cat([self.selection.unit(unit) for unit in self.groups[group]])
            seed, *path = self.stream
            drawn = torch.randperm(len(samples), generator=generator(int(seed), *path, group))
            self._open = group, samples[drawn]
        return self._open[1]
