"""Giving a module a made subclass of its own class, and taking it back.

A class swap survives what hooks and replaced methods do not: compiling with `fullgraph=True`, deepcopy, pickling,
activation checkpointing, replicas. The made class keeps the original's name, so that nobody who asks by name or by
`isinstance` sees a difference.
"""

import contextlib
import functools
import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from attemper.methods.base import Method
from attemper.ops.stream import Site
from attemper.tempering.penalties import Control

KEY = "_attemper"
"""The one attribute that a tempered module has more than before."""


class Action:
    """Something that happens round a module's forward. Picklable."""

    control: Control
    ran: bool = False
    """Whether the module's forward has run in training, compiled code apart."""
    vain: str | None = None
    """Why the action had no effect, although it ran."""
    stream_site: Site = Site()
    """Where its streams start."""

    def acts(self, training: bool) -> bool:
        """Whether it does anything now; the module's plain forward runs where no action does."""
        raise NotImplementedError

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run `forward(*args, **kwargs)` and what belongs to it."""
        raise NotImplementedError

    def name_site(self) -> None:
        """Set `stream_site`; nothing to do where it draws nothing."""

    def sites(self) -> dict[int, str]:
        """The words of the sites where it draws → their names: that of the module, and which part of it is meant."""
        return {}

    def drawing(self, note: Any) -> tuple[Any, ...]:
        """The methods that draw in a call that was noted (`draws.Note`), as they act now, lane by lane."""
        return (cast(Any, self).method,)

    def resolve(self, methods: dict[str, Method]) -> None:
        """Take over new rates from the methods as the user wrote them."""

    def saving(self, module: nn.Module) -> AbstractContextManager[None]:
        """Context manager: what holds while the module's own `save_pretrained` runs."""
        return contextlib.nullcontext()


def site_of(name: str, *what: str) -> Site:
    """The site of what happens at a module of this name, which is the same with and without adapters round it.

    >>> adapted = site_of("base_model.model.blocks.0.fc2.base_layer", "ffdropout")
    >>> adapted.word == site_of("blocks.0.fc2", "ffdropout").word
    True
    """
    plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return Site(":".join((plain, *what)))


@dataclass
class ModuleState:
    """What a tempered module carries."""

    original: Any
    """The class that the module had."""
    actions: list[Action] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    """Attributes that were changed, with what they were."""

    def run(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        training, outermost = module.training, None
        for action in self.actions:
            if training and not action.ran and not torch.compiler.is_compiling():
                action.ran = True
            if action.acts(training):
                if outermost is not None:
                    forward = _inside(outermost, module, forward)
                outermost = action
        return forward(*args, **kwargs) if outermost is None else outermost.around(module, forward, args, kwargs)


def _inside(action: Action, module: nn.Module, forward: Any) -> Any:
    """A module's forward with an action round it."""

    def acted(*args: Any, **kwargs: Any) -> Any:
        return action.around(module, forward, args, kwargs)

    return acted


@functools.cache
def made_class(original: Any) -> Any:
    """The subclass of `original` that a tempered module gets; one per class, under the original's name."""

    def template(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(KEY)
        if state is None or state.original is not original:  # inactive: another class was put on top since
            return super(made, self).forward(*args, **kwargs)
        return state.run(self, super(made, self).forward, args, kwargs)

    # Dynamo keeps its compiled entries, and their limit, per code object: every class needs one of its own.
    forward = FunctionType(template.__code__.replace(), template.__globals__, "forward", closure=template.__closure__)
    # Others ask for the signature: Transformers' Trainer drops every column of a batch that it does not name.
    forward.__dict__["__signature__"] = inspect.signature(original.forward)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        rebuild, args, *rest = super(made, self).__reduce_ex__(protocol)
        args = tuple(original if arg is made else arg for arg in args)
        return (_rebuild, (original, rebuild, args), *rest)

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(KEY)
        with contextlib.ExitStack() as stack:
            for action in state.actions if state is not None and state.original is original else ():
                stack.enter_context(action.saving(self))
            return super(made, self).save_pretrained(*args, **kwargs)

    body = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    if callable(own := getattr(original, "save_pretrained", None)):
        body["save_pretrained"] = functools.wraps(own)(save_pretrained)
    made: Any = type(original)(original.__name__, (original,), body)
    made._attemper_original = original
    return made


def _rebuild(original: Any, rebuild: Any, args: Any) -> nn.Module:
    module: nn.Module = rebuild(*args)
    module.__class__ = made_class(original)
    return module


def _state(module: nn.Module) -> ModuleState:
    """The module's state, made with its class if there is none yet."""
    if KEY not in module.__dict__:
        # A model that type(tempered_model) built has the made class already.
        original: Any = type(module).__dict__.get("_attemper_original", type(module))
        module.__class__ = made_class(original)
        module.__dict__[KEY] = ModuleState(original)
    state: ModuleState = module.__dict__[KEY]
    return state


def add_action(module: nn.Module, action: Action) -> None:
    """Let an action happen round a module's forward, outside of those that it has already."""
    action.name_site()
    _state(module).actions.append(action)


def override(module: nn.Module, name: str, value: Any) -> None:
    """Change an attribute until the model is restored."""
    _state(module).before.setdefault(name, getattr(module, name))
    setattr(module, name, value)


def restore(module: nn.Module) -> None:
    """Take away everything again. Where another library put a class on top since, ours stays below it, inactive."""
    state: ModuleState | None = module.__dict__.pop(KEY, None)
    for name, value in (state.before if state else {}).items():
        setattr(module, name, value)
    original = type(module).__dict__.get("_attemper_original")
    if original is not None:
        module.__class__ = original


def is_tempered(module: nn.Module) -> bool:
    """Whether this very module is tempered, not only one inside it."""
    return KEY in module.__dict__


def is_made(module: nn.Module) -> bool:
    """Whether a module is of a made class, tempered or not."""
    return "_attemper_original" in type(module).__dict__


def state_of(module: nn.Module) -> ModuleState:
    """What a tempered module carries."""
    state: ModuleState = module.__dict__[KEY]
    return state
