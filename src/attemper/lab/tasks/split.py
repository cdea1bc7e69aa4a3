"""Stratified splits that are a function of a seed."""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from attemper.lab.tasks.seed_streams import generator

FIXED = 0
"""The seed of what is the same in every run: the part of a data set that is held out for test, or kept at all."""

TEST_SHARE = 0.2
"""How much of a set without a test part is held out as one, always the same samples."""


def hold_out(targets: Tensor, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Indices of the samples for training and of a fixed, stratified fifth for test, groups on one side."""
    return divide(targets, round(len(targets) * TEST_SHARE), FIXED, groups)


def joined(count: int, *marks: Iterable[Hashable]) -> Tensor:
    """Numbers of groups, int64 (N): samples with an equal mark of any kind are in one group.

    >>> joined(4, ["a", "b", "a", "c"], [1, 2, 3, 3]).tolist()
    [0, 1, 0, 0]
    """
    leader = list(range(count))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = index = leader[leader[index]]
        return index

    for kind in marks:
        first: dict[Hashable, int] = {}
        for index, mark in enumerate(kind):
            one, other = find(first.setdefault(mark, index)), find(index)
            leader[max(one, other)] = min(one, other)
    return torch.tensor([find(index) for index in range(count)])


def divide(targets: Tensor, held: int, seed: int, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Indices of the samples that are kept and of the `held` samples that are held out, each in increasing order.

    targets: class of every sample, int64 (N).
    held: how many samples are held out, of every class in its proportion. Where there is room for it, every class has
        at least one sample in either part.
    groups: number of every sample's group, int64 (N): duplicates, cuts of one recording. A group stays together, so
        that the held-out part can be somewhat smaller or larger. None: every sample is alone.

    >>> kept, held = divide(torch.tensor([0] * 10 + [1] * 20), 9, seed=0)
    >>> len(kept), len(held), int((held >= 10).sum())
    (21, 9, 6)
    """
    targets = targets.cpu()
    if groups is not None:
        return _divide_groups(targets, held, seed, groups.cpu())
    draw = generator(seed, "split")
    _, counts = targets.unique(sorted=True, return_counts=True)
    by_class = targets.argsort(stable=True).split(counts.tolist())
    out, rest = [], []
    for alike, quota in zip(by_class, _quotas(counts.tolist(), held), strict=True):
        members = alike[torch.randperm(len(alike), generator=draw)]
        out.append(members[:quota])
        rest.append(members[quota:])
    return torch.cat(rest).sort().values, torch.cat(out).sort().values


def _divide_groups(targets: Tensor, held: int, seed: int, groups: Tensor) -> tuple[Tensor, Tensor]:
    """The same with whole groups: in random order, each is held out if it fits into what is left of its quota.

    A group whose members differ in class counts towards the class of its first member.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(index)
    of_class: dict[int, list[list[int]]] = {}
    for group in members.values():
        of_class.setdefault(int(targets[group[0]]), []).append(group)
    labels = sorted(of_class)
    counts = [sum(map(len, of_class[label])) for label in labels]
    draw = generator(seed, "split")
    out: list[int] = []
    for label, quota in zip(labels, _quotas(counts, held), strict=True):
        units = of_class[label]
        chosen: list[int] = []
        for at in torch.randperm(len(units), generator=draw).tolist():
            if len(chosen) + len(units[at]) <= quota:
                chosen += units[at]
        if quota and not chosen and len(units) > 1:  # every group is larger than the quota
            chosen = min(units, key=len)
        out += chosen
    mask = torch.zeros(len(targets), dtype=torch.bool)
    mask[out] = True
    return (~mask).nonzero().flatten(), mask.nonzero().flatten()


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
