"""What happens round the whole model: a training pass begins and ends."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.errors import UnsupportedError
from attemper.methods.base import Method
from attemper.tempering.automatic import share_of_step, watch_divisor, with_penalty
from attemper.tempering.draws import run_drawing
from attemper.tempering.ledger import Entry, Ledger, Ticket
from attemper.tempering.penalties import Control
from attemper.tempering.subclassing import Action


@dataclass
class RootAction(Action):
    """Stands at the way in and out of the whole model."""

    control: Control

    def acts(self, training: bool) -> bool:
        return self.draws(training) or self.adds(training)

    def resolve(self, methods: dict[str, Method]) -> None:
        """At rate zero nothing is drawn: the model's own dropout finds torch's generator as without us."""
        control = self.control
        control.draws = any(method.stochastic and not method.idle for method in methods.values())
        if not control.draws:
            control.ledger.last_seed, control.ledger.last_notes = None, {}

    def draws(self, training: bool) -> bool:
        """Whether sites draw from the pass that begins here."""
        return self.control.draws and self.control.on(training)

    def adds(self, training: bool) -> bool:
        """Whether something is to be done about what the pass adds to the loss, or about how far training is."""
        control = self.control
        return training and (torch.compiler.is_compiling() or control.tracks(training) or control.awaits_progress)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        inside = forward
        if self.adds(module.training):

            def inside(*args: Any, **kwargs: Any) -> Any:
                return self.pass_(module, forward, args, kwargs)

        if not self.draws(module.training):
            return inside(*args, **kwargs)
        return run_drawing(self.control, module, inside, args, kwargs)

    def pass_(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run the model, and hold on to what it adds to the loss."""
        if self.control.awaits_progress and self.control.when != "never":
            self.control.count_untold()
            if not self.control.tracks(module.training) and not torch.compiler.is_compiling():
                return forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            return run_pass(self.control, module, forward, args, kwargs)
        # Compiled activation checkpointing refuses a mode that is entered inside a checkpointed block, unless the
        # mode stack was touched before.
        with Touch():
            pass
        if not self.control.tracks(module.training):
            return forward(*args, **kwargs)
        return run_compiled_pass(self.control, module, forward, args, kwargs)


@dataclass
class InnerRootAction(RootAction):
    """Stands at the model inside of a wrapper (PEFT's), which may be taken out of it later."""

    def adds(self, training: bool) -> bool:
        return False


def run_pass(control: Control, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
    """Run a module inside of the pass that is open; where none is, of one that ends with the module's output.

    A module that is run without the whole model round it (`model.forward_features`) is then a pass by itself.
    """
    ledger = control.ledger
    if torch.compiler.is_compiling():  # a part of the model that is compiled by itself
        ledger.check_compiled()
        return forward(*args, **kwargs)
    again = torch._C._current_graph_task_id() != -1  # a checkpointed block that is computed once more, in backward
    if ledger.open is not None or again:
        return forward(*args, **kwargs)
    if getattr(module, "_is_replica", False):
        raise UnsupportedError(
            "nn.DataParallel cannot train a model with penalties: each replica has a part of the batch and nobody sees "
            "them all. Use DistributedDataParallel."
        )
    current, chain = ledger.begin(id(module)), ledger.chain
    ledger.chain = None
    items = kwargs.get("num_items_in_batch") if control.auto_penalty else None
    try:
        with watch_divisor(items, control):
            out = forward(*args, **kwargs)
        if ledger.chain is not None:  # from parts that are compiled
            current.entries += ledger.chain.terms()
    except BaseException:  # out of memory, say: leave as much room as there was
        ledger.passes = [each for each in ledger.passes if each.lives]
        raise
    finally:
        ledger.open, ledger.chain = None, chain
    names = tuple(sorted({entry.method for entry in current.entries}))
    current.ticket = Ticket(names, control.compares and ledger.scope is None, control.auto_penalty)
    if control.auto_penalty and current.entries:
        penalty = total_of(current.entries, ledger)
        applied_by(penalty, [current.ticket])
        out = with_penalty(out, penalty * share_of_step(module, kwargs, control), control, module)
        current.entries = []
    return ledger.end(current, out)


def run_compiled_pass(control: Control, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
    """The same where the whole model is traced."""
    ledger = control.ledger
    ledger.begin_compiled()
    if not control.auto_penalty:
        out = forward(*args, **kwargs)
        return ledger.end_compiled(out, control.compares)
    ledger.chain = None
    out = forward(*args, **kwargs)
    if ledger.chain is None:
        return out
    penalty = total(ledger.chain.terms())[0]
    ledger.chain = None
    return with_penalty(out, penalty * share_of_step(module, kwargs, control), control, module)


def total(entries: list[Entry]) -> tuple[Tensor, Tensor]:
    """The sum of terms, which may lie on several devices; and all of their values in one tensor."""
    device = entries[-1].value.device
    values = [entry.value if entry.value.device == device else entry.value.to(device) for entry in entries]
    if not all(is_ordinary(value) for value in values):
        scalars = all(value.dim() == 0 for value in values)
        together = torch.stack(values) if scalars else torch.cat([value.reshape(-1) for value in values])
        return together.sum(), together
    penalty, together = Total.apply(*values)
    return penalty, together


def is_ordinary(value: Tensor) -> bool:
    """Whether nobody but autograd, in reverse, follows what is done to a term."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return type(value) is Tensor and torch.autograd.forward_ad._current_level < 0


class Total(torch.autograd.Function):
    """The sum of scalars and of the elements of vectors, and all of them in one tensor.

    Its gradient is the same number for all: what `torch.cat` would give is a view for each of them.
    """

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, Tensor]:
        together = torch.cat([value if value.dim() else value.view(1) for value in values])
        ctx.shapes = [value.shape for value in values]
        ctx.mark_non_differentiable(together)
        ctx.set_materialize_grads(False)
        return together.sum(), together

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.shapes)
        of_shape = {shape: grad.expand(shape) for shape in set(ctx.shapes)}
        return tuple([of_shape[shape] for shape in ctx.shapes])


def total_of(entries: list[Entry], ledger: Ledger) -> Tensor:
    """The sum of terms that are taken now, which the ledger remembers."""
    penalty, together = total(entries)
    ledger.remember(entries, together)
    return penalty


def applied_by(penalty: Tensor, tickets: list[Ticket]) -> None:
    """Let the tickets of passes know when backward goes through their penalty."""
    for ticket in tickets:
        if penalty.grad_fn is None:
            ticket.applied = True  # a constant: there is no gradient that could be forgotten
        else:
            penalty.grad_fn.register_prehook(ticket.apply)


class Touch(TorchFunctionMode):
    """Does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
