"""Where the axes of tensors come from: followed through a pass, from projections to softmax.

Whatever a layer gives has positions in front and channels behind. Heads are a part of the channels, wherever a model
puts them. The product of queries and keys has an axis of positions from each of them. So the axes of logits tell by
themselves which of them are heads, whether softmax is over keys, over channels or over experts, and how samples and
heads were folded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.tempering.axes import RESHAPES, Axes, Factor, length, regroup, whole
from attemper.tempering.known import Known
from attemper.tempering.products import ADDED, PRODUCTS, Product, read_product
from attemper.tempering.roots import (
    STRIDED,
    Kind,
    Root,
    as_position,
    continued,
    from_product,
    is_unknown,
    kind_of_axis,
    restrided,
    without_weight,
)


@dataclass(frozen=True)
class Origin:
    """What is known of a tensor."""

    axes: Axes
    learnt: bool = False
    """Whether it is a parameter, or a view of one."""
    piece: tuple[int, int, Factor] | None = None
    """One of several equal parts that channels were split into: the split, the part, and the digit that tells them."""
    exact: bool = False
    """Whether it is what a layer gave, in another shape at most."""
    bias: Tensor | None = None
    """What that layer added."""
    attended: int = 0
    """The number of the attention call whose output it comes from; 0: none."""


@dataclass(frozen=True)
class Source:
    """The rows of a weight that made queries, keys or values (…, N, e): start + Σ digit · stride, heads first."""

    weight: Tensor
    dim: int
    start: int
    digits: tuple[tuple[int, int], ...]
    """Of each digit: its stride and size."""
    exact: bool


class Origins:
    """Follows axes. `after` is told of every call of a torch function and its result."""

    def __init__(self, constants: Collection[int] = ()) -> None:
        self.constants = constants
        """The ids of a model's buffers, which are no activations."""
        self.known = Known(None)
        self.parameters: dict[int, Origin] = {}
        self.products = 0
        self.splits = 0
        self.behind: dict[int, Root] = {}
        """Of attention calls, by their numbers: the channels of the layer that their output went into."""

    def of(self, x: Any) -> Origin | None:
        """What is known of a tensor."""
        if isinstance(x, nn.Parameter) or id(x) in self.constants:
            if id(x) not in self.parameters:
                axes = tuple(whole(Root("unknown", weight=x, dim=i), size) for i, size in enumerate(x.shape))
                self.parameters[id(x)] = Origin(axes, learnt=True)
            return self.parameters[id(x)]
        found: Origin | None = self.known.of(x)
        return found

    def source(self, x: Tensor, width: int) -> Source | None:
        """The weight that made queries, keys or values; None: not known, or several did. width: the axis of e."""
        found = self.of(x)
        if found is None or found.learnt:
            return None
        order = [i for i in range(len(found.axes)) if i != width % x.dim()] + [width % x.dim()]
        factors = [f for i in order for f in found.axes[i] if f.root.weight is not None]
        if len({id(factor.root) for factor in factors}) != 1:
            return None
        root = factors[0].root
        start = root.start + sum(factor.start for factor in factors)
        return Source(root.weight, root.dim, start, tuple((f.stride, f.size) for f in factors), found.exact)

    def mark_attended(self, x: Tensor, call: int) -> None:
        """Remember that a tensor is the output of an attention call."""
        found = self.of(x)
        if found is not None:
            self.known.note(x, replace(found, attended=call))

    def note(self, x: Tensor, axes: Axes | None, learnt: bool = False) -> None:
        """Remember what a tensor's axes are made of."""
        if axes is not None:
            self.known.note(x, Origin(axes, learnt))

    def carry(self, x: Any, out: Tensor) -> None:
        """Let a tensor of the same shape have the axes of another one, whatever it was computed by."""
        found = self.of(x)
        self.known.note(out, None if found is None else replace(found, exact=False, piece=None))

    def note_attended(self, query: Tensor, value: Tensor, out: Tensor) -> None:
        """Behind a fused call: the positions of the queries, the channels of the values."""
        of_query, of_value = self.of(query), self.of(value)
        if of_query is not None and of_value is not None and query.dim() == out.dim():
            self.note(out, (*of_query.axes[:-1], of_value.axes[-1]))

    def is_learnt(self, *operands: Tensor) -> bool:
        """Whether one of the operands is a parameter, or a view of one."""
        return any(found is not None and found.learnt for found in map(self.of, operands))

    def product_of(self, x: Tensor) -> int:
        """The number of the product of two activations that a tensor is; 0: it is none."""
        found = self.of(x)
        made = [] if found is None else [f.root.product for axis in found.axes for f in axis if f.root.side]
        return max(made, default=0)

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Follow one call; what is empty has nothing to follow, and nested tensors have no axes of one size."""
        if isinstance(out, Tensor) and (out.is_nested or out.numel() == 0):
            return
        if isinstance(out, Tensor):
            if func in PROJECTIONS:
                self._projected(func, args, kwargs, out)
            elif func in PRODUCTS:
                self._multiplied(func, args, kwargs, out)
            elif func is F.scaled_dot_product_attention and len(args) > 2:
                self.note_attended(args[0], args[2], out)
            elif func in JOINS:
                self._joined(func, args, kwargs, out)
            else:
                self._followed(func, args, kwargs, out)
        elif func in STRIDED and isinstance(out, tuple | list):
            self._split(func, args, kwargs, out)

    # ------------------------------------------------------------------------------------------------------- products
    def _projected(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """Behind a linear layer or a convolution: positions as they were, new channels."""
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        x, bias = named["input"], named.get("bias")
        found, of_weight = self.of(x), self.of(named["weight"])
        channel = out.dim() - 1 if func is F.linear else 1
        known = found is not None and len(found.axes) == out.dim()
        # a layer over positions, as in a mixer, gives positions
        over_positions = known and kind_of_axis(cast(Origin, found).axes[channel]) == "positions"
        root = _made_by(of_weight, 0, "positions" if over_positions else "channels")
        before = cast(Origin, found).axes if known else (None,) * out.dim()
        axes = tuple(
            whole(root, size)
            if i == channel
            else whole(Root("positions"), size)
            if axis is None or length(axis) != size
            else tuple(map(as_position, axis))
            for i, (axis, size) in enumerate(zip(before, out.shape, strict=True))
        )
        self._note_layer(out, axes, root, found, bias)

    def _note_layer(self, out: Tensor, axes: Axes, root: Root, found: Origin | None, bias: Any) -> None:
        self.known.note(out, Origin(axes, exact=root.weight is not None, bias=bias))
        if found is not None and found.attended and root.weight is not None:
            self.behind.setdefault(found.attended, root)

    def _multiplied(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        product = read_product(func, args, kwargs)
        if product is None or out.dim() != len(product.of_out):
            return
        left, right = self.of(product.left), self.of(product.right)
        learnt = [found is not None and found.learnt for found in (left, right)]
        if all(learnt):
            return
        of_left, of_right = _by_letter(left, product.of_left), _by_letter(right, product.of_right)
        if any(learnt):
            root = _made_by(right if learnt[1] else left, _rows_in(product, learnt[1]), "channels")
            axes = _weighted(product, learnt[0], of_right if learnt[0] else of_left, out, root)
            added = args[0] if func in ADDED else None
            self._note_layer(out, axes, root, right if learnt[0] else left, added)
            return
        self.products += 1
        summed = {kind_of_axis(of_left.get(letter)) for letter in product.summed}
        summed |= {kind_of_axis(of_right.get(letter)) for letter in product.summed}
        axes = tuple(
            self._of_product(letter, size, of_left, of_right, product, summed)
            for letter, size in zip(product.of_out, out.shape, strict=True)
        )
        self.note(out, axes)

    def _of_product(
        self, letter: str, size: int, of_left: Any, of_right: Any, product: Product, summed: set[Kind]
    ) -> tuple[Factor, ...]:
        if letter in product.of_left and letter in product.of_right:
            both = [axis for axis in (of_left.get(letter), of_right.get(letter)) if axis and length(axis) == size]
            both.sort(key=is_unknown)
            return both[0] if both else whole(Root("unknown"), size)
        side = 1 if letter in product.of_left else 2
        known, letters = (of_left, product.of_left) if side == 1 else (of_right, product.of_right)
        axis: tuple[Factor, ...] | None = known.get(letter)
        if axis and kind_of_axis(axis) == "channels":
            if any(kind_of_axis(known.get(other)) == "positions" for other in product.own(letters) if other != letter):
                return axis  # heads of queries that share one head of keys
        if axis and any(factor.root.side for factor in axis):
            # weights times values: what were queries of the logits are positions of the result
            return whole(Root("positions"), size)
        # what meets over channels are positions, and what meets over positions are channels
        kind: Kind = kind_of_axis(axis)
        if "channels" in summed or "positions" in summed:
            kind = "positions" if "channels" in summed else "channels"
        return whole(Root(kind, self.products, side), size)

    # ---------------------------------------------------------------------------------------------------------- others
    def _followed(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """Views, and whatever keeps the shape of an operand."""
        first = self.of(args[0]) if args else None
        axes = None
        if first is not None and func in RESHAPES:
            axes = regroup(first.axes, out.shape)
        elif first is not None and func in STRIDED:
            axes = restrided(func, args, kwargs, first.axes, 0)
        elif func not in STRIDED and func not in RESHAPES:
            self._of_operands(func, (*args, *kwargs.values()), out)
        if first is not None and axes is not None:
            self.known.note(out, replace(first, axes=axes, piece=None))

    def _of_operands(self, func: Any, operands: Any, out: Tensor) -> None:
        """An operation on each element, or one that changes the size of some axes: axes are those of an operand."""
        tensors = [x for x in operands if isinstance(x, Tensor)]
        each = [(x, found) for x in tensors if x.dim() == out.dim() and (found := self.of(x)) is not None]
        if not all(found.learnt for _, found in each) or len(each) < len(tensors):
            each = [(x, found) for x, found in each if not found.learnt]
        if not each:
            return
        # of several, the one that has the shape; of these, the one that comes from a product
        x, found = min(each, key=lambda pair: (pair[0].shape != out.shape, not from_product(pair[1].axes)))
        if x.shape == out.shape:
            self.known.note(out, self._changed(func, found, tensors))
            return
        axes = [
            axis if before == size else whole(Root(kind_of_axis(axis)), size)
            for axis, before, size in zip(found.axes, x.shape, out.shape, strict=True)
        ]
        self.known.note(out, replace(found, axes=without_weight(axes), exact=False, piece=None))

    def _changed(self, func: Any, found: Origin, tensors: Sequence[Tensor]) -> Origin:
        """What an operation on each element makes of a tensor: something else, but for casts and a layer's own bias."""
        if func in CASTS:
            return found
        biases = [x for x in tensors if isinstance(x, nn.Parameter) and x.dim() == 1]
        if func in ADDITIONS and found.exact and found.bias is None and len(biases) == 1 and len(tensors) == 2:
            return replace(found, bias=biases[0])
        return replace(found, exact=False)

    def _split(self, func: Any, args: Any, kwargs: Any, out: Sequence[Any]) -> None:
        found = self.of(args[0]) if args else None
        if found is None:
            return
        self.splits += 1
        for index, part in enumerate(out):
            axes = restrided(func, args, kwargs, found.axes, index)
            if axes is None or len(axes) != part.dim() or part.numel() == 0:
                return
            digit = _digit(found.axes, args[0].shape, [each.shape for each in out])
            piece = None if digit is None else (self.splits, index, digit)
            self.known.note(part, replace(found, axes=axes, piece=piece))

    def _joined(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """cat and stack; of the parts that channels were split into, a new axis of channels comes in front."""
        parts = args[0]
        found = [self.of(part) for part in parts]
        first = found[0] if found else None
        if first is None or any(each is None for each in found):
            return
        every = [each for each in found if each is not None]
        dim = (args[1] if len(args) > 1 else 0) % out.dim()
        axes = list(first.axes)
        again = continued([each.axes[dim] for each in every]) if func is not torch.stack else None
        heads = _heads_of_pieces(every)
        if again is not None:
            axes[dim] = again
        elif func is torch.stack:
            axes.insert(dim, heads or whole(Root("unknown"), len(parts)))
        elif heads is not None and kind_of_axis(axes[dim]) != "channels":
            axes[dim] = (*heads, *axes[dim])
        else:  # keys that several products gave stay keys
            made = {(factor.root.product, factor.root.side) for factor in axes[dim]}
            product, side = made.pop() if len(made) == 1 else (0, 0)
            axes[dim] = whole(Root(kind_of_axis(first.axes[dim]), product, side), out.shape[dim])
        if [length(axis) for axis in axes] == list(out.shape):
            kept = again is not None or heads is not None
            joined = tuple(axes) if kept else without_weight(axes)
            self.known.note(out, Origin(joined, exact=kept and all(each.exact for each in every), bias=first.bias))


def _digit(axes: Axes, shape: Sequence[int], parts: Sequence[Sequence[int]]) -> Factor | None:
    """The digit that tells the equal parts of split channels from each other; None: they are no such parts."""
    if any(part != parts[0] for part in parts) or len(parts[0]) != len(shape):
        return None
    cut = [(axis, n) for axis, n, before in zip(axes, parts[0], shape, strict=True) if n != before]
    if len(cut) != 1 or len(cut[0][0]) != 1 or kind_of_axis(cut[0][0]) != "channels":
        return None
    (root, stride, _, start), each = cut[0][0][0], cut[0][1]
    return Factor(root, stride * each, len(parts), start if each == 1 else 0)  # what is left of an axis has its start


def _heads_of_pieces(every: Sequence[Origin]) -> tuple[Factor, ...] | None:
    """The axis that the parts of split channels make side by side; None: they are not all parts of one split."""
    pieces = [each.piece for each in every]
    first = pieces[0]
    if first is None or first[2].size != len(pieces):
        return None
    return (first[2],) if pieces == [(first[0], i, first[2]) for i in range(len(pieces))] else None


def _made_by(of_weight: Origin | None, axis: int, kind: Kind) -> Root:
    """The channels that a layer makes, with the rows of its weight; axis: that of the rows."""
    rows = of_weight.axes[axis] if of_weight is not None and of_weight.learnt and axis >= 0 else ()
    if len(rows) != 1 or rows[0].stride != 1 or rows[0].root.weight is None:
        return Root(kind)
    return Root(kind, weight=rows[0].root.weight, dim=rows[0].root.dim, start=rows[0].start)


def _rows_in(product: Product, right: bool) -> int:
    """The axis of a weight that becomes the one new axis of a product with it; -1: there is not one."""
    letters = product.of_right if right else product.of_left
    new = product.own(letters)
    return letters.index(new) if len(new) == 1 and len(letters) == 2 else -1


def _by_letter(found: Origin | None, letters: str) -> dict[str, tuple[Factor, ...]]:
    return {} if found is None else dict(zip(letters, found.axes, strict=True))


def _weighted(product: Product, left: bool, of_other: dict[str, tuple[Factor, ...]], out: Tensor, root: Root) -> Axes:
    """A product with a parameter: positions as they were; new axes are channels where channels were summed over.

    left: whether the parameter is the left operand.
    """
    summed = [kind_of_axis(of_other.get(letter)) for letter in product.summed]
    if summed and all(kind == "positions" for kind in summed):
        root = Root("positions")
    new = product.own(product.of_left if left else product.of_right)
    axes: list[tuple[Factor, ...]] = []
    for letter, size in zip(product.of_out, out.shape, strict=True):
        if letter in new:
            axes.append(whole(root if len(new) == 1 else root.plain(), size))
        elif letter in of_other and length(of_other[letter]) == size:
            axes.append(tuple(map(as_position, of_other[letter])))
        else:
            axes.append(whole(Root("positions"), size))
    return tuple(axes)


CASTS = frozenset({
    Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type_as,
    Tensor.detach, torch.detach,
})  # fmt: skip
ADDITIONS = frozenset({torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__})
PROJECTIONS = frozenset({F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d})
JOINS = frozenset({torch.cat, torch.concat, torch.concatenate, torch.stack})
