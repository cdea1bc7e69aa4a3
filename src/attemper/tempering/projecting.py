"""Which projections of an attention methods need, and which of them are known."""

from torch import nn

from attemper.sites import AttentionSite


def missing_projections(model: nn.Module, site: AttentionSite, weights: bool) -> str | None:
    """What a method that needs projections would miss, or None.

    weights: whether it changes their weights, that of the output projection too.
    """
    p = site.projections
    if p is None or (weights and any(part and isinstance(part.module, nn.Conv2d) for part in (p.q, p.k, p.v, p.out))):
        return "Q, K and V projections"  # the weight of a 1 × 1 convolution is not caught
    if not weights or p.out is not None or dense_behind(model, site) is not None:
        return None
    known = {part.module for part in (p.q, p.k, p.v)}
    others = [layer for layer in site.module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    return "output projection" if any(layer not in known for layer in others) else None


def dense_behind(model: nn.Module, site: AttentionSite) -> nn.Linear | None:
    """The output projection in a module beside attention, as in BERT."""
    parent = model.get_submodule(site.name.rpartition(".")[0])
    dense = getattr(getattr(parent, "output", None), "dense", None)
    return dense if isinstance(dense, nn.Linear) else None
