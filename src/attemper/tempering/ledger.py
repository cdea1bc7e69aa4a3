"""The ledger: what training passes add to the loss, for as long as it can still be added.

Every thread has a ledger of its own. A pass enters its terms; they live as long as the output of the pass, which holds
an `Anchor` through its node of the autograd graph. So a pass that nobody trains with leaves nothing behind, and a
backward pass through an output whose terms did not come along is noticed.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.errors import PenaltyError
from attemper.tempering.mesh import is_distributed
from attemper.tempering.outputs import map_tensors

KEPT = 2
"""How many passes whose output is gone stay readable, for a `penalty()` that comes right behind them."""


class Entry(NamedTuple):
    """One term that a forward pass added to the loss."""

    site: str
    block: int
    method: str
    component: str
    value: Tensor
    """A scalar, or (n,): numbers whose sum is meant, which a kernel has left to whoever adds up the terms."""
    sums: bool = False
    """Whether the value is a sum over samples; otherwise it is a mean."""

    @property
    def term(self) -> Tensor:
        """The value as a scalar."""
        return self.value.sum() if self.value.dim() else self.value


class Ticket:
    """What is remembered of a pass after its output and its terms are gone."""

    def __init__(self, names: tuple[str, ...], compares: bool, automatic: bool) -> None:
        self.names = names
        """The methods whose terms must come along in backward."""
        self.compares = compares
        """Whether the recipe compares passes and this one ran outside of `tempered.loss`."""
        self.automatic = automatic
        """Whether the output carries the terms by itself (auto_penalty)."""
        self.applied = False
        """Whether the gradient of the terms was asked for."""

    def apply(self, *_: Any) -> None:
        self.applied = True

    @property
    def forgotten(self) -> bool:
        """Whether a backward pass through the output of the pass left something out."""
        return self.compares or (len(self.names) > 0 and not self.applied)


NOTHING = Ticket((), False, False)


class Anchor:
    """Lives in the autograd graph of a pass's output, and sees a backward pass go through it."""

    def __init__(self, ticket: Ticket, ledger: Ledger) -> None:
        self.ticket, self.ledger = ticket, ledger

    def __call__(self, *_: Any) -> None:
        # At the end of the backward pass: one that fails on the way has trained nothing.
        torch.autograd.Variable._execution_engine.queue_callback(self.crossed)

    def crossed(self) -> None:
        if self.ticket not in self.ledger.crossed:
            self.ledger.crossed.append(self.ticket)


class Pass:
    """One training pass: its terms, and a way to ask whether its output still lives."""

    def __init__(self, opener: int = 0) -> None:
        self.opener = opener
        """Which module it began with: the whole model, or a part that was run by itself."""
        self.entries: list[Entry] = []
        self.shared = is_distributed()
        """Whether other processes take part."""
        self.ticket = Ticket((), False, False)
        self.anchor: weakref.ref[Anchor] | None = None
        """None: the output has no gradient that could hold one."""

    @property
    def lives(self) -> bool:
        return self.anchor is None or self.anchor() is not None

    def hold(self, out: Any, ledger: Ledger) -> Any:
        """The output of the pass, which now holds its anchor."""
        anchor = Anchor(self.ticket, ledger)
        made = [entry.value.grad_fn for entry in self.entries]
        last = max([node._sequence_nr() for node in made if node is not None], default=-1)

        def held(x: Tensor) -> Tensor:
            if x.grad_fn is None:
                return x
            if x.grad_fn._sequence_nr() <= last:  # a term may hold this node itself: put one behind it
                x = x.view_as(x)
            if x.grad_fn is not None:
                x.grad_fn.register_prehook(anchor)
                self.anchor = weakref.ref(anchor)
            return x

        return map_tensors(out, held)


@dataclass(eq=False)
class Chain:
    """A term that compiled code entered, and those before it: unlike a list, it grows without being read."""

    entry: Entry
    before: Chain | None

    def terms(self) -> list[Entry]:
        """All of them, the oldest first."""
        found: list[Entry] = []
        node: Chain | None = self
        while node is not None:
            found.append(node.entry)
            node = node.before
        return found[::-1]


