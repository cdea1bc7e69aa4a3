"""Methods on the parts of tensors that a process holds: weights, blocks and branches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import Tensor, nn

from attemper.errors import MeshError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import BlockMap, BranchMap, WeightMap
from attemper.ops.stream import Offsets, Site, Source
from attemper.tempering.draws import note, ordinary_source, source
from attemper.tempering.mesh import Position, is_sharded
from attemper.tempering.shards import Held, hold, hold_both, is_whole
from attemper.tempering.standing import standing

if TYPE_CHECKING:
    from attemper.tempering.layers import Layout
    from attemper.tempering.penalties import Control


class TokenAxes(NamedTuple):
    """The axes of tokens in a tensor: of samples (None: there is one sample), of tokens, of channels."""

    sample: int | None
    tokens: tuple[int, ...]
    channels: int


def token_axes(dims: int, layout: Layout) -> TokenAxes:
    """Those of (N, C), (B, N, C), (N, B, C), (B, H, W, C) or (B, C, H, W).

    >>> token_axes(3, "sequence_first")
    TokenAxes(sample=1, tokens=(0,), channels=2)
    """
    if layout == "channels_first":
        return TokenAxes(0, tuple(range(2, dims)), 1)
    if dims == 2:
        return TokenAxes(None, (0,), 1)
    if layout == "sequence_first" and dims == 3:
        return TokenAxes(1, (0,), 2)
    return TokenAxes(0, tuple(range(1, dims - 1)), dims - 1)


def token_offsets(position: Position, axes: TokenAxes, held: Held, channels: int = 0) -> Offsets:
    """Where the tokens that a process holds stand among all of them.

    channels: how many they have in all, where that is known; a plain tensor may have a part of them.
    """
    first, context, tensor = held.first, position.along("context"), position.along("tensor")
    here = held.local.shape[axes.channels]
    channel = first[axes.channels]
    if held.shape[axes.channels] != channels == here * tensor.size:
        channel = tensor.rank * here
    tokens, stretch = 0, 1
    for axis in axes.tokens:
        stretch *= held.shape[axis]
    if len(axes.tokens) == 1:
        tokens = first[axes.tokens[0]]
    sample = 0 if axes.sample is None else first[axes.sample]
    return Offsets(sample, 0, context.rank * stretch + tokens, channel)


def refuse_split_tokens(control: Control, method: object, place: Place, x: Tensor) -> None:
    """Raise where a method that mixes tokens would see some of them only."""
    position = standing(control)
    name = getattr(method, "name", type(method).__name__)
    if position.has("context"):
        raise MeshError(
            f"{name} mixes the tokens of a sample, and each process along the context dimension of the mesh has some "
            f"of them only: it cannot act in {place.where}"
        )
    if position.splits_tokens and not is_sharded(x):
        raise MeshError(
            f"{name} mixes the tokens of a sample, and this model is sequence-parallel (its norms are): the plain "
            f"tensor that {place.where} has may hold some of them only. Let its layers give DTensors "
            "(use_local_output=False)."
        )


def refuse_parts(control: Control, method: object, place: Place) -> None:
    """Raise where a penalty would be that of a part of an attention or of a layer."""
    position = standing(control)
    if position.axes and position.has("tensor", "context"):
        raise MeshError(
            f"{getattr(method, 'name', method)} adds a penalty in {place.where}, and each process has a part of it: "
            "penalties cannot be taken on a mesh with a tensor or context dimension"
        )


def map_weight(
    control: Control, site: Site, method: WeightMap, weight: Tensor, layer: nn.Module | None = None
) -> Tensor:
    """A weight, or the part of it that this process holds, mapped.

    layer: whose weight it is, (out, in); its attributes tell the size of the whole where a plain tensor is a part.
    """
    held = hold(weight, range(2, weight.dim()))
    at = functools.partial(_weight_offsets, held=held, layer=layer)
    drawn = source(control, site, held.local, 0, at)
    note(control, drawn, held.local.shape, method=cast(Method, method).name)
    return held.whole(method.map_weight(held.local, drawn.stream()))


def _weight_offsets(position: Position, held: Held, layer: nn.Module | None) -> Offsets:
    first, tensor = list(held.first), position.along("tensor")
    for axis, name in enumerate(("out_features", "in_features")):
        here, whole = held.local.shape[axis], getattr(layer, name, 0)
        if held.shape[axis] != whole == here * tensor.size:
            first[axis] = tensor.rank * here
    return Offsets(query=first[0], key=first[1] * held.local[0, 0].numel())


def block_source(control: Control, site: Site, x: Tensor, layout: Layout) -> Source:
    """Where the stream of what is drawn for a block, or for a branch of it, starts. x: a tensor of tokens in it."""
    if is_whole(x) and (drawn := ordinary_source(control, site.word, x)) is not None:
        return drawn
    axes = token_axes(x.dim(), layout)
    held = hold(x)
    at = functools.partial(token_offsets, axes=axes, held=held)
    return source(control, site, held.local, held.rows(axes.sample), at)


def map_block(
    control: Control, method: BlockMap, before: Tensor, after: Tensor, drawn: Source, layout: Layout
) -> Tensor:
    """What a method makes of a block's input and output."""
    together = token_axes(after.dim(), layout).tokens if method.mixes_tokens else ()
    first, last = hold_both(before, after, together)
    note(control, drawn, last.local.shape)
    return last.whole(method.map_block(first.local, last.local, drawn.stream()))


def map_branch(control: Control, method: BranchMap, branch: Tensor, drawn: Source, layout: Layout) -> Tensor:
    """What a method makes of a residual branch."""
    held = hold(branch, token_axes(branch.dim(), layout).tokens if method.mixes_tokens else ())
    swap = layout == "sequence_first" and branch.dim() == 3
    part = held.local.transpose(0, 1) if swap else held.local
    note(control, drawn, part.shape)
    mapped = method.map_branch(part, drawn.stream())
    return held.whole(mapped.transpose(0, 1) if swap else mapped)


def add_branch(
    control: Control, method: BranchMap, x: Tensor, branch: Tensor, drawn: Source, layout: Layout
) -> Tensor | None:
    """The residual stream x and what a method makes of a branch, added; None: they are to be added apart."""
    if not (is_whole(branch) and is_whole(x)) or (layout == "sequence_first" and branch.dim() == 3):
        return None
    note(control, drawn, branch.shape)
    return method.add_branch(x, branch, drawn.stream())
