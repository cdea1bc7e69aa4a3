"""Which files of a listing are for training, and which are the test set."""

from collections.abc import Collection

import torch
from torch import Tensor

from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import listed, shown
from attemper.lab.tasks.listing import Kind, Listing
from attemper.lab.tasks.split import hold_out, joined


def groups_of(listing: Listing, equal: list[int]) -> Tensor | None:
    """Numbers of groups, int64 (N): copies of each other, and files of one group, have the same; None: all are alone.

    equal: for every file, the first one with the same contents.
    """
    marks = [index if item.group is None else item.group for index, item in enumerate(listing.items)]
    groups = joined(len(marks), equal, marks)
    return None if len(groups.unique()) == len(groups) else groups


def copies_of(listing: Listing, equal: list[int]) -> list[str]:
    """Lines about files that are the same, and about those that are so in two classes."""
    pairs = [(first, index) for index, first in enumerate(equal) if first != index]
    if not pairs:
        return []
    items = listing.items
    odd = [
        f"'{shown(items[first].name)}' and '{shown(items[index].name)}'"
        for first, index in pairs
        if items[first].target != items[index].target
    ]
    found = [f"Copies of other files: {len(pairs):,}. They are never on both sides of a split."]
    return [*found, f"The same file in different classes: {listed(odd)}."] if odd else found


def divide_files(listing: Listing, groups: Tensor | None, kind: Kind) -> tuple[Tensor, Tensor, list[str]]:
    """Indices of the files for training and for test, and what is to be said about it.

    Where there is no test set, a fixed fifth becomes one. Otherwise copies of its files are not trained on.
    """
    targets = torch.tensor([item.target for item in listing.items])
    if listing.items[0].held is None:
        kept, held = hold_out(targets, groups)
        return kept, held, _without(listing, targets, held, kind)
    test = torch.tensor([bool(item.held) for item in listing.items])
    copied = torch.zeros_like(test) if groups is None else ~test & torch.isin(groups, groups[test])
    notes = []
    if copied.any():
        notes = [
            f"Left out, since the test set of '{listing.folder}' holds copies or others of their group: "
            f"{kind.counted(int(copied.sum()))} for training."
        ]
    return (~test & ~copied).nonzero().flatten(), test.nonzero().flatten(), notes


def _without(listing: Listing, targets: Tensor, held: Tensor, kind: Kind) -> list[str]:
    """A line about classes that the test set does not have."""
    there = set(targets[held].tolist())
    missing = [shown(name) for target, name in enumerate(listing.classes) if target not in there]
    if not missing:
        return []
    return [
        f"The test set has no {kind.many} of {len(missing)} of {len(listing.classes)} classes, which have too few: "
        f"{listed(missing)}."
    ]


def check_no_class_is_lost(listing: Listing, skipped: Collection[int]) -> None:
    """Raise if a class has no file left, in training or in test."""
    left = {(item.target, item.held) for index, item in enumerate(listing.items) if index not in skipped}
    lost = sorted(
        {(item.target, bool(item.held), item.held) for item in listing.items} - {(t, bool(h), h) for t, h in left}
    )
    if lost:
        part = {None: "", False: " for training", True: " for test"}
        names = (f"'{shown(listing.classes[target])}'{part[held]}" for target, _, held in lost)
        raise DataError(
            f"In '{listing.folder}', none of the files can be read of {len(lost)} classes: {listed(names)}."
        )
