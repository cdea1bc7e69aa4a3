"""Jacobians of modules by their own input, for networks with or without attention: mixers, residual networks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from attemper.errors import ParameterError
from attemper.probes.block_jacobians import detached, with_leaves
from attemper.probes.branch_rows import Joined, Leaf, Log, noting_calls, rows_of
from attemper.probes.float64 import in_float64, widened
from attemper.probes.jacobian import check_limit
from attemper.probes.table import JacobianRow
from attemper.probes.tokens import first_tensor
from attemper.probes.watching import first_sample, in_eval, looking, refuse_wrapped, run_model
from attemper.tempering.functions import kind_of
from attemper.tempering.subclassing import Action


def module_jacobians(
    model: nn.Module, batch: Any, modules: Sequence[str], *, limit: int | None = None, log: Log = lambda line: None
) -> tuple[JacobianRow, ...]:
    """The Jacobians of named modules by their own input, in eval mode, at the first sample of a batch.

    A module that adds its input to something, as a residual block does, has the rows "block" (what is added) and
    "block + skip" (the sum); with several such sums, "branch 1", "branch 1 + skip", "branch 2" … A module that adds
    nothing is taken for a branch as it is: "block" is the module, and "block + skip" is its input added to it.
    The number of a row's block is the place in `modules`.

    modules: names in the model. limit, log: as in `attemper.diagnose`.

    >>> mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    >>> [row.place for row in module_jacobians(nn.Sequential(mlp), torch.randn(2, 3, 4), ["0"])]
    ['block', 'block + skip']
    """
    refuse_wrapped(model)
    named = dict(model.named_modules())
    for name in modules:
        if name not in named:
            raise ParameterError(f"{type(model).__name__} has no module '{name}'")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    limit = check_limit(limit, device)
    sample = widened(first_sample(batch))
    rows: list[JacobianRow] = []
    for number, name in enumerate(modules):  # a pass for each: one module may lie in another
        watch = ModuleWatch(number, name, limit, log)
        with in_eval(model), torch.no_grad(), looking([(named[name], watch)]), in_float64(device):
            run_model(model, sample)
        rows += watch.rows
    return tuple(rows)


@dataclass
class ModuleWatch(Action):
    """Looks at the Jacobians of one module."""

    number: int
    name: str
    limit: int
    log: Log
    rows: list[JacobianRow] = field(default_factory=list, init=False)

    def acts(self, training: bool) -> bool:
        return True

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        with torch.enable_grad():
            leaves, args, kwargs = with_leaves(args, kwargs)
            if not leaves:
                raise ParameterError(f"'{self.name}' is called without a tensor to differentiate by")
            with noting_calls(module) as calls, Sums(leaves[0]) as sums:
                out = forward(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                joined = sums.joined or [_whole(first_tensor(out), leaves[0])]
                for each in _numbered(joined):
                    self.rows += rows_of(each, leaves[0], calls, self.number, self.name, self.limit, self.log)
        return detached(out)


def _numbered(joined: Sequence[Joined]) -> Iterator[Joined]:
    """The sums of a module, with names."""
    for number, each in enumerate(joined, 1):
        place = "block" if len(joined) == 1 else f"branch {number}"
        yield Joined(place, each.branch, each.stream, each.out, each.edge)


def _whole(out: Tensor, leaf: Leaf) -> Joined:
    """A module as a branch: what would be if its input were added to it."""
    out = out.clone()
    stream = leaf.value.clone()
    total = out + stream if out.shape == stream.shape else out
    return Joined("block", out, stream, total, leaf.edge)


class Sums(TorchFunctionMode):
    """Sees the sums of two tensors that both come from a module's input: of a skip and of a branch.

    The skip is the one that comes from it in fewer steps: the input itself, or a shortcut that projects it.
    """

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.leaf = leaf
        self.joined: list[Joined] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        terms: Sequence[Any] = args if kind_of(func) in ("add", "add_") and not kwargs else ()
        if len(terms) != 2 or not all(isinstance(x, Tensor) and x.requires_grad for x in terms):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            edges = [get_gradient_edge(x) for x in terms]
            steps = [steps_from(self.leaf.edge.node, edge) for edge in edges]
            copies = [x.clone() for x in terms]
        out = func(*args)
        if terms[0].shape == terms[1].shape and None not in steps and steps[0] != steps[1]:
            skip, branch = (0, 1) if (steps[0] or 0) < (steps[1] or 0) else (1, 0)
            with torch._C.DisableTorchFunction():
                self.joined.append(Joined("", copies[branch], copies[skip], out.clone(), edges[skip]))
        return out


def steps_from(start: Node, edge: GradientEdge) -> int | None:
    """The least number of operations between a leaf and what was computed from it; None: it was not."""
    steps, seen, front = 0, {edge.node}, [edge.node]
    while front:
        if start in front:
            return steps
        following = {node for each in front for node, _ in each.next_functions if node is not None} - seen
        steps, seen, front = steps + 1, seen | following, list(following)
    return None
