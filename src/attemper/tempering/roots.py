"""Axes by what made them, and what views that cut, drop and reorder axes leave of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attemper.tempering.axes import Axes, Factor, length, whole

Kind = Literal["positions", "channels", "unknown"]


@dataclass(frozen=True, eq=False)
class Root:
    """An axis as it was when it was made."""

    kind: Kind
    product: int = 0
    """The number of the product of two activations that made it; 0: none did."""
    side: int = 0
    """The operand of that product that the axis belongs to alone: 1 or 2; 0: both have it."""
    weight: Tensor | None = None
    """The parameter of whose rows a layer made it."""
    dim: int = 0
    """The axis of that parameter that has these rows."""
    start: int = 0
    """The first of them."""

    def plain(self) -> Root:
        """The same without its weight."""
        return self if self.weight is None else Root(self.kind, self.product, self.side)


def kind_of_axis(axis: tuple[Factor, ...] | None) -> Kind:
    """What an axis is, if all of its factors are the same."""
    kinds = {factor.root.kind for factor in axis or ()}
    return kinds.pop() if len(kinds) == 1 else "unknown"


def is_unknown(axis: tuple[Factor, ...]) -> bool:
    """Whether it is not known what some of an axis is."""
    return any(factor.root.kind == "unknown" for factor in axis)


def from_product(axes: Axes) -> bool:
    """Whether axes are those of a product of two activations."""
    return any(factor.root.side for axis in axes for factor in axis)


def as_position(factor: Factor) -> Factor:
    """What stands in front of the channels of a layer: positions if it is not known, and no longer of another layer."""
    kind: Kind = "positions" if factor.root.kind == "unknown" else factor.root.kind
    if kind == factor.root.kind and factor.root.weight is None:
        return factor
    return factor._replace(root=Root(kind, factor.root.product, factor.root.side), start=0)


def continued(parts: Sequence[tuple[Factor, ...]]) -> tuple[Factor, ...] | None:
    """The axis that consecutive parts of one axis make when they are put together again; None: they are none."""
    if any(len(part) != 1 for part in parts):
        return None
    factors = [part[0] for part in parts]
    following = factors[0].start
    for factor in factors:
        if factor.root is not factors[0].root or factor.stride != factors[0].stride or factor.start != following:
            return None
        following += factor.size * factor.stride
    return (Factor(factors[0].root, factors[0].stride, sum(f.size for f in factors), factors[0].start),)


def without_weight(axes: Sequence[tuple[Factor, ...]]) -> Axes:
    """The same axes, of which it is no longer known which rows of a weight made them."""
    return tuple(tuple(factor._replace(root=factor.root.plain()) for factor in axis) for axis in axes)


def restrided(func: Any, args: Any, kwargs: Any, axes: Axes, part: int) -> Axes | None:
    """The axes behind a view that only reorders, cuts, drops or adds axes: read from the strides that it gives.

    part: which of several results is meant.
    """
    shape, steps = args[0].shape, [1]
    for size in shape[:0:-1]:  # such that every entry, and every axis, has a number of its own
        steps.insert(0, steps[0] * (size + 1))
    try:
        out = func(torch.empty_strided(tuple(shape), steps, device="meta"), *args[1:], **kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError):  # an index that is a tensor on another device
        return None
    out = out[part] if isinstance(out, tuple | list) else out
    if not out._is_view():
        return None
    begins = [out.storage_offset() // step % (size + 1) for step, size in zip(steps, shape, strict=True)]
    found: list[tuple[Factor, ...]] = []
    used = set()
    for size, stride in zip(out.shape, out.stride(), strict=True):
        source = next((i for i, step in enumerate(steps) if step <= stride), None)
        if source is None or source in used or (size == 1 and shape[source] != 1):
            found.append(() if size == 1 else whole(Root("unknown"), size))
            continue
        used.add(source)
        found.append(_cut(axes[source], begins[source], size, stride // steps[source]))
    dropped = [(axes[i], begins[i]) for i in range(len(shape)) if i not in used]
    result = _shifted(tuple(found), dropped)
    mixed = any(len(axis) > 1 and axis not in result for i, axis in enumerate(axes) if i in used)
    return without_weight(result) if mixed else result


def _cut(axis: tuple[Factor, ...], begin: int, size: int, step: int) -> tuple[Factor, ...]:
    """A part of an axis."""
    if length(axis) == size and step == 1:
        return axis
    if len(axis) != 1:
        return whole(Root(kind_of_axis(axis)), size)
    root, stride, _, start = axis[0]
    return (Factor(root, stride * step, size, start + begin * stride),)


def _shifted(axes: Axes, dropped: Sequence[tuple[tuple[Factor, ...], int]]) -> Axes:
    """The axes of one entry of axes that are dropped, whose number is that of their digits in the others."""
    kept = [list(axis) for axis in axes]
    for axis, entry in dropped:
        rest = length(axis)
        for factor in axis:
            rest //= factor.size
            moved = factor.start + entry // rest % factor.size * factor.stride
            for other in kept:
                same = next((i for i, each in enumerate(other) if each.root is factor.root), None)
                if same is not None:
                    other[same] = other[same]._replace(start=other[same].start + moved)
                    break
    return tuple(map(tuple, kept))


STRIDED = frozenset({
    Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes, Tensor.swapdims, torch.swapdims,
    Tensor.permute, torch.permute, Tensor.movedim, torch.movedim, Tensor.moveaxis, torch.moveaxis, Tensor.t, torch.t,
    Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
    Tensor.__getitem__, Tensor.select, torch.select, Tensor.narrow, torch.narrow, Tensor.unbind, torch.unbind,
    Tensor.chunk, torch.chunk, Tensor.split, torch.split, torch.tensor_split, Tensor.tensor_split,
    Tensor.expand, Tensor.expand_as,
})  # fmt: skip
