"""Layers that others wrapped or quantised, before `apply` or since: what to act round, and on which weight."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import NoSiteError, UnmetError
from attemper.sites.adapted import Added, adapters_round, added_to, does_more, obstacle, replaced_by
from attemper.sites.base import Projection, Slot
from attemper.tempering.subclassing import Action, is_tempered, state_of


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

    Raises where the layer was wrapped since, so that the action would reach one part of what is computed.
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
        f"{action.method.name} acts on the layer '{slot.name}' of '{action.place.name}', and what stands there since "
        f"attemper.apply is {replaced_by(slot)}: it would reach only a part of what is computed. Call remove(), and "
        "attemper.apply after the layer is wrapped."
    )


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
    whole = effective(part.parameter, added)
    return whole if part.rows is None else whole[part.rows[0] : part.rows[1]]


def mapped_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, added: Added, map: Callable[[Tensor], Tensor]
) -> Tensor:
    """What a layer must give so that, together with what its adapters will add to it, its whole weight is mapped."""
    whole = effective(weight, added)
    return F.linear(x, map(whole), bias) - F.linear(x, whole - weight)
