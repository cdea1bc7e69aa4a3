"""Jacobians of branches while a model runs: each without and with its skip, as a function of its own input.

The input of a branch is the stream that it is added to: the block's input for attention, the stream behind attention
for the feed-forward network. A branch that is computed beside another one, and not behind it, has the block's input.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from attemper.probes.jacobian import Differentiable, JacobianReport, from_matrix, matrix, report
from attemper.probes.nulls import NullDirections, null_directions
from attemper.probes.table import JacobianRow

Log = Callable[[str], None]


@dataclass(frozen=True)
class Joined:
    """A branch that was added to the stream."""

    place: str
    branch: Tensor
    stream: Tensor
    out: Tensor
    """What the model has after it: their sum, unless the skip was removed."""
    edge: GradientEdge
    """Where the stream stands in the graph."""
    beside: bool = False
    """Whether the branch was computed from the block's input, although another one was added before."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module with a tensor that came out in its own shape, as of a norm."""

    module: nn.Module
    given: Tensor
    out: Tensor
    edge: GradientEdge


@contextlib.contextmanager
def noting_calls(block: nn.Module) -> Iterator[list[ModuleCall]]:
    """Context manager: what the modules inside of a block are called with, where a norm could be among them."""
    calls: list[ModuleCall] = []

    def note(module: nn.Module, args: Any, out: Any) -> None:
        if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(out, Tensor) or not out.requires_grad:
            return
        if out.shape == args[0].shape and out is not args[0]:
            with torch._C.DisableTorchFunction():
                calls.append(ModuleCall(module, args[0].detach().clone(), out.clone(), get_gradient_edge(out)))

    hooks = [part.register_forward_hook(note) for part in block.modules() if part is not block]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Leaf:
    """The input of a block, from which its graph begins."""

    value: Tensor
    edge: GradientEdge


def rows_of(
    joined: Joined, leaf: Leaf, calls: Sequence[ModuleCall], block: int, site: str, limit: int, log: Log
) -> Iterator[JacobianRow]:
    """Two rows: of the branch, and of the stream behind it."""
    places = joined.place, f"{joined.place} + skip"
    try:
        source = _source(joined, leaf)
        if source is None:
            yield from (unknown(block, site, place, "it is not computed from what it is added to") for place in places)
            return
        log(f"block {block}, {joined.place}: the Jacobian of {source.coordinates:,} coordinates")
        for place, found in zip(places, _reports(joined, source, calls, limit), strict=True):
            yield known(block, site, place, found)
    except (RuntimeError, NotImplementedError) as error:  # changed in place, or an operator without a second derivative
        yield from (unknown(block, site, place, _why(error)) for place in places)


def _why(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "what its gradient needs is changed in place" if "inplace operation" in first else first


def known(block: int, site: str, place: str, found: JacobianReport) -> JacobianRow:
    """A row of what was computed."""
    return JacobianRow(
        block, site, place, found.condition, found.largest, found.smallest,
        found.left_out, found.coordinates, found.whole, found.reason,
    )  # fmt: skip


def unknown(block: int, site: str, place: str, reason: str) -> JacobianRow:
    """A row that says why there is nothing in it."""
    return JacobianRow(block, site, place, None, None, None, 0, 0, False, f"not known: {reason}")


@dataclass(frozen=True)
class Source(Differentiable):
    """The branch as a function of its own input."""

    value: Tensor = field(kw_only=True)


def _source(joined: Joined, leaf: Leaf) -> Source | None:
    """The stream that the branch is computed from; None where it is not."""
    behind = Source(joined.branch, joined.edge, joined.stream.shape, value=joined.stream.detach())
    first = Source(joined.branch, leaf.edge, leaf.value.shape, value=leaf.value.detach())
    probe = torch.randn_like(joined.branch)
    for each in (first,) if joined.beside else (behind, first):
        if each.pulled_back(probe) is not None:
            return each
    return None


def _reports(joined: Joined, source: Source, calls: Sequence[ModuleCall], limit: int) -> tuple[JacobianReport, ...]:
    total = Differentiable(joined.out, source.source, source.shape)
    adds_input = _adds_input(joined, source)
    alone = torch.equal(joined.out, joined.branch)
    if source.larger_side > limit:
        branch = report(source, null=None, limit=limit)
        return branch, branch if alone else report(total, null=None, limit=limit)
    null = _lost(source, calls)
    jacobian = matrix(source)
    branch = from_matrix(jacobian, source.shape, null)
    if alone:  # the skip was removed
        return branch, branch
    if adds_input:
        jacobian.diagonal().add_(1.0)
        return branch, from_matrix(jacobian, source.shape, None)
    return branch, report(total, null=None, limit=limit)


def _adds_input(joined: Joined, source: Source) -> bool:
    """Whether the stream behind the branch is the branch's input plus the branch, and nothing else."""
    stream = Differentiable(joined.stream, source.source, source.shape)
    probe = torch.randn_like(joined.stream)
    back = stream.pulled_back(probe)
    unchanged = back is not None and back.shape == probe.shape and torch.equal(back, probe)
    return unchanged and torch.equal(joined.out, joined.stream + joined.branch)


def _lost(source: Source, calls: Sequence[ModuleCall]) -> NullDirections | None:
    """What the norm loses that the branch sees its input through; None where there is no such norm."""
    probe = torch.randn_like(source.out)
    whole = source.pulled_back(probe)
    for call in calls:
        if call.given.shape != source.shape or not torch.equal(call.given, source.value):
            continue
        behind = Differentiable(source.out, call.edge, call.out.shape).pulled_back(probe)
        if behind is None or whole is None:
            continue
        through = Differentiable(call.out, source.source, source.shape).pulled_back(behind)
        if through is not None and torch.allclose(through, whole, rtol=1e-9, atol=1e-12 * float(whole.abs().max())):
            null = null_directions(
                _in_float64(call.module), source.value, num_groups=getattr(call.module, "num_groups", None)
            )
            if null is not None:
                return null
    return None


def _in_float64(module: nn.Module) -> Callable[[Tensor], Tensor]:
    weights = {name: t.detach() for name, t in (*module.named_parameters(), *module.named_buffers())}
    wide = {name: t.double() if t.is_floating_point() else t for name, t in weights.items()}
    return lambda x: torch.func.functional_call(module, wide, (x,))
