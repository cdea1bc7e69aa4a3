"""Tensors of which a process holds a part: DTensors, as methods see them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from attemper.errors import UnsupportedError
from attemper.tempering.mesh import is_distributed, is_sharded, role_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Held(NamedTuple):
    """What a process holds of a tensor.

    local: its part, a plain tensor. first: along each axis, the number of the first entry of the part in the whole.
    whole: makes a tensor like the given one of a part like `local`. split: the axes that are split over the data.
    """

    local: Tensor
    first: tuple[int, ...]
    whole: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    split: tuple[int, ...] = ()

    def rows(self, axis: int | None) -> int:
        """How many samples each process counts along an axis; 0: the tensor tells their numbers by itself."""
        if axis is None:
            return 1
        return 0 if axis in self.split else self.shape[axis]


def _same(x: Tensor) -> Tensor:
    return x


def hold(x: Tensor, together: Collection[int] = ()) -> Held:
    """The part of a tensor that this process holds; of a plain tensor, all of it.

    together: the axes that must not be split; they are gathered first, and split again behind. So are sums of which
    every process holds a term, which stay whole.
    """
    refuse_nested(x)
    if not is_sharded(x):
        return Held(x, (0,) * x.dim(), _same, tuple(x.shape))
    return _hold(cast("DTensor", x), together)


def is_whole(x: Tensor) -> bool:
    """Whether a tensor is one of eager torch, of which no process can hold a part: as it nearly always is."""
    return type(x) is Tensor and not (x.is_nested or torch.compiler.is_compiling() or is_distributed())


def refuse_nested(x: Tensor) -> None:
    """Raise for a nested tensor, whose samples have no common number of tokens."""
    if x.is_nested:
        raise UnsupportedError(
            "methods act on tensors in which all samples have as many tokens, and got a nested one. Pad the samples "
            "and mask the padding, or call attemper.attention(…, cu_seqlens=…) yourself."
        )


def _hold(x: DTensor, together: Collection[int]) -> Held:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, before = x.device_mesh, x.placements
    during = tuple(
        each if type(each) is Shard and each.dim % x.dim() not in together else Replicate() for each in before
    )
    behind = tuple(_whole_sum(each) for each in before)
    gathered = x if during == before else x.redistribute(placements=during)
    shape, stride = x.shape, x.stride()

    def whole(part: Tensor) -> Tensor:
        made = DTensor.from_local(part, mesh, during, run_check=False, shape=shape, stride=stride)
        return made if behind == during else made.redistribute(placements=behind)

    _, first = compute_local_shape_and_global_offset(shape, mesh, during)
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    data = [each for each, name in zip(during, names, strict=True) if role_of(name) == "data"]
    split = tuple(each.dim % x.dim() for each in data if isinstance(each, Shard))
    return Held(gathered.to_local(), tuple(first), whole, tuple(shape), split)


def hold_both(before: Tensor, after: Tensor, together: Collection[int] = ()) -> tuple[Held, Held]:
    """The same parts of two tensors of one shape, split as the second is."""
    if is_sharded(before) and is_sharded(after):
        given, wanted = cast("DTensor", before), cast("DTensor", after)
        before = given.redistribute(placements=[_whole_sum(each) for each in wanted.placements])
    return hold(before, together), hold(after, together)


class HeldCall(NamedTuple):
    """What a process holds of an attention call: whole samples and heads. whole: of its output."""

    query: Held
    key: Tensor
    value: Tensor
    mask: Tensor | None
    whole: Callable[[Tensor], Tensor]


def hold_call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> HeldCall | str:
    """The part of a call of DTensors (B, H, N, e) that this process computes, or why that is not understood."""
    if query.dim() != 4 or not (is_sharded(key) and is_sharded(value)):
        return "not all of its queries, keys and values are DTensors of four axes"
    q, k, v = cast("tuple[DTensor, DTensor, DTensor]", (query, key, value))
    if not q.placements == k.placements == v.placements:
        return f"its queries are placed as {q.placements}, its keys as {k.placements}, its values as {v.placements}"
    if not all(each.is_replicate() or each.is_shard(0) or each.is_shard(1) for each in q.placements):
        return f"its queries are placed as {q.placements}, and they may be split by samples and heads only"
    held = hold(q)
    mesh, placements = q.device_mesh, q.placements
    shape = (*q.shape[:3], v.shape[3])

    def whole(part: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        stride = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
        made: Tensor = DTensor.from_local(
            part.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return made

    return HeldCall(held, k.to_local(), v.to_local(), _part_of_mask(mask, held), whole)


def _part_of_mask(mask: Tensor | None, held: Held) -> Tensor | None:
    """The part of a mask, broadcastable to (B, H, Nq, Nk), that belongs to a part of the queries."""
    if mask is None:
        return None
    if is_sharded(mask):
        mask = cast("DTensor", mask).full_tensor()
    for axis in (0, 1):
        at = axis - (4 - mask.dim())
        if at >= 0 and mask.shape[at] == held.shape[axis] != held.local.shape[axis]:
            mask = mask.narrow(at, held.first[axis], held.local.shape[axis])
    return mask


def _whole_sum(placement: Any) -> Any:
    """A placement, but whole where every process holds a term of a sum."""
    from torch.distributed.tensor import Replicate

    return Replicate() if placement.is_partial() else placement