class Ledger:
    """What one thread's passes have added and nobody has taken yet, and what those passes know while they run."""

    def __init__(self) -> None:
        self.open: Pass | None = None
        """The pass that runs now."""
        self.passes: list[Pass] = []
        self.crossed: list[Ticket] = []
        """Passes through whose output a backward pass went."""
        self.scope: list[Pass] | None = None
        """While `tempered.loss` runs: the passes that it ran."""
        self.lost = 0
        """How many passes lost their terms with their output since terms were taken last."""
        self.chain: Chain | None = None
        """The terms of the last pass that was compiled as a whole: its graph is one with that of its output."""
        self.old: Chain | None = None
        self.older: Chain | None = None
        """Those of the two passes before it."""
        self.aside: Chain | None = None
        """The same from before `tempered.loss` began."""
        self.uncompared = False
        """Whether a compiled pass ran outside of `tempered.loss` though the recipe compares passes."""
        self.forgot = False
        """Whether a backward pass went through the output of a compiled pass whose terms nobody had taken."""
        self.pending = NOTHING
        self.taken: tuple[list[Entry], list[int], Tensor] | None = None
        """The terms that were taken last, without their own values; how many numbers each has; all, with no graph."""
        self.sentinel = self.guard(torch.device("cpu"))
        """A leaf that gets a gradient when backward goes through the output of a compiled pass."""
        self.draws: Any = None
        """What the sites of the pass that runs now draw from (`draws.Draws`)."""
        self.last_seed: Tensor | None = None
        """The seed of the last pass."""
        self.last_notes: dict[tuple[int, int], Any] = {}
        """What the sites drew for in the last pass that was not compiled as a whole (`draws.Note`)."""
        self.held: dict[torch.device, Tensor] = {}
        """GPU → the seed of the last pass, always in the same place: CUDA graphs of compiled parts read it there."""
        self.muted = False
        """While True, penalties do not count: in all but the first pass of a comparison."""
        self.origins: Any = None
        """Where the axes of tensors come from, while a pass is watched."""
        self.padding: dict[int, Tensor] = {}
        """Block → boolean (B, N), True for real tokens, as its attention saw them last."""
        self.networks: dict[int, Any] = {}
        """Actions → what is known of the feed-forward network with convolutions that runs now."""
        self.entry_padding: Tensor | None = None
        """The same before the first block, as far as the arguments of the block tell."""
        self.embedded: list[tuple[str, Tensor, Tensor]] | None = None
        """While passes are compared: the name, the image and the tokens of every patch embedding in the first."""

    def hold(self, seed: Tensor) -> None:
        """Write down the seed of a pass for CUDA graphs of parts of the model."""
        if not seed.is_cuda:
            return
        if seed.device in self.held:
            self.held[seed.device].copy_(seed)
        elif not torch.cuda.is_current_stream_capturing():  # a graph's memory is not ours to keep
            self.held[seed.device] = seed.clone()

    # ------------------------------------------------------------------------------------------------- eager passes
    def begin(self, opener: int) -> Pass:
        """Open a pass; raise where the one before was trained with and its terms were left out."""
        forgotten = [ticket for ticket in (*self.crossed, self.pending) if ticket.forgotten]
        self.crossed.clear()
        if forgotten:
            self.forget()
            raise PenaltyError(why_forgotten(forgotten[-1]))
        gone = [each for each in self.passes if each.opener == opener and (each.anchor is None or not each.lives)]
        old = gone[: max(len(gone) - KEPT + 1, 0)]
        self.passes = [each for each in self.passes if each not in old]
        self.lost += len(old)
        self.open = Pass(opener)
        return self.open

    def end(self, closed: Pass, out: Any) -> Any:
        """Close a pass: its terms live as long as its output from now on."""
        out = closed.hold(out, self)
        if self.scope is not None:
            self.scope.append(closed)
        elif closed.entries:
            self.passes.append(closed)
        return out

    def forget(self) -> None:
        """Drop everything that was not taken."""
        self.passes.clear()
        self.chain = self.old = self.older = self.aside = None
        self.forgot, self.pending = False, NOTHING
        self.lost = 0
        self.uncompared = False

    def remember(self, entries: list[Entry], values: Tensor) -> None:
        """Keep the terms that somebody takes now. values: theirs, one behind the other."""
        values = values.detach()
        said = [Entry(e.site, e.block, e.method, e.component, values, e.sums) for e in entries]
        self.taken = said, [entry.value.numel() for entry in entries], values

    @property
    def last(self) -> list[Entry]:
        """The terms that were taken last, without their graphs."""
        if self.taken is None:
            return []
        entries, counts, values = self.taken
        return [e._replace(value=part.sum()) for e, part in zip(entries, values.split(counts), strict=True)]

    def living(self) -> list[Pass]:
        """The passes whose output lives; where there is none, those whose output was dropped last."""
        return [each for each in self.passes if each.lives] or self.passes

    def untaken(self) -> list[Entry]:
        """The terms that `take` would take."""
        return self.chained() + [entry for each in self.living() for entry in each.entries]

    def chained(self) -> list[Entry]:
        """Those of compiled passes, the oldest first."""
        return [entry for chain in (self.older, self.old, self.chain) if chain is not None for entry in chain.terms()]

    def leaves_out(self) -> int:
        """How many passes `take` would leave out that somebody may have wanted, since no newer one lives."""
        gone = len(self.passes) - len(self.living())
        newer = len(self.passes) > 0 and self.passes[-1].lives
        return 0 if newer or self.chain is not None else gone + self.lost

    def take(self) -> tuple[list[Entry], list[Ticket]]:
        """The terms of all passes that live, and the tickets of those passes."""
        entries, tickets = self.untaken(), [each.ticket for each in self.living()]
        self.forget()
        return entries, tickets

    def open_scope(self) -> list[Pass] | None:
        """Let the passes from now on be those of one loss; gives the scope before."""
        before, self.scope = self.scope, []
        self.aside, self.chain = self.chain, None
        self.old = self.older = None
        return before

    def take_own(self) -> tuple[list[Entry], list[Ticket]]:
        """The same for the passes of the scope; where none of them added anything, for all that live."""
        own = [each for each in self.scope or [] if each.entries]
        if len(own) == 0 and self.chain is None:
            self.chain = self.aside
            return self.take()
        entries = self.chained() + [entry for each in own for entry in each.entries]
        self.passes = [each for each in self.passes if each.lives]
        self.chain = self.old = self.older = None
        self.lost = 0
        return entries, [each.ticket for each in own]

    # ---------------------------------------------------------------------------------------------- compiled passes
    def begin_compiled(self) -> None:
        """The same for a pass that is compiled as a whole."""
        self.check_compiled()
        # Not counted, and not read: compiled code would be compiled anew for every number.
        self.older, self.old, self.chain = self.old, self.chain, None

    def check_compiled(self) -> None:
        """Raise where a compiled pass was trained with and its terms were left out."""
        if self.forgot:
            raise PenaltyError(why_forgotten(self.pending))

    def end_compiled(self, out: Any, compares: bool) -> Any:
        """The output of a compiled pass, seen by the sentinel when backward goes through it."""
        if self.scope is not None:
            return out
        self.uncompared = compares
        return map_tensors(out, lambda x: Watch.apply(x, self.sentinel) if x.requires_grad else x)

    def guard(self, device: torch.device) -> Tensor:
        """A sentinel for compiled passes on a device."""
        sentinel = torch.zeros((), device=device, requires_grad=True)
        ledger = weakref.ref(self)

        def crossed(leaf: Tensor) -> None:
            leaf.grad = None
            own = ledger()
            if own is not None and (own.uncompared or own.chained()):
                names = {entry.method for entry in own.chained()}
                own.forgot, own.pending = True, Ticket(tuple(sorted(names)), own.uncompared, False)

        sentinel.register_post_accumulate_grad_hook(crossed)
        return sentinel

    def watch_on(self, device: torch.device) -> None:
        """Keep the sentinel where the model is."""
        if self.sentinel.device != device:
            self.sentinel = self.guard(device)


