"""Layers as other libraries leave them: wrapped by adapters such as PEFT's, quantised, parametrized.

An adapter keeps the layer that it was put round as `base_layer` and stands in its place. Nothing of PEFT is imported:
its layers are known by what they carry.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.sites.base import Slot, original_class

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TRANSPARENT = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""What wrappers that change nothing call the module inside: FSDP's, activation checkpointing's, the compiler's."""


@dataclass(frozen=True)
class Added:
    """What adapters add to one layer now."""

    weight: Tensor
    bias: Tensor | None
    drops: bool
    """Whether an adapter drops some of its input, which no weight can say."""


def inner(layer: Any) -> Any:
    """The layer that adapters were put round; the layer itself where there are none."""
    while isinstance(below := getattr(layer, "base_layer", None), nn.Module):
        layer = below
    return layer


def with_inner(layer: nn.Module) -> list[nn.Module]:
    """A layer and what it was put round, outermost first."""
    layers = [layer]
    while isinstance(below := getattr(layers[-1], "base_layer", None), nn.Module):
        layers.append(below)
    return layers


def is_linear(layer: Any) -> bool:
    """Whether this is a linear layer, adapted or quantised or as it is: quantised ones are often no nn.Linear."""
    layer = inner(layer)
    if isinstance(layer, nn.Linear) or is_transposed(layer):
        return True
    sizes = (getattr(layer, "in_features", None), getattr(layer, "out_features", None))
    return isinstance(layer, nn.Module) and all(isinstance(size, int) for size in sizes)


def is_transposed(layer: Any) -> bool:
    """Whether a layer multiplies with a weight of (in, out): Transformers' Conv1D, of which GPT-2 is made."""
    layer = inner(layer)
    weight = getattr(layer, "weight", None)
    return (
        isinstance(layer, nn.Module)
        and original_class(layer).__name__ == "Conv1D"
        and isinstance(weight, Tensor)
        and weight.dim() == 2
        and getattr(layer, "nf", None) == weight.shape[1]
    )


def widths(layer: Any) -> tuple[int, int]:
    """How many channels go into a linear layer or a convolution, and how many come out; packed weights do not say."""
    layer = inner(layer)
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels // layer.groups, layer.out_channels
    if is_transposed(layer):
        return layer.weight.shape[0], layer.weight.shape[1]
    return int(layer.in_features), int(layer.out_features)


def kind(layer: Any) -> str:
    """A layer's class with the package that it comes from."""
    cls = original_class(layer)
    return f"{cls.__module__}.{cls.__qualname__}"


# --------------------------------------------------------------------------------------------------- where layers stand
def adapters_round(slot: Slot | None, layer: nn.Module) -> list[Any] | None:
    """The adapters round a layer, outermost first; None: what stands in its place now is not known to use it."""
    if slot is None or slot.layer is layer:
        return []
    above: list[Any] = []
    here = slot.layer
    replica = getattr(layer, "_is_replica", False)  # of DataParallel: its own tree of modules is not known
    while here is not layer:
        if isinstance(below := getattr(here, "base_layer", None), nn.Module):
            above.append(here)
        else:
            inside = (getattr(here, name, None) for name in TRANSPARENT)
            below = next((module for module in inside if isinstance(module, nn.Module)), None)
        if below is None:
            return [] if replica and len(above) == 0 else None
        here = below
    return above


def replaced_by(slot: Slot | None) -> str:
    """What stands in a layer's place, for messages."""
    here = None if slot is None else slot.layer
    return "nothing: this is a copy of the layer that was tempered" if here is None else kind(here)


# ------------------------------------------------------------------------------------------------------------- weights
def obstacle(slot: Slot | None, layer: nn.Module, name: str = "weight") -> str | None:
    """Why the weight that a layer multiplies its input with is not known; None: it is.

    Known are a layer's own weight, and what LoRA adds to it.
    """
    if "parametrizations" in layer._modules and name in layer.parametrizations:  # type: ignore[operator]
        return f"its {name} is computed anew at every use, by torch.nn.utils.parametrize"
    weight = getattr(layer, name, None)
    if not isinstance(weight, Tensor):
        return f"{kind(layer)} keeps its weight packed"
    if weight.dtype not in FLOATS or not _is_plain(type(weight)):
        return f"its {name} is quantised or packed ({type(weight).__name__}, {weight.dtype})"
    above = adapters_round(slot, layer)
    if above is None:
        return f"what stands in its place now is {replaced_by(slot)}"
    for adapter in above:
        reason = _unknown_addition(adapter)
        if reason is not None:
            return reason
    return None


