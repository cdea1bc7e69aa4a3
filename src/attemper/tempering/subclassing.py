"""Giving a module a made subclass of its own class, and taking it back.

A class swap survives what hooks and replaced methods do not: compiling with `fullgraph=True`, deepcopy, pickling,
activation checkpointing, replicas. The made class keeps the original's name, so that nobody who asks by name or by
`isinstance` sees a difference.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attemper.errors import UnmetError
from attemper.methods.base import Method

__all__ = [
    "KEY",
    "Action",
    "Control",
    "ModuleState",
    "add_action",
    "hooks_saved_tensors",
    "is_tempered",
    "override",
    "restore",
    "state_of",
]

KEY = "_attemper"
"""The one attribute that a tempered module has more than before."""

When = Literal["training", "always", "never"]


@dataclass(frozen=True)
class Entry:
    """One term that a forward pass added to the loss."""

    site: str
    block: int
    method: str
    component: str
    value: Tensor
    sums: bool = False
    """Whether the value is a sum over samples; otherwise it is a mean."""


@dataclass
class Control:
    """What all tempered modules of one model share."""

    methods: tuple[Method, ...]
    """The methods as the user wrote them."""
    left_alone: dict[str, str]
    auto_penalty: bool = False
    loss_scale: float | Callable[[], float] = 1.0
    batch_share: float = 1.0
    """The part of the whole batch that this process sees."""
    when: When = "training"
    muted: bool = False
    """While True, penalties do not count: the second pass of a comparison."""
    ledger: list[Entry] = field(default_factory=list)
    padding: dict[int, Tensor] = field(default_factory=dict)
    """Block → boolean (B, N), True for real tokens, as its attention saw them last."""
    embedded: list[tuple[str, Tensor, Tensor]] | None = None
    """While two passes are compared: the name, the image and the tokens of every patch embedding in the first one."""

    def on(self, training: bool) -> bool:
        """Whether what acts in training acts now."""
        return self.when == "always" or (self.when == "training" and training)

    def penalises(self, training: bool) -> bool:
        """Whether penalties are computed now."""
        return training and self.when != "never" and torch.is_grad_enabled()

    def enter(self, entry: Entry) -> None:
        """Put a term into the ledger, if this pass counts.

        A backward pass that recomputes a checkpointed block does not, nor does the second pass of a comparison. Both
        compute the term all the same: checkpointing wants the tensors of the first time again.
        """
        if self.muted:
            return
        if entry.sums and self.batch_share != 1:
            entry = replace(entry, value=entry.value / self.batch_share)
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self.ledger.append(entry)
        elif not hooks_saved_tensors():
            raise UnmetError(
                f"'{entry.site}' is checkpointed with use_reentrant=True, where its penalties are known in "
                "the backward pass only, too late to be counted; use_reentrant=False can count them"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "ledger": [], "padding": {}, "embedded": None}


def hooks_saved_tensors() -> bool:
    """Whether what autograd saves goes through hooks, as in a checkpoint, which will compute it once more."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class Action:
    """Something that happens round a module's forward. Picklable."""

    control: Control

    def acts(self, training: bool) -> bool:
        """Whether it does anything now; the module's plain forward runs where no action does."""
        raise NotImplementedError

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run `forward(*args, **kwargs)` and what belongs to it."""
        raise NotImplementedError

    def resolve(self, methods: dict[str, Method]) -> None:
        """Take over new rates from the methods as the user wrote them."""


@dataclass
class ModuleState:
    """What a tempered module carries."""

    original: Any
    """The class that the module had."""
    actions: list[Action] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    """Attributes that were changed, with what they were."""

    def run(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        for action in self.actions:
            if action.acts(module.training):
                forward = functools.partial(action.around, module, forward)
                forward = _starred(forward)
        return forward(*args, **kwargs)


def _starred(around: Any) -> Any:
    """around(args, kwargs) as a function of *args and **kwargs."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(args, kwargs)

    return forward


@functools.cache
def made_class(original: Any) -> Any:
    """The subclass of `original` that a tempered module gets; one per class, under the original's name."""

    def template(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(KEY)
        if state is None or state.original is not original:  # asleep below a class that was put on top since
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

    body = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
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
        original: Any = type(module)
        module.__class__ = made_class(original)
        module.__dict__[KEY] = ModuleState(original)
    state: ModuleState = module.__dict__[KEY]
    return state


def add_action(module: nn.Module, action: Action) -> None:
    """Let an action happen round a module's forward, outside of those that it has already."""
    _state(module).actions.append(action)


def override(module: nn.Module, name: str, value: Any) -> None:
    """Change an attribute until the model is restored."""
    _state(module).before.setdefault(name, getattr(module, name))
    setattr(module, name, value)


def restore(module: nn.Module) -> None:
    """Take away everything again. Where another library put a class on top since, ours stays below it, asleep."""
    state: ModuleState | None = module.__dict__.pop(KEY, None)
    for name, value in (state.before if state else {}).items():
        setattr(module, name, value)
    original = type(module).__dict__.get("_attemper_original")
    if original is not None:
        module.__class__ = original


def is_tempered(module: nn.Module) -> bool:
    """Whether this very module is tempered, not only one inside it."""
    return KEY in module.__dict__


def state_of(module: nn.Module) -> ModuleState:
    """What a tempered module carries."""
    state: ModuleState = module.__dict__[KEY]
    return state
