"""The first training pass is watched: what a recipe asks for must have run, and nothing that it means may run past it.

At `apply` a model is only looked at. That a layer is called at all, and that no attention is computed elsewhere, shows
when it runs. So the first training pass ends with an error where the recipe did less than it says. Later passes see
whether the modules on which it acts still stand where they stood.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from attemper.errors import ConflictError, UnmetError
from attemper.methods.base import Method
from attemper.methods.kinds import Penalty
from attemper.sites.seen import SCORES, counted
from attemper.tempering.attention import AttentionAction
from attemper.tempering.calls import CallWatch, plain_name
from attemper.tempering.penalties import Control
from attemper.tempering.subclassing import Action, is_tempered, state_of

PATIENCE = 10
"""How many passes a model that drops layers of its own has for running all of them."""

Placed = tuple[str, nn.Module, Action]


class Edge(NamedTuple):
    """A module and where it stands in another one."""

    above: nn.Module
    key: str
    module: nn.Module

    @property
    def stands(self) -> bool:
        """Whether it still stands there."""
        return self.above._modules.get(self.key) is self.module


@dataclass
class CoverageAction(Action):
    """Stands round the whole model, and checks its first training pass."""

    control: Control
    attentions: tuple[str, ...]
    """The names of the attention sites."""
    mlps: tuple[tuple[str, str], ...]
    """Of the MLPs on which methods act: their names, and those of their last layers."""
    acting: tuple[str, ...]
    """Those of them on which something acts."""
    placed: tuple[str, ...]
    """The names of all other modules on which something acts."""
    everywhere: bool
    """Whether the recipe acts on attention, and is meant for all of it."""
    mixers: tuple[str, ...] = ()
    """The methods that mix tokens, which must not be hidden from each other."""
    convolutions: frozenset[str] | None = None
    """The names of all convolutions, where the recipe is meant for every one; None: it is meant for some, or none."""
    done: bool = False
    passes: int = 0
    watched: frozenset[str] = frozenset()
    """The methods that did something when a pass was watched, or will be watched next."""
    edges: tuple[Edge, ...] = ()
    """Where the modules on which something acts stand, up to the whole model."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "edges": ()}  # those of a copy are others

    def acts(self, training: bool) -> bool:
        if torch.compiler.is_compiling():
            return False
        return training and self.control.when != "never"

    def resolve(self, methods: dict[str, Method]) -> None:
        acting = frozenset(name for name, method in methods.items() if not method.idle)
        if not acting <= self.watched:  # what did nothing at its old rate acts now
            self.done = False
        self.watched |= acting

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.done and self.edges and all(each.stands for each in self.edges):
            return forward(*args, **kwargs)
        self.check_replaced(module)
        self.edges = edges_of(module)
        if self.done or has_compiled_parts(module) or not any(True for _ in self.expected(module)):
            return forward(*args, **kwargs)
        inside = {*self.attentions, *self.control.left_alone}
        watch = CallWatch(module, inside, self.mlps, bool(self.mixers), self.convolutions)
        ledger = self.control.ledger
        ledger.origins = watch.origins
        try:
            with watch:
                out = forward(*args, **kwargs)
        finally:
            ledger.origins = None
        self.passes += 1
        self.check_replaced(module)
        self.check_calls(module, watch)
        self.check_idle(module, watch)
        if not self.control.trial and self.check_actions(module):
            self.check_convolutions(module, watch)
            # Without gradients penalties do nothing, so that such a pass tells nothing of them.
            self.done = torch.is_grad_enabled() or not any(isinstance(m, Penalty) for m in self.control.methods)
        return out

    def expected(self, module: nn.Module) -> Iterator[Placed]:
        """The actions that should do something in a training pass."""
        for name, part in module.named_modules():
            if part.training and is_tempered(part):
                for action in state_of(part).actions:
                    if hasattr(action, "place") and (action.acts(True) or action.vain is not None):
                        yield name, part, action

    def check_replaced(self, module: nn.Module) -> None:
        """Raise where modules on which something acts were replaced, by somebody or by the model itself while it ran.

        Of attention none may be missing; other modules may be taken out of the model together with what acts on them.
        """
        parts = {plain_name(name): part for name, part in module.named_modules()}
        gone = [
            name
            for name in map(plain_name, self.acting)
            if name not in parts or not any(map(_acts_on_attention, parts[name].modules()))
        ]
        others = [name for name in map(plain_name, self.placed) if name and name in parts]
        gone += [name for name in others if not any(map(is_tempered, parts[name].modules()))]
        if gone:
            now = ", ".join(f"'{name}' (now {type(parts.get(name)).__name__})" for name in gone[:3])
            raise UnmetError(
                f"{len(gone)} of the modules that are tempered were replaced since, and with them what acts on them: "
                f"{now}. "
                "Some models do that themselves when they run. Configure the model so that it does not "
                "(attention_type='original_full' for BigBird), or call remove() and apply again."
            )

    def check_calls(self, module: nn.Module, watch: CallWatch) -> None:
        """Raise for attention that ran outside of every site, and for gates that were taken for MLPs."""
        if watch.gates:
            raise UnmetError(
                f"{listed(module, watch.gates)}: taken for a feed-forward network, but what it computes becomes a "
                "factor for all positions of a sample, as in squeeze-and-excite. Choose the modules that are meant "
                "with targets=."
            )
        for call in watch.calls:
            if call.over == "scores" and call.modules and not watch.inside & set(call.modules):
                self.control.left_alone.setdefault(call.modules[0], SCORES)
        outside = watch.outside
        hiding = [name for name, calls in outside.items() if any(call.hides for call in calls)]
        if hiding and self.mixers and not self.control.partial:
            raise ConflictError(
                f"{' and '.join(self.mixers)} mixes tokens, and {listed(module, hiding)}, which was not recognised as "
                "attention, hides tokens from others, which would see what they must not. Name it in targets=, leave "
                "the method out, or write partial=True if these are other tokens."
            )
        if not self.everywhere or self.control.partial:
            return
        if outside:
            calls = sum(map(len, outside.values()))
            what = counted(call.what for each in outside.values() for call in each)
            raise UnmetError(
                f"{calls} attention call{'s' if calls > 1 else ''} ran outside of the modules that were recognised as "
                f"attention, where the recipe does not act: {listed(module, list(outside))}; seen: {what}. Name what "
                "is meant in targets=, or write partial=True if these are not."
            )
        if watch.written:
            raise UnmetError(
                f"{listed(module, list(dict.fromkeys(watch.written)))}: attention by exp and a sum in place of "
                "softmax, which no method reaches. Write it as a softmax, or write partial=True if it is not meant."
            )

    def check_convolutions(self, module: nn.Module, watch: CallWatch) -> None:
        """Raise for convolutions that are no modules: nothing stands round them."""
        if watch.convolved and not self.control.partial:
            raise UnmetError(
                f"{listed(module, list(dict.fromkeys(watch.convolved)))}: a convolution by torch's function, with a "
                "weight that is trained and outside of any convolution module, where the recipe does not act. Make it "
                "a module such as nn.Conv2d, choose with targets={'convolutions': […]} what is meant, or write "
                "partial=True if this is not."
            )

    def check_idle(self, module: nn.Module, watch: CallWatch) -> None:
        """Raise where an attention did not run in its block, which a method changes as a whole, but outside of it."""
        for name, part, action in self.expected(module):
            elsewhere = [attention for attention in getattr(action, "idle", ()) if attention in watch.known]
            if elsewhere and not self.control.partial:
                error = UnmetError(
                    f"{methods_of(action)[0]} cannot act on '{name}': this {type(part).__name__} does not run "
                    f"{listed(module, elsewhere)}, which the model runs outside of it. Leave it out with targets=, or "
                    "write partial=True to apply the method where it can act."
                )
                error.outside = True
                raise error

    def check_actions(self, module: nn.Module) -> bool:
        """Raise for what has not run, or had no effect. False: it may still run, where a model drops layers itself."""
        expected = list(self.expected(module))
        ran = {kind_of(name, action) for name, _, action in expected if action.ran}
        missing = [(name, action) for name, _, action in expected if kind_of(name, action) not in ran]
        if missing and drops_layers(module) and self.passes < PATIENCE:
            return False
        if missing and not self.control.partial:
            methods = dict.fromkeys(method for _, action in missing for method in methods_of(action))
            names = list(dict.fromkeys(name for name, _ in missing))
            raise UnmetError(
                f"{' and '.join(methods)} would act on what this training pass did not run: {listed(module, names)}. "
                "The model computes them past their forward, or not at all. Leave them out with targets=, or write "
                "partial=True if it is meant to be so."
            )
        for method in dict.fromkeys(method for _, _, action in expected for method in methods_of(action)):
            here = [action for _, _, action in expected if method in methods_of(action)]
            if all(action.vain is not None or not action.ran for action in here):
                reason = next((action.vain for action in here if action.vain is not None), "nothing of it has run")
                raise UnmetError(f"{method} had no effect in this training pass: {reason}.")
        return True


