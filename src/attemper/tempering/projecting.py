"""Which projections of an attention methods need, and which of them are known."""

from collections.abc import Iterator

from torch import nn

from attemper.sites import AttentionSite
from attemper.sites.adapted import inner, is_linear, is_transposed


def missing_projections(model: nn.Module, site: AttentionSite, weights: bool) -> str | None:
    """What a method that needs projections would miss, or None.

    weights: whether it changes their weights, that of the output projection too.
    """
    p = site.projections
    if p is None:
        return "Q, K and V projections"
    if not weights or p.out is not None or dense_behind(model, site) is not None:
        return None
    known = {part.module for part in (p.q, p.k, p.v)}
    others = [layer for layer in _layers(site.module) if is_linear(layer) or isinstance(layer, nn.Conv2d)]
    return "output projection" if any(layer not in known for layer in others) else None


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside of a module; of one that adapters were put round, the layer that it was."""
    for child in module.children():
        layer = inner(child)
        yield layer
        if layer is child:
            yield from _layers(child)


def dense_behind(model: nn.Module, site: AttentionSite) -> nn.Module | None:
    """The output projection in a module beside attention, as in BERT."""
    parent = model.get_submodule(site.name.rpartition(".")[0])
    dense: nn.Module | None = getattr(getattr(parent, "output", None), "dense", None)
    return dense if is_linear(dense) and not is_transposed(dense) else None