class Watch(torch.autograd.Function):
    """The first argument as it is; backward reaches the second, too, with nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sentinel: Tensor) -> Tensor:
        ctx.save_for_backward(sentinel)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (sentinel,) = ctx.saved_tensors
        return grad, torch.zeros_like(sentinel)


class Ledgers(threading.local):
    """The ledger of the thread that asks."""

    def __init__(self) -> None:
        self.own = Ledger()


def why_forgotten(ticket: Ticket) -> str:
    """What went wrong in a training step that left something out, and how to do it right."""
    if ticket.compares:
        return (
            "the last training step went backward through an output of the tempered model without comparing "
            "passes: a recipe with consistency or rdrop acts in loss = tempered.loss(lambda: model(x), lambda out: "
            "criterion(out, y)). Passes that are not for training belong into torch.no_grad() or tempered.disabled()."
        )
    what = f"the penalties of {' and '.join(ticket.names)}"
    if ticket.automatic:
        return (
            f"the last training step went backward through an output of the tempered model, and {what} did not come "
            "along: auto_penalty found no part of the output that the loss was computed from. Use "
            "loss = tempered.loss(lambda: model(x), lambda out: criterion(out, y)) instead."
        )
    return (
        f"the last training step went backward through an output of the tempered model without {what}. Use "
        "loss = tempered.loss(lambda: model(x), lambda out: criterion(out, y)), or add tempered.penalty() to the loss; "
        "for a loop that cannot be changed, attemper.apply(model, recipe, auto_penalty=True). Passes that are not for "
        "training belong into torch.no_grad() or tempered.disabled()."
    )
