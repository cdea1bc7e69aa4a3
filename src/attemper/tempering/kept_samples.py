"""Leaving dropped samples out of a residual branch: its layers run on the others, and zeros stand for what is left out.

What is drawn does not change: which samples a branch keeps is drawn on the host, ahead of the sum that will draw the
same once more. Whether a block can do without the others is tried out, once: it runs as it is and on some of the
samples, and these must come out alike. So whatever lets samples see each other gets all of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree

from attemper.methods.kinds import BranchMap
from attemper.ops.regions import inside_backward
from attemper.ops.stream import Source
from attemper.tempering.branches import Branch
from attemper.tempering.draws import Draws, calls_so_far, current, is_mapped, take_back
from attemper.tempering.mesh import is_sharded
from attemper.tempering.penalties import Control
from attemper.tempering.standing import offsets
from attemper.tempering.subclassing import Action

if TYPE_CHECKING:
    from attemper.tempering.skips import SkipAction

CLOSE = {torch.float32: 1e-3, torch.float64: 1e-9}
"""How far apart, of the largest number, what is computed in batches of two sizes may be."""


PASSES = 64
"""How many passes may wait for their backward while it is found out whether samples can be left out."""


class Unexpected(Exception):  # noqa: N818
    """A block added its branches in another order than before."""


@dataclass
class Turn:
    """One run of a block. kept: branch → the samples that it keeps; None: all of them. sums: how many there were."""

    samples: int
    kept: dict[str, Tensor | None]
    calls: tuple[int, ...] = ()
    sums: int = 0
    paused: bool = False
    used: bool = False
    """Whether anything has been left out."""


class _Running(threading.local):
    def __init__(self) -> None:
        self.turns: dict[int, Turn] = {}


RUNNING = _Running()
"""The turns of the blocks that run now in this thread."""


@dataclass(eq=False)
class Saver:
    """Decides for one block which branches run on which samples.

    orders: the branches that end in each sum, in their order, from a pass that was checked.
    works: whether it leaves the block as it is; None: that was not tried out yet.
    """

    control: Control
    orders: tuple[tuple[str, ...], ...] = ()
    works: bool | None = None
    plain: deque[int] = field(default_factory=lambda: deque(maxlen=PASSES))
    """The seeds of the last passes before that was known: what is computed again of these saves nothing either."""

    def turn_of(self) -> Turn | None:
        """The run of the block that is under way in this thread."""
        return RUNNING.turns.get(id(self))

    @contextlib.contextmanager
    def running(self, turn: Turn) -> Iterator[None]:
        """Context manager: inside it, the modules of the branches leave samples out."""
        before = RUNNING.turns.get(id(self))
        RUNNING.turns[id(self)] = turn
        try:
            yield
        finally:
            RUNNING.turns.pop(id(self))
            if before is not None:
                RUNNING.turns[id(self)] = before

    def draws(self, x: Tensor) -> Draws | None:
        """The pass that runs, if samples can be left out in it."""
        control = self.control
        if (
            self.works is False
            or control.trial
            or control.looking
            or is_mapped()
            or type(x) is not Tensor
            or x.dim() < 3
        ):
            return None
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        draws = current(control)
        return None if draws is None or draws.position.has("tensor", "context") else draws

    def plan(self, method: BranchMap, site: int, x: Tensor) -> Turn | None:
        """What a run of the block leaves out; None: nothing. x: its first input, (B, …)."""
        draws = self.draws(x)
        if draws is None or self.ran_plain(draws):
            return None
        first = draws.calls.get(site, 0)
        at = offsets(self.control, draws.position, x.shape[0], None, counted=len(draws.calls) > 0)
        kept: dict[str, Tensor | None] = {}
        for number, branches in enumerate(self.orders):
            stream = Source(on_host(draws), site, first + number, at).stream()
            rows = samples_of(method.kept_samples(x.shape[0], stream), x.device)
            kept |= dict.fromkeys(branches, rows)
        if all(rows is None for rows in kept.values()):
            return None
        return Turn(x.shape[0], kept, tuple(range(first, first + len(self.orders))))

    def ran_plain(self, draws: Draws) -> bool:
        """Whether a pass computes all samples, as all do until it is known that none need; takes these down."""
        seed = int(on_host(draws))
        if self.works is None and seed not in self.plain:
            self.plain.append(seed)
        return self.works is None or seed in self.plain

    def check(self, added: Sequence[Branch], call: int) -> None:
        """See that the branches of a sum are those for which its samples were drawn."""
        turn = self.turn_of()
        if turn is None:
            return
        number, turn.sums = turn.sums, turn.sums + 1
        expected = number < len(self.orders) and self.orders[number] == tuple(branch.name for branch in added)
        if not expected or turn.calls[number] != call:
            raise Unexpected

    def learn(self, sums: Sequence[Sequence[Branch]], overwrites: bool, block: nn.Module) -> None:
        """Take down the order of the sums, in a pass that was checked."""
        self.orders = tuple(tuple(branch.name for branch in ended) for ended in sums)
        if overwrites or any(isinstance(module, _BatchNorm) for module in block.modules()):
            self.works = False
        draws = current(self.control)
        if draws is not None:
            self.ran_plain(draws)

    def try_out(self, block: nn.Module, forward: Any, args: Any, kwargs: Any, x: Tensor) -> None:
        """Find out whether samples can be left out, in a pass of which nothing is computed again now."""
        draws = self.draws(x)
        if self.works is not None or draws is None or inside_backward() or x.shape[0] < 2:
            return
        if int(on_host(draws)) in self.plain:  # the pass in which the sums were taken down, watched by others, too
            return
        self.ran_plain(draws)
        if not is_plain((args, kwargs)):  # such as a cache of keys, which every run fills
            self.works = False
            return
        kept = torch.tensor([b for b in range(x.shape[0]) if b % 3 != 0], device=x.device)
        calls = calls_so_far(self.control)
        devices = [x.device] if x.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices), without_dropout(block):
            wanted = first_of(forward(*args, **kwargs))
            take_back(self.control, calls)
            turn = Turn(x.shape[0], {name: kept for names in self.orders for name in names})
            try:
                with self.running(turn):
                    found = first_of(forward(*args, **kwargs))
                self.works = turn.used and alike(wanted, found, kept)
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
                self.works = False  # a batch of this size does not pass through
        take_back(self.control, calls)


@dataclass(eq=False)
class KeptSamples(Action):
    """Runs a module of a branch on the samples that the branch keeps.

    taken: the tensors among the arguments that have samples, from when it was tried out.
    """

    control: Control
    saver: Saver
    branch: str
    taken: tuple[int, ...] = ()

    def acts(self, training: bool) -> bool:
        return not torch.compiler.is_compiling() and self.control.on(training) and self.saver.turn_of() is not None

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        turn = self.saver.turn_of()
        kept = None if turn is None or turn.paused else turn.kept.get(self.branch)
        if turn is None or kept is None:
            return forward(*args, **kwargs)
        leaves, tree = _pytree.tree_flatten((args, kwargs))
        if self.saver.works is None:
            self.taken = with_samples(leaves, turn.samples)
        if not self.taken or not all(has_samples(leaves, place, turn.samples) for place in self.taken):
            return forward(*args, **kwargs)
        chosen: dict[int, Tensor] = {}  # the same tensor as query and key must stay the same
        for place in self.taken:
            x = leaves[place]
            if id(x) not in chosen:
                chosen[id(x)] = x.index_select(0, rows_of(kept, x.shape[0] // turn.samples))
        rows = leaves[self.taken[0]].shape[0]
        some = rows_of(kept, rows // turn.samples)
        leaves = [chosen[id(x)] if place in self.taken else x for place, x in enumerate(leaves)]
        args, kwargs = _pytree.tree_unflatten(leaves, tree)
        turn.paused, turn.used = True, True
        try:
            out = forward(*args, **kwargs)
        finally:
            turn.paused = False
        return _pytree.tree_map(lambda x: spread(x, some, rows), out)


def saving_actions(
    action: SkipAction, block: nn.Module, tempered: Collection[nn.Module]
) -> list[tuple[nn.Module, Action]]:
    """What leaves dropped samples out of the branches of a block, to stand closest to its modules.

    A branch runs on some samples as a whole where no method acts inside of it: those that do must see all samples, and
    then each of its linear layers runs on some by itself. tempered: the modules on which methods act.
    """
    if not isinstance(action.method, BranchMap) or not action.method.leaves_out:
        return []
    saver = Saver(action.control)
    found: list[tuple[nn.Module, Action]] = []
    for branch in action.branches:
        name = home_of(branch)
        home = block.get_submodule(name) if name else None
        if home is not None and not any(module in tempered for module in home.modules()):
            parts = [home]
        else:
            parts = [layer for layer in map(block.get_submodule, branch.layers) if type(layer) is nn.Linear]
        for part in parts:
            if "forward" not in part.__dict__:  # which would hide what is put on its class
                found.append((part, KeptSamples(action.control, saver, branch.name)))
    action.saver = saver if found else None
    return found


def home_of(branch: Branch) -> str:
    """The module that computes a branch: the attention, or what holds all of its layers; "": only the block does."""
    if branch.is_attention:
        return branch.home
    names = [name.split(".") for name in branch.layers]
    common: list[str] = []
    for parts in zip(*names, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


# ------------------------------------------------------------------------------------------------------------- samples
def on_host(draws: Draws) -> Tensor:
    """The seed of a pass on the CPU: one wait for the device in a pass."""
    if draws.host_seed is None:
        draws.host_seed = draws.seed.cpu()
    return draws.host_seed


def samples_of(kept: Tensor, device: torch.device) -> Tensor | None:
    """The numbers of the kept samples; None: all are. Where none is, the first: its layers then have zero gradients."""
    numbers = kept.nonzero().squeeze(1)
    if len(numbers) == len(kept):
        return None
    return (numbers if len(numbers) > 0 else numbers.new_zeros(1)).to(device, non_blocking=True)


def rows_of(samples: Tensor, each: int) -> Tensor:
    """The rows of samples that have so many rows each, one behind the other, such as windows."""
    if each == 1:
        return samples
    return (samples[:, None] * each + torch.arange(each, device=samples.device)).flatten()


def with_samples(leaves: Sequence[Any], samples: int) -> tuple[int, ...]:
    """The places of the tensors that seem to have samples: the first of all, and those with as many rows."""
    first = next((x for x in leaves if isinstance(x, Tensor)), None)
    if first is None or first.dim() < 2 or first.shape[0] == 0 or first.shape[0] % samples:
        return ()
    if not all(x is None or isinstance(x, Tensor | bool | int | float | str | torch.dtype) for x in leaves):
        return ()
    rows = first.shape[0]  # where these are windows, a tensor with as many rows as samples may be one for each place
    return tuple(
        place
        for place, x in enumerate(leaves)
        if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.dim() > 0 and x.shape[0] == rows
    )


def has_samples(leaves: Sequence[Any], place: int, samples: int) -> bool:
    """Whether there is a tensor at a place whose rows can be told apart by samples."""
    x = leaves[place] if place < len(leaves) else None
    return isinstance(x, Tensor) and not is_sharded(x) and x.dim() > 0 and x.shape[0] % samples == 0 and len(x) > 0


def is_plain(x: Any) -> bool:
    """Whether arguments are tensors and what cannot change, and nothing that a run of a module may change."""
    if type(x) in (tuple, list, dict):
        return all(is_plain(each) for each in (x.values() if isinstance(x, dict) else x))
    return x is None or isinstance(x, Tensor | bool | int | float | str | torch.dtype | torch.device)


def spread(x: Any, kept: Tensor, rows: int) -> Any:
    """A tensor of the kept rows with zeros for the others."""
    if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] != len(kept):
        return x
    return x.new_zeros(rows, *x.shape[1:]).index_copy(0, kept, x)


def alike(wanted: Tensor | None, found: Tensor | None, samples: Tensor) -> bool:
    """Whether two outputs of a block agree in some samples, but for rounding."""
    if wanted is None or found is None or wanted.shape != found.shape or not wanted.is_floating_point():
        return False
    a, b = wanted[samples].double(), found[samples].double()
    return bool((a - b).abs().max() <= CLOSE.get(wanted.dtype, 0.05) * a.abs().max())


def first_of(out: Any) -> Tensor | None:
    """The first tensor of what a module gave."""
    return next((x for x in _pytree.tree_leaves(out) if isinstance(x, Tensor)), None)


@contextlib.contextmanager
def without_dropout(block: nn.Module) -> Iterator[None]:
    """Context manager: inside it, the dropout layers of a block do nothing, so that two runs can be compared."""
    found = [m for m in block.modules() if "drop" in type(m).__name__.lower() and m.training and not any(m.children())]
    for module in found:
        module.training = False
    try:
        yield
    finally:
        for module in found:
            module.training = True
