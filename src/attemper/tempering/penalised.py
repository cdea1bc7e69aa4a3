"""Which layers a penalty acts on, and as which component: each layer belongs to one."""

from collections.abc import Iterator, Mapping
from typing import Literal, cast

from torch import nn

from attemper.methods.base import Method
from attemper.methods.kinds import Penalty
from attemper.sites.adapted import inner
from attemper.sites.base import Slot
from attemper.tempering.convolutions import ConvolutionAction, refuse_unknown_convolution
from attemper.tempering.layers import MlpPenaltyAction
from attemper.tempering.penalties import Control
from attemper.tempering.requirements import Requirements
from attemper.tempering.subclassing import Action
from attemper.tempering.wrapped import refuse_unknown_weight

Placed = tuple[nn.Module, Action]
Slots = Mapping[nn.Module, Slot]


def penalty_actions(model: Requirements, method: Method, control: Control, slots: Slots) -> list[Placed]:
    """What a penalty does to MLPs and convolutions; attention has an action of its own."""
    return [*_on_mlps(model, method, control, slots), *_on_convolutions(model, method, control, slots)]


def _on_mlps(model: Requirements, method: Method, control: Control, slots: Slots) -> Iterator[Placed]:
    for mlp in model.mlps:
        place = model.block_place(mlp.block, mlp.name)
        if not cast(Penalty, method).wants_mlp(place):
            continue
        layers: list[tuple[nn.Module, Literal["ff1", "ff2"]]] = [(layer, "ff1") for layer in mlp.firsts]
        for layer, which in (*layers, (mlp.last, "ff2")):
            slot, plain, layout = slots.get(layer), inner(layer), model.layout(mlp.block, layer)
            refuse_unknown_weight(method.name, mlp.name, slot, plain)
            yield plain, MlpPenaltyAction(control, place, method.at(place), which, layout, slot)


def _on_convolutions(model: Requirements, method: Method, control: Control, slots: Slots) -> Iterator[Placed]:
    for site in model.penalised_convolutions(cast(Penalty, method)):
        place, plain, slot = model.convolution_place(site), inner(site.module), slots.get(site.module)
        refuse_unknown_convolution(method.name, site.name, slot, plain)
        yield plain, ConvolutionAction(control, place, method.at(place), slot)
