"""The operators under `torch.func.vmap`: what each mapped call would give by itself.

A mask is a function of the seed and of a sample's place in its batch. Mapped calls that share a seed therefore share
their masks, in the reference too, and must not be taken for one larger batch. Calls that draw nothing may be.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attemper.kernels.attention import operators, prepare, seed_tables  # noqa: F401, they define the operators

__all__: list[str] = []

Dims = tuple[int | None, ...]
Result = tuple[Any, Any]


def _one_by_one(op: Callable[..., Any], info: Any, in_dims: Dims, *args: Any) -> Result:
    results = []
    for i in range(info.batch_size):
        results.append(op(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True))))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _fold(t: Tensor, dim: int | None, size: int, axis: int) -> Tensor:
    """`t` with the mapped dimension merged into its batch, which is `axis` of the unmapped tensor."""
    t = t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    return t.movedim(0, axis).flatten(axis, axis + 1)


def _forward(info: Any, in_dims: Dims, *args: Any) -> Result:
    op, size = torch.ops.attemper.fused_attention, info.batch_size
    q, k, v, *others = args
    if any(isinstance(x, Tensor) for x in others):
        return _one_by_one(op, info, in_dims, *args)
    out, stats, flags = op(*(_fold(t, d, size, 0) for t, d in zip((q, k, v), in_dims, strict=False)), *others)
    return (out.unflatten(0, (size, -1)), stats.unflatten(1, (size, -1)), flags.unflatten(0, (size, -1))), (0, 1, 0)


def _backward(info: Any, in_dims: Dims, *args: Any) -> Result:
    op, size = torch.ops.attemper.fused_attention_backward, info.batch_size
    given, others = args[:7], args[7:]
    if any(isinstance(x, Tensor) for x in others):
        return _one_by_one(op, info, in_dims, *args)
    axes = (0, 0, 0, 0, 0, 1, 0)  # stats have their planes first
    grads = op(*(_fold(t, d, size, axis) for t, d, axis in zip(given, in_dims, axes, strict=False)), *others)
    return tuple(grad.unflatten(0, (size, -1)) for grad in grads), (0, 0, 0)


def _drop_table(info: Any, in_dims: Dims, *args: Any) -> Result:
    return _one_by_one(torch.ops.attemper.drop_table, info, in_dims, *args)


def _seed_table(info: Any, in_dims: Dims, *args: Any) -> Result:
    return _one_by_one(torch.ops.attemper.seed_table, info, in_dims, *args)


def _row_tops(info: Any, in_dims: Dims, *args: Any) -> Result:
    return _one_by_one(torch.ops.attemper.row_tops, info, in_dims, *args)


def _row_cuts(info: Any, in_dims: Dims, *args: Any) -> Result:
    return _one_by_one(torch.ops.attemper.row_cuts, info, in_dims, *args)


torch.library.register_vmap("attemper::drop_table", _drop_table)
torch.library.register_vmap("attemper::seed_table", _seed_table)
torch.library.register_vmap("attemper::row_tops", _row_tops)
torch.library.register_vmap("attemper::row_cuts", _row_cuts)
torch.library.register_vmap("attemper::fused_attention", _forward)
torch.library.register_vmap("attemper::fused_attention_backward", _backward)
