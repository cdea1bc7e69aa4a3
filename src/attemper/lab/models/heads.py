"""The last layer of a classifier: what is made anew for other classes, and trained where all else is frozen."""

from typing import Any, cast

from torch import nn

NAMES = ("head", "head.fc", "heads.head", "classifier", "fc", "cls_classifier", "distillation_classifier", "head_dist")
"""Where libraries keep it."""


def head_parameters(model: nn.Module, classes: int) -> frozenset[str]:
    """The names of the parameters of the layers that give the scores of the classes; empty where none can be told.

    They are what the model itself calls its classifier (timm), else the layers under a usual name, else the last layer
    with as many outputs as there are classes.

    >>> sorted(head_parameters(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), 3))
    ['1.bias', '1.weight']
    """
    named = dict(model.named_modules())
    found = [name for name, module in named.items() if id(module) in _declared(model)]
    found = found or [name for name in NAMES if name in named and _outputs(named[name]) == classes]
    found = found or [name for name, module in named.items() if _outputs(module) == classes][-1:]
    inside = tuple(f"{name}." for name in found)
    return frozenset(name for name, _ in model.named_parameters() if inside and name.startswith(inside))


def _declared(model: nn.Module) -> set[int]:
    if not hasattr(model, "get_classifier"):
        return set()
    given = cast(Any, model).get_classifier()
    layers = given if isinstance(given, list | tuple) else [given]
    return {id(layer) for layer in layers if isinstance(layer, nn.Module) and any(True for _ in layer.parameters())}


def _outputs(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, nn.Conv2d) else None
