"""Stratified splits that are a function of a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.tasks.seeds import generator

__all__ = ["FIXED", "divide"]

FIXED = 0
"""The seed of what is the same in every run: the part of a data set that is held out for test, or kept at all."""


def divide(targets: Tensor, held: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the samples that are kept and of the `held` samples that are held out, each in increasing order.

    targets: class of every sample, int64 (N).
    held: how many samples are held out, of every class in its proportion. Where there is room for it, every class has
        at least one sample in either part.

    >>> kept, held = divide(torch.tensor([0] * 10 + [1] * 20), 9, seed=0)
    >>> len(kept), len(held), int((held >= 10).sum())
    (21, 9, 6)
    """
    targets = targets.cpu()
    draw = generator(seed, "split")
    _, counts = targets.unique(sorted=True, return_counts=True)
    by_class = targets.argsort(stable=True).split(counts.tolist())
    out, rest = [], []
    for alike, quota in zip(by_class, _quotas(counts.tolist(), held), strict=True):
        members = alike[torch.randperm(len(alike), generator=draw)]
        out.append(members[:quota])
        rest.append(members[quota:])
    return torch.cat(rest).sort().values, torch.cat(out).sort().values


def _quotas(counts: list[int], held: int) -> list[int]:
    """How many of each class are held out: its share rounded down, and the rest to the largest remainders."""
    total = sum(counts)
    quotas = [count * held // total for count in counts]
    remainders = sorted(range(len(counts)), key=lambda c: -(counts[c] * held % total))  # stable: ties by class
    for c in remainders[: held - sum(quotas)]:
        quotas[c] += 1
    for c, count in enumerate(counts):  # a class that came away empty takes one from the class with most to give
        if quotas[c] == 0 and count > 1 and max(quotas) > 1:
            quotas[quotas.index(max(quotas))] -= 1
            quotas[c] = 1
        elif quotas[c] == count and count > 1:
            room = max(range(len(counts)), key=lambda other: counts[other] - quotas[other])
            if counts[room] - quotas[room] > 1:
                quotas[room] += 1
                quotas[c] -= 1
    return quotas
