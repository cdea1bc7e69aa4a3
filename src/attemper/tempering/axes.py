"""What the axes of a tensor are made of, and how views regroup them.

An axis is a sequence of factors, the slowest first: (batch · heads, N, e) after a view of (batch, heads, N, e) has two
factors in its first axis. So samples and heads can be told apart however a model folds them, and logits become
(B, H, Nq, Nk) and go back, however their axes are arranged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Role = Literal["batch", "heads", "queries", "keys"]
ROLES: tuple[Role, ...] = ("batch", "heads", "queries", "keys")


class Factor(NamedTuple):
    """A digit of the index along `root`: entry i of it stands for start + i · stride."""

    root: Any
    stride: int
    size: int
    start: int = 0


Axes = tuple[tuple[Factor, ...], ...]


def whole(root: Any, size: int) -> tuple[Factor, ...]:
    """An axis that is all of its root."""
    return (Factor(root, 1, size),)


def regroup(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """The axes of a tensor that is viewed or reshaped to `shape`; None: it cuts through factors.

    >>> b, h = whole("batch", 2), whole("heads", 3)
    >>> [[factor.root for factor in axis] for axis in regroup((b, h, whole("n", 5)), (6, 5))]
    [['batch', 'heads'], ['n']]
    """
    before = [length(axis) for axis in axes]
    first = 0  # axes in front and at the end that stay as they are keep even factors of size 1
    while first < min(len(before), len(shape)) and before[first] == shape[first]:
        first += 1
    last = 0
    while last < min(len(before), len(shape)) - first and before[-1 - last] == shape[-1 - last]:
        last += 1
    end = len(axes) - last
    middle = _refilled([factor for axis in axes[first:end] for factor in axis], shape[first : len(shape) - last])
    return None if middle is None else (*axes[:first], *middle, *axes[end:])


def _refilled(factors: list[Factor], shape: Sequence[int]) -> Axes | None:
    waiting = [factor for factor in factors if factor.size != 1][::-1]
    filled = []
    for size in shape:
        axis = _taken(waiting, size)
        if axis is None:
            return None
        filled.append(axis)
    return None if waiting else tuple(filled)


def _taken(waiting: list[Factor], size: int) -> tuple[Factor, ...] | None:
    """The next factors that make an axis of this size, taken from the end of `waiting`; the last may be cut in two."""
    axis: list[Factor] = []
    left = size
    while left > 1:
        if not waiting:
            return None
        root, stride, count, start = waiting.pop()
        if count > left and count % left == 0:
            waiting.append(Factor(root, stride, count // left))
            stride, count = stride * (count // left), left
        if left % count:
            return None
        left //= count
        if axis and axis[-1].root is root and axis[-1].stride == stride * count:  # neighbouring digits are one
            before = axis.pop()
            count, start = count * before.size, start + before.start
        axis.append(Factor(root, stride, count, start))
    return tuple(axis)


def length(axis: tuple[Factor, ...]) -> int:
    """The size of an axis."""
    size = 1
    for factor in axis:
        size *= factor.size
    return size


def moved(func: Any, args: Any, kwargs: Any, out: Tensor, axes: Axes) -> Axes | None:
    """The axes of what a function makes of its first operand, which has `axes`; None: not known.

    Known are views, permutations, and whatever leaves the shape as it is.
    """
    if func in RESHAPES:
        return regroup(axes, out.shape)
    order = permutation(func, args, kwargs)
    if order is not None:
        return tuple(axes[i] for i in order)
    return axes if tuple(out.shape) == tuple(map(length, axes)) and func not in MIXING else None


def permutation(func: Any, args: Any, kwargs: Any) -> list[int] | None:
    """The order in which a function puts the axes of its operand; None: it is no permutation."""
    axes, rest = list(range(args[0].dim())), [*args[1:], *kwargs.values()]
    if func in TRANSPOSES:
        axes[rest[0]], axes[rest[1]] = axes[rest[1]], axes[rest[0]]
    elif func in LAST_TWO:
        axes[-2:] = axes[:-3:-1]
    elif func in PERMUTES:
        axes = [axes[i] for i in (rest if isinstance(rest[0], int) else rest[0])]
    else:
        return None
    return axes


TRANSPOSES = (Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes, Tensor.swapdims, torch.swapdims)
LAST_TWO = (Tensor.mT.__get__,)  # type: ignore[attr-defined]
PERMUTES = (Tensor.permute, torch.permute)
RESHAPES = (
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten,
    Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze, Tensor.view_as, Tensor.reshape_as,
)  # fmt: skip
MIXING = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum, F.linear)
"""Products may give the shape that an operand had, with other axes."""


# -------------------------------------------------------------------------------------------------------- arrangements
@dataclass(frozen=True)
class Arrangement:
    """Where samples, heads, queries and keys are in the axes of logits.

    axes: of each axis its parts, the slowest first: a role and how many there are, or -1 for all that is left.
    """

    axes: tuple[tuple[tuple[Role, int], ...], ...]

    @property
    def is_plain(self) -> bool:
        """Whether this is (B, H, Nq, Nk) as it is."""
        return [[role for role, _ in axis] for axis in self.axes] == [[role] for role in ROLES]

    def of(self, shape: Sequence[int]) -> Axes:
        """The axes of logits of this shape."""
        return tuple(_filled(parts, size) for parts, size in zip(self.axes, shape, strict=True))


def _filled(parts: tuple[tuple[Role, int], ...], size: int) -> tuple[Factor, ...]:
    known = 1
    for _, count in parts:
        known = known * count if count > 0 else known
    return tuple(Factor(role, 1, count if count > 0 else size // known) for role, count in parts)


def plain_arrangement(axes: int) -> Arrangement:
    """(…, H, Nq, Nk), what is in front being samples; (G, Nq, Nk): samples, or samples and heads in one."""
    inner: tuple[Role, ...] = ("heads", "queries", "keys") if axes > 3 else ("queries", "keys")
    outer: list[Role] = ["batch"] * (axes - len(inner))
    return Arrangement(tuple(((role, -1),) for role in (*outer, *inner)))


def sorted_by_role(x: Tensor, axes: Axes, roles: Sequence[str] = ROLES) -> Tensor:
    """A tensor with one axis for each of `roles`, from one whose axes have factors of these roles."""
    factors = [factor for axis in axes for factor in axis]
    order = sorted(range(len(factors)), key=lambda i: roles.index(factors[i].root))
    sizes = [length(tuple(factor for factor in factors if factor.root == role)) for role in roles]
    if order == list(range(len(factors))):
        return x.reshape(sizes)
    return x.reshape([factor.size for factor in factors]).permute(order).reshape(sizes)


def as_it_was(x: Tensor, axes: Axes, roles: Sequence[str] = ROLES) -> Tensor:
    """The way back from `sorted_by_role`."""
    factors = [factor for axis in axes for factor in axis]
    order = sorted(range(len(factors)), key=lambda i: roles.index(factors[i].root))
    shape = [length(axis) for axis in axes]
    if order == list(range(len(factors))):
        return x.reshape(shape)
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.reshape([factors[i].size for i in order]).permute(back).reshape(shape)


# ---------------------------------------------------------------------------------------------------------- projections
def three_axes(x: Tensor) -> Tensor:
    """(B, N, d) from what went into a projection: one token per sample, a sequence, or a feature map."""
    if x.dim() == 2:
        return x[:, None]
    return x.flatten(1, -2) if x.dim() > 3 else x


def four_axes(t: Tensor) -> Tensor:
    """(batch, heads, N, e) from fewer axes or more; leading ones beyond two go into the batch."""
    if t.dim() == 2:
        return t[None, None]
    return t[:, None] if t.dim() == 3 else t.flatten(0, -4)


# ------------------------------------------------------------------------------------------------------------- softmax
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)


def softmax_axis(input: Any, dim: int | None = None, *_: Any, **__: Any) -> int | None:
    """The axis that a softmax is over, counted from the front; None: it does not say."""
    if not isinstance(input, Tensor) or dim is None or input.dim() == 0:
        return None
    return dim % input.dim()