def edges_of(model: nn.Module) -> tuple[Edge, ...]:
    """The way from a model to each of its modules that is tempered."""
    found = {}
    for name, part in model.named_modules():
        above = model
        for key in name.split(".") if name and is_tempered(part) else ():
            below = above._modules[key]
            assert below is not None
            found[id(above), key] = Edge(above, key, below)
            above = below
    return tuple(found.values())


def _acts_on_attention(module: nn.Module) -> bool:
    return is_tempered(module) and any(isinstance(action, AttentionAction) for action in state_of(module).actions)


def has_compiled_parts(module: nn.Module) -> bool:
    """Whether parts are compiled by themselves: what happens inside of them is not seen, and must not be disturbed."""
    return any(
        part._compiled_call_impl is not None or isinstance(part, torch._dynamo.OptimizedModule)
        for part in module.modules()
    )


def drops_layers(module: nn.Module) -> bool:
    """Whether a model skips layers at random by itself, so that a pass may run none of them."""
    holders = [holder for part in module.modules() for holder in (part, getattr(part, "config", None))]
    names = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    rates = [getattr(holder, name, None) for holder in holders for name in names]
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


def methods_of(action: Any) -> list[str]:
    """The methods that an action stands for."""
    if isinstance(action, AttentionAction):
        here: tuple[Any, ...] = (*action.active, *action.maps, *action.penalties)
        return [method.name for method in here]
    return [action.method.name]


def kind_of(name: str, action: Action) -> tuple[Any, ...]:
    """What is the same for all layers of one kind: experts of a mixture, of which a pass runs some."""
    side = getattr(action, "side", "")
    return type(action), tuple(methods_of(action)), side, re.sub(r"\d+", "#", name)


def listed(module: nn.Module, names: Sequence[str], most: int = 6) -> str:
    """Some names with their classes, and how many more there are."""
    shown = [f"'{name}' ({type(module.get_submodule(name)).__name__})" for name in names[:most]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
