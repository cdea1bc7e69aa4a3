"""Jacobians of the blocks of a model: of attention, of the feed-forward network, each without and with its skip."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from attemper.probes.branch_rows import Joined, Leaf, Log, noting_calls, rows_of, unknown
from attemper.probes.float64 import in_float64, widened
from attemper.probes.jacobian import check_limit
from attemper.probes.table import JacobianRow
from attemper.probes.tokens import BlockWatch, block_watches, place_of
from attemper.probes.watching import first_sample, looking, run_model
from attemper.sites import Sites
from attemper.tempering.residual import Residuals, Sum, tensors

BRANCHES = ("attention", "mlp", "block")
"""What may be added to the stream; a "block" is attention and feed-forward network in one sum."""


@dataclass
class JacobianWatch(BlockWatch):
    """Looks at the Jacobians of one block's branches. Of several of a kind, the last one counts."""

    limit: int = 0
    log: Log = print
    rows: list[JacobianRow] = field(default_factory=list, init=False)
    joined: list[Joined] = field(default_factory=list, init=False)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        with torch.enable_grad():
            leaves, args, kwargs = with_leaves(args, kwargs)
            if self.layout == "sequence_first" and leaves and _is_one_token_of_many(leaves[0].value):
                raise TokensCutError
            self.joined = []
            with (
                noting_calls(module) as calls,
                Residuals(module, tensors(args, kwargs), self.branches, self.add) as seen,
            ):
                out = forward(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                self.look(leaves, calls, seen.problem(out))
        self.joined = []
        return detached(out)

    def add(self, added: Sum) -> Tensor:
        with torch._C.DisableTorchFunction():
            branch, stream = added.branch.clone(), added.stream.clone()
            edge = get_gradient_edge(added.stream) if added.stream.requires_grad else None
        out = added.plain()
        if edge is not None and branch.requires_grad:
            with torch._C.DisableTorchFunction():
                self.joined.append(Joined(place_of(added.ended), branch, stream, out.clone(), edge, added.parallel))
        return out

    @property
    def name_of_block(self) -> str:
        return f"'{self.site.name}'" if self.site.name else type(self.site.module).__name__

    def look(self, leaves: Sequence[Leaf], calls: Any, problem: str | None) -> None:
        block, site = self.site.index, self.site.name
        for place in BRANCHES:
            last = [each for each in self.joined if each.place == place][-1:]
            for joined in last:
                leaf = next((each for each in leaves if each.value.shape == joined.branch.shape), leaves[0])
                self.rows += rows_of(joined, leaf, calls, block, site, self.limit, self.log)
        if not self.joined:
            why = f"{self.name_of_block} {problem or 'has no input to differentiate by'}"
            self.rows.append(unknown(block, site, "block", why))


class TokensCutError(Exception):
    """The model takes tokens first, (N, B, d), and the batch was cut along them."""


def _is_one_token_of_many(x: Tensor) -> bool:
    return x.dim() == 3 and x.shape[0] == 1 and x.shape[1] > 1


def with_leaves(args: Any, kwargs: Any) -> tuple[list[Leaf], tuple[Any, ...], dict[str, Any]]:
    """The arguments, with copies of every tensor that can be differentiated by: a block may change them in place.

    Who follows the residual stream, as `skipless` does, must see where the copies come from.
    """
    leaves: list[Leaf] = []

    def replaced(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaf = value.detach()
        with torch._C.DisableTorchFunction():
            leaves.append(Leaf(leaf.requires_grad_(), get_gradient_edge(leaf)))
        return leaf.clone()

    return leaves, tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}


def detached(out: Any) -> Any:
    """A block's output without its graph, which is not needed any more."""
    if isinstance(out, Tensor):
        return out.detach()
    if type(out) in (tuple, list):
        return type(out)(detached(part) for part in out)
    return out


def block_jacobians(
    model: nn.Module, batch: Any, sites: Sites, limit: int | None = None, log: Log = lambda line: None
) -> tuple[JacobianRow, ...]:
    """The Jacobians of every block that holds attention, at the first sample of a batch.

    limit: as in `branch_jacobian`. log: called with a line before each of them.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    limit = check_limit(limit, device)
    try:
        return _looked_at(model, first_sample(batch), sites, device, limit, log)
    except TokensCutError:
        return _looked_at(model, first_sample(batch, axis=1), sites, device, limit, log)


def _looked_at(
    model: nn.Module, sample: Any, sites: Sites, device: torch.device, limit: int, log: Log
) -> tuple[JacobianRow, ...]:
    watches = block_watches(model, sites, JacobianWatch, lambda block, place, tokens: None)
    for _, watch in watches:
        assert isinstance(watch, JacobianWatch)
        watch.limit, watch.log = limit, log
    with looking(watches), in_float64(device):
        run_model(model, widened(sample))
    return tuple(row for _, watch in watches if isinstance(watch, JacobianWatch) for row in watch.rows)
