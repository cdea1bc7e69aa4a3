"""Dropout that a model has of its own, where it would meet a method that does the same."""

from collections.abc import Iterator

from torch import nn

from attemper.sites import Sites

Own = tuple[str, nn.Module, str, float]
"""The module's name, the module, the attribute that holds the rate, and the rate."""

PATHS = {"DropPath": "drop_prob", "StochasticDepth": "p"}
FUNCTIONAL = ("activation_dropout", "dropout")


def _rate(module: nn.Module, attribute: str) -> float:
    value = getattr(module, attribute, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def own_drop_path(model: nn.Module) -> list[Own]:
    """Drop paths with a rate above 0."""
    found = []
    for name, module in model.named_modules():
        kind = next((kind for kind in PATHS if type(module).__name__.endswith(kind)), None)
        if kind is not None and (rate := _rate(module, PATHS[kind])) > 0:
            found.append((name, module, PATHS[kind], rate))
    return found


def own_mlp_dropout(model: nn.Module, sites: Sites) -> list[Own]:
    """Dropout with a rate above 0 on the hidden or output activations of an MLP."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[tuple[nn.Module, str], Own] = {}
    for mlp in sites.mlps:
        for layer in (*mlp.firsts, mlp.last):
            holder = names[layer].rpartition(".")[0]
            for name, module in _dropouts(model.get_submodule(holder), holder):
                found[module, "p"] = (name, module, "p", _rate(module, "p"))
            owner = model.get_submodule(holder)
            for attribute in FUNCTIONAL:
                if _rate(owner, attribute) > 0:
                    found[owner, attribute] = (holder, owner, attribute, _rate(owner, attribute))
    return list(found.values())


def _dropouts(holder: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Dropout layers of an MLP; where its layers stand in the block itself, those behind them."""
    if isinstance(holder, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        last = "dropout2" if isinstance(holder, nn.TransformerEncoderLayer) else "dropout3"
        candidates = [(child, getattr(holder, child)) for child in ("dropout", last)]
    else:
        candidates = list(holder.named_children())
    for child, module in candidates:
        if isinstance(module, nn.Dropout) and module.p > 0:
            yield (f"{name}.{child}" if name else child), module


def active_dropout(model: nn.Module) -> bool:
    """Whether a training pass of the model is stochastic by itself."""
    if own_drop_path(model):
        return True
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if isinstance(module, nn.MultiheadAttention) and module.dropout > 0:
            return True
        if any(
            _rate(module, name) > 0 for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_prob")
        ):
            return True
    return False