def does_more(layer: nn.Module) -> str | None:
    """Why a linear layer or convolution may compute more than a product with its weight; None: it does not.

    A class with a forward of its own and with further parameters or modules uses them in a way that is not known:
    loralib's layers, and those that are trained to be quantised.
    """
    cls: Any = original_class(layer)
    if cls.forward in (nn.Linear.forward, nn.Conv2d.forward, nn.MultiheadAttention.forward):
        return None
    more = [
        name for name in (*layer._parameters, *layer._modules) if name not in ("weight", "bias", "parametrizations")
    ]
    return f"{kind(layer)} computes with {', '.join(more)} besides its weight" if more else None


def _is_plain(cls: Any) -> bool:
    """Whether tensors of a class are what they show: torch's own, or a subclass that only marks them."""
    if cls in (nn.Parameter, Tensor) or cls.__module__.partition(".")[0] == "torch":
        return True
    return cls.__torch_function__ in PLAIN_FUNCTION and cls.__torch_dispatch__ is Tensor.__torch_dispatch__


PLAIN_FUNCTION = (Tensor.__torch_function__, nn.Parameter.__torch_function__)


def _acts(adapter: Any) -> bool:
    """Whether an adapter does anything now, as far as it tells: not where it is off, or merged into the weight."""
    return not (getattr(adapter, "disable_adapters", False) or getattr(adapter, "merged", False))


def _active(adapter: Any) -> list[str]:
    """The names of a LoRA layer's adapters that act now; one layer can hold several."""
    return [name for name in adapter.active_adapters if name in adapter.lora_A]


def _unknown_addition(adapter: Any) -> str | None:
    """Why it is not known what an adapter adds to the weight; None: it is LoRA, or does nothing now."""
    if not _acts(adapter):
        return None
    both = isinstance(getattr(adapter, "lora_A", None), nn.ModuleDict) and isinstance(adapter.lora_B, nn.ModuleDict)
    # parameter_name: a LoRA layer that changes a parameter inside of its base layer, not its output
    if not both or hasattr(adapter, "parameter_name") or "forward" in adapter.__dict__:
        return f"it is wrapped in {kind(adapter)}, and only what LoRA adds to a weight is known"
    variants = getattr(adapter, "lora_variant", {})
    for name in _active(adapter):
        if name in variants or getattr(adapter, "use_dora", {}).get(name, False):
            variant = kind(variants[name]) if name in variants else "DoRA"
            return f"it is wrapped in {kind(adapter)}, and its adapter '{name}' is no plain LoRA but {variant}"
    return None


def added_to(slot: Slot | None, layer: nn.Module) -> Added | None:
    """What LoRA adds to a layer's weight, differentiable: Σ scaling · BA over the active adapters; None: nothing.

    Call `obstacle` before: adapters that are not known are left out here.
    """
    above = adapters_round(slot, layer)
    if not above:
        return None
    total: Tensor | None = None
    bias: Tensor | None = None
    drops = False
    for adapter in above:
        for name in _active(adapter) if _acts(adapter) else ():
            a, b, scaling = adapter.lora_A[name], adapter.lora_B[name], adapter.scaling[name]
            product = b.weight.flatten(1) @ a.weight.flatten(1) * scaling
            product = product.T if getattr(adapter, "fan_in_fan_out", False) else product
            total = product if total is None else total + product
            if b.bias is not None:
                bias = b.bias * scaling if bias is None else bias + b.bias * scaling
            drops = drops or getattr(adapter.lora_dropout[name], "p", 0.0) > 0
    return None if total is None else Added(total, bias, drops)
