"""Where a call of a method stands in the one that a single process would make for the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

from torch import Tensor

from attemper.errors import MeshError
from attemper.ops.stream import Offsets
from attemper.tempering.mesh import Position, is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from attemper.tempering.attention import AttentionAction
    from attemper.tempering.shards import Held


class Samples(NamedTuple):
    """Which samples of the whole batch this process has, as somebody told: `many` of them from `first` on."""

    first: int
    many: int

    def row(self, rows: int) -> int:
        """The number of the first of so many rows: samples, or windows of them."""
        return self.first * (rows // self.many) if rows % self.many == 0 else self.first * rows


# ------------------------------------------------------------------------------------------------------- attention
class AttentionShape(NamedTuple):
    """Of one attention call: its heads, queries and keys, and the width of a head; 0: it is not known.

    causal: whether query i sees keys 0 … i, counted in the call.
    """

    heads: int
    queries: int
    keys: int
    width: int = 0
    causal: bool = False


def attention_offsets(
    position: Position, action: AttentionAction, shape: AttentionShape, held: Held | None = None
) -> Offsets:
    """Where the samples, heads and queries of an attention call stand among all of them.

    held: the part of the queries that the call has, where it is one of DTensors.
    """
    at = _heads_and_queries(position, action, shape if held is None else shape._replace(heads=held.shape[1]))
    if held is not None:
        at = at._replace(sample=held.first[0], head=at.head + held.first[1], heads=at.heads or held.shape[1])
    if action.learnt and at.heads > shape.heads:
        raise MeshError(
            f"{' and '.join(action.learnt)} learns a rate in {action.place.where}, of whose {at.heads} heads each "
            "process has a part: the gradient of the rate would be that of a part. Use a constant rate."
        )
    return at


def _heads_and_queries(position: Position, action: AttentionAction, shape: AttentionShape) -> Offsets:
    if not position.has("tensor", "context"):
        return Offsets()
    tensor, context = position.along("tensor"), position.along("context")
    heads, queries, keys, width, causal = shape
    gathered = context.size > 1 and keys == context.size * queries
    exchanged = context.size > 1 and not gathered  # heads for tokens, as Ulysses does
    if gathered and causal:
        raise MeshError(
            f"{action.place.where} computes causal attention (is_causal=True) of some queries and of all keys, which "
            "counts the queries from the first of them; give it the mask of its queries as attn_mask"
        )
    whole = _all_heads(action, shape)
    parts, part = (context.size, context.rank) if exchanged else (1, 0)
    query = context.rank * queries if gathered else 0
    if heads * parts == whole:
        return Offsets(head=part * heads, query=query, heads=whole)
    if heads * parts * tensor.size == whole:
        return Offsets(head=(tensor.rank * parts + part) * heads, query=query, heads=whole)
    first = None if exchanged else _first_row(action)
    if first is not None and width and first % width == 0 and first // width + heads <= whole:
        return Offsets(head=first // width, query=query, heads=whole)
    if exchanged:
        refuse_context(action, context.size, shape)
    raise MeshError(
        f"{action.place.where} computes attention with {heads} heads here, and it has {whole} in all: which of them "
        f"these are cannot be told, with {tensor.size} processes along the tensor dimension of the mesh"
    )


def refuse_context(action: AttentionAction, size: int, shape: AttentionShape) -> NoReturn:
    """Raise for attention between the tokens that one process holds."""
    raise MeshError(
        f"{action.place.where} computes attention of {shape.queries} queries and {shape.keys} keys in all its heads, "
        f"with {size} processes along the context dimension of the mesh: this is neither all keys ({size} times the "
        "queries) nor a part of the heads, so which tokens meet here is not known. Ring attention and the like call "
        "attemper.attention(…, seed=…, at=attemper.Offsets(sample, head, query, key)) themselves."
    )


def _all_heads(action: AttentionAction, shape: AttentionShape) -> int:
    """How many heads an attention has, over all processes."""
    by_name, by_weight = action.heads, 0
    if action.projections is not None and shape.width:
        part = action.projections.q
        weight = part.parameter
        rows = weight.shape[1 if part.transposed else 0] if part.rows is None else part.rows[1] - part.rows[0]
        by_weight = rows // shape.width if rows % shape.width == 0 else 0
    if by_name and by_weight and by_name != by_weight:
        raise MeshError(
            f"{action.place.where} has {by_name} heads by its attributes and {by_weight} by the weight of its queries, "
            "so which part of them a process holds cannot be told; apply before the model is made parallel"
        )
    if not (by_name or by_weight):
        raise MeshError(
            f"how many heads {action.place.where} has is not known, nor which of them a process holds; leave it out "
            "with targets="
        )
    return by_name or by_weight


def _first_row(action: AttentionAction) -> int | None:
    """The first row of the queries' weight that this process holds; None: they are not simply split."""
    part = None if action.projections is None else action.projections.q
    if part is None or part.rows is not None or part.transposed or not is_sharded(part.parameter):
        return None
    return first_entries(part.parameter)[0]


def first_entries(x: Tensor) -> tuple[int, ...]:
    """Along each axis of a DTensor, the number of the first entry that this process holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    given = cast("DTensor", x)
    return tuple(compute_local_shape_and_global_offset(given.shape, given.device_mesh, given.placements)[1])
