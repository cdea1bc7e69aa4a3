"""Recognising a feed-forward network by the names that people give its layers, or by its own name and their widths."""

from typing import Any

from torch import nn

from attemper.sites.adapted import inner, is_linear, widths
from attemper.sites.gates import is_gate

PAIRS = (
    (("fc1",), "fc2"),
    (("fc1_g", "fc1_x"), "fc2"),
    (("linear1",), "linear2"),
    (("lin1",), "lin2"),
    (("dense1",), "dense2"),
    (("intermediate.dense",), "output.dense"),
    (("intermediate_dense",), "output_dense"),
    (("ffn",), "ffn_output"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc_in",), "fc_out"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("w1", "w2"), "w3"),
    (("w1", "w3"), "w2"),
    (("w12",), "w3"),
    (("weights_in",), "weights_out"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("Wi",), "Wo"),
    (("c_fc",), "c_proj"),
)
WORDS = ("mlp", "ffn", "feedforward", "leff")
Mlp = tuple[tuple[nn.Module, ...], nn.Module]
"""The layers that take an MLP's input, and the one that gives its output."""


def find_mlp(module: nn.Module) -> Mlp | None:
    """The layers that take an MLP's input and the one that gives its output, if this module holds an MLP.

    Adapters round the layers are seen through; the outermost of them is the layer that is returned.
    """
    for firsts, last in PAIRS:
        layers = [_layer(module, name) for name in (*firsts, last)]
        if all(is_linear(layer) or isinstance(inner(layer), nn.Conv2d) for layer in layers):
            if len({widths(layer)[0] for layer in layers[:-1]}) == 1:  # some call w2 what others call w3
                return tuple(layers[:-1]), layers[-1]
    linear = [layer for layer in module.children() if is_linear(layer)]
    if isinstance(module, nn.Sequential):
        if len(linear) == 2 and widths(linear[0])[0] == widths(linear[1])[1]:
            return (linear[0],), linear[1]
    elif any(word in type(module).__name__.lower().replace("_", "") for word in WORDS):
        return _by_widths(linear or _nested(module))
    return None


def named_mlp(module: nn.Module) -> Mlp | None:
    """The same for a module that is known to be an MLP, whatever it and its layers are called."""
    return find_mlp(module) or _by_widths([layer for layer in module.children() if is_linear(layer)] or _nested(module))


def _nested(module: nn.Module) -> list[nn.Module]:
    """The linear layers and 1 × 1 convolutions below a module, in order; none where one below it is an MLP itself.

    Squeeze-and-excite between them is passed over.
    """
    found: list[nn.Module] = []
    for child in module.children():
        layer = inner(child)
        if is_linear(layer) or (isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1):
            found.append(child)
        elif (mlp := find_mlp(child)) is not None:
            if not is_gate(child, module, *mlp):
                return []
        elif layer is child:
            found += _nested(child)
    return found


def _by_widths(linear: list[nn.Module]) -> Mlp | None:
    """One or two layers that widen, and one that takes their output, or half of it, back to where it came from."""
    if not 2 <= len(linear) <= 3:
        return None
    narrow, wide = widths(linear[0])
    firsts = tuple(layer for layer in linear if widths(layer) == (narrow, wide))
    back = [layer for layer in linear if widths(layer)[1] == narrow and widths(layer)[0] in (wide, wide / 2)]
    if wide <= narrow or len(back) != 1 or len(firsts) + 1 != len(linear):
        return None
    return firsts, back[0]


def _layer(module: nn.Module, path: str) -> Any:
    layer: Any = module
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer
