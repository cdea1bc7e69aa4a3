"""Recognising a feed-forward network by the names that people give its layers."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["find_mlp"]

PAIRS = (
    (("fc1",), "fc2"),
    (("fc1_g", "fc1_x"), "fc2"),
    (("linear1",), "linear2"),
    (("lin1",), "lin2"),
    (("dense1",), "dense2"),
    (("intermediate.dense",), "output.dense"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w2"), "w3"),
    (("w12",), "w3"),
    (("weights_in",), "weights_out"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("c_fc",), "c_proj"),
)


def find_mlp(module: nn.Module) -> tuple[tuple[nn.Module, ...], nn.Module] | None:
    """The layers that take an MLP's input and the one that gives its output, if this module holds an MLP."""
    for firsts, last in PAIRS:
        layers = [_layer(module, name) for name in (*firsts, last)]
        if all(isinstance(layer, nn.Linear | nn.Conv2d) for layer in layers):
            return tuple(layers[:-1]), layers[-1]
    if isinstance(module, nn.Sequential):
        linear = [layer for layer in module if isinstance(layer, nn.Linear)]
        if len(linear) == 2 and linear[0].in_features == linear[1].out_features:
            return (linear[0],), linear[1]
    return None


def _layer(module: nn.Module, path: str) -> Any:
    layer: Any = module
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer
