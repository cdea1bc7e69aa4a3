"""Layers that others wrapped or quantised, before `apply` or since: what to act round, and on which weight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import NoSiteError, UnmetError
from attemper.sites.adapted import FLOATS, Added, adapters_round, added_to, does_more, obstacle, replaced_by, with_inner
from attemper.sites.base import Projection, Slot
from attemper.tempering.penalties import Control
from attemper.tempering.subclassing import Action, add_action, is_tempered, state_of


def slots_of(model: nn.Module) -> dict[nn.Module, Slot]:
    """Where every module of a model stands."""
    slots: dict[nn.Module, Slot] = {}
    for owner in model.modules():
        for name, child in owner.named_children():
            slots.setdefault(child, Slot(owner, name))
    return slots


# ------------------------------------------------------------------------------------------------ which layer to act on
def is_outermost(action: Any, module: nn.Module) -> bool:
    """Whether an action that stands round a layer and round the adapters on it acts here, round the outermost of them.

    Raises where the layer was wrapped since and the action was not put round what wraps it: it would reach one part of
    what is computed.
    """
    slot: Slot | None = action.slot
    if slot is None or slot.layer is module:
        return True
    above = adapters_round(slot, module)
    if above is not None and len(above) == 0:
        return True
    if above is not None and any(_stands_round(action, adapter) for adapter in above):
        return False
    raise UnmetError(
        f"{action.method.name} acts on the layer '{slot.name}' of {action.place.where}, and what stands there since "
        f"attemper.apply is {replaced_by(slot)}: it would reach only a part of what is computed. Call remove(), and "
        "attemper.apply after the layer is wrapped."
    )


@dataclass
class StandingAction(Action):
    """Stands round the whole model and looks after layers that something acts on.

    Where one was wrapped in an adapter since, what acts on its tokens is put round the adapter, too. Where one was
    taken out of the model, it raises.
    """

    control: Control
    watched: list[tuple[Any, nn.Module]]
    """The actions on layers, each with the outermost layer when it was looked at last."""

    def acts(self, training: bool) -> bool:
        return any(action.acts(training) for action, _ in self.watched)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        for index, (action, layer) in enumerate(self.watched):
            if action.slot.layer is not layer and action.acts(module.training):
                self.check(action)
                if not torch.compiler.is_compiling():  # which cannot change the class of a module
                    follow(action)
                    self.watched[index] = (action, action.slot.layer)
        return forward(*args, **kwargs)

    def check(self, action: Any) -> None:
        """Raise unless what stands in a layer's place is one that an action stands round, or has one inside."""
        here = action.slot.layer
        if here is not None and any(_stands_round(action, inside) for inside in here.modules()):
            return
        raise UnmetError(
            f"{action.method.name} acts on the layer '{action.slot.name}' of {action.place.where}, and what stands "
            f"there since attemper.apply is {replaced_by(action.slot)}: it would have no effect. Call remove(), and "
            "attemper.apply after the layer is replaced."
        )


def follow(action: Any) -> None:
    """Put an action that belongs round the adapters on its layer round those that were put there since."""
    if not getattr(action, "goes_outside", False):
        return
    layers = with_inner(action.slot.layer)
    if any(_stands_round(action, layer) for layer in layers):
        for layer in layers:
            if not _stands_round(action, layer):
                add_action(layer, action)


def _stands_round(action: Action, module: nn.Module) -> bool:
    return is_tempered(module) and any(each is action for each in state_of(module).actions)


# --------------------------------------------------------------------------------------------------------- which weight
def refuse_unknown_weight(method: str, where: str, slot: Slot | None, layer: nn.Module, weight: str = "weight") -> None:
    """At apply: raise where a method needs a weight that is not known."""
    reason = obstacle(slot, layer, weight) or does_more(layer)
    if reason is not None:
        raise NoSiteError(_needs_weight(method, where, slot, reason))


def addition(method: str, where: str, slot: Slot | None, layer: nn.Module, weight: str = "weight") -> Added | None:
    """In a forward pass: what adapters add to a layer's weight now. Raises where that is not known."""
    reason = obstacle(slot, layer, weight)
    if reason is not None:
        raise UnmetError(_needs_weight(method, where, slot, reason))
    return added_to(slot, layer)


def is_known(slot: Slot | None, layer: nn.Module) -> bool:
    """Whether a layer is a linear one of torch with a plain weight, and stands by itself where it stood.

    Then `addition` gives None; it is what most layers are, in every step, and costs next to nothing to see.
    """
    weight = layer._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.dtype in FLOATS
        and (slot is None or slot.layer is layer)
        and state_of(layer).original is nn.Linear
        and len(layer._modules) == 0
    )


def additions(method: str, where: str, parts: dict[str, Projection | None]) -> dict[str, Added]:
    """The same for the projections of an attention: name → what is added to the whole weight, where anything is."""
    of_module: dict[nn.Module, Added | None] = {}
    for part in parts.values():
        if part is not None and part.module not in of_module:
            of_module[part.module] = addition(method, where, part.slot, part.module, part.weight)
    found = {name: None if part is None else of_module[part.module] for name, part in parts.items()}
    return {name: added for name, added in found.items() if added is not None}


def _needs_weight(method: str, where: str, slot: Slot | None, reason: str) -> str:
    layer = f"'{where}'" if slot is None else f"the layer '{slot.name}' of '{where}'"
    return (
        f"{method} needs the weight that {layer} multiplies with, and {reason}. Merge what was added, keep the weight "
        "in floating point, or leave the layer out with targets=."
    )


def effective(weight: Tensor, added: Added) -> Tensor:
    """The weight that a layer and its adapters multiply with together."""
    return weight + added.weight.view(weight.shape).to(weight.dtype)


def effective_bias(bias: Tensor | None, added: Added) -> Tensor | None:
    """The bias of a layer and its adapters together."""
    if added.bias is None:
        return bias
    return added.bias if bias is None else bias + added.bias.to(bias.dtype)


def matrix(part: Projection, added: Added | None) -> Tensor:
    """(out, in) of one projection, with what adapters add to it."""
    if added is None:
        return part.matrix()
    return part.part(effective(part.parameter, added))


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""What a layer does with its input, its weight and its bias."""


def mapped_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    added: Added,
    map: Callable[[Tensor], Tensor],
    multiply: Multiply = F.linear,
) -> Tensor:
    """What a layer must give so that, together with what its adapters will add to it, its whole weight is mapped."""
    whole = effective(weight, added)
    return multiply(x, map(whole), bias) - multiply(x, whole - weight, None)
