"""The branches of blocks: which layers compute each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from attemper.sites import BlockSite, Sites
from attemper.sites.adapted import inner


@dataclass(frozen=True)
class Branch:
    """An attention or a feed-forward network, by the layers that compute it."""

    name: str
    block: int
    is_attention: bool
    home: str
    """The attention, or the last layer of the MLP, by its name in the module that is followed."""
    layers: tuple[str, ...]
    """The modules whose weights are its own, by their names in the module that is followed."""

    @property
    def kind(self) -> str:
        return "attention" if self.is_attention else "feed-forward network"

    @property
    def group(self) -> tuple[bool, int, str]:
        """What is the same for experts of a mixture, of which a pass runs some."""
        return self.is_attention, self.block, re.sub(r"\d+", "#", self.name)


def branches_of(sites: Sites, blocks: Sequence[BlockSite], scope: str, model: nn.Module) -> tuple[Branch, ...]:
    """The branches of blocks as they are followed while the module `scope` runs; those that lie outside of it are not.

    Attentions that are left alone are branches, too.
    """
    names = {module: name for name, module in model.get_submodule(scope).named_modules()}
    found = []
    for block in blocks:
        mlps = [mlp for mlp in sites.mlps if mlp.block == block.index and mlp.last in names]
        of_mlps = {layer for mlp in mlps for layer in (*mlp.firsts, mlp.last)}
        modules = {site.name: site.module for site in sites.attentions if site.block == block.index}
        modules |= {name: model.get_submodule(name) for name in sites.left_alone if _inside(name, block.name)}
        for name, module in modules.items():
            if module in names:
                layers = tuple(names[layer] for layer in _weighted(module, of_mlps))
                found.append(Branch(name, block.index, True, names[module], layers))
        for mlp in mlps:
            layers = tuple(names[layer] for layer in (*mlp.firsts, mlp.last))
            found.append(Branch(mlp.name, block.index, False, layers[-1], layers))
    return tuple(found)


def _weighted(module: nn.Module, others: set[nn.Module]) -> Iterator[nn.Module]:
    """The layers of a module that have weights, but for others; adapters stand for the layer that they are round."""
    if module in others:
        return
    layer = inner(module)
    if any(True for _ in layer.parameters(recurse=False)):
        yield module
    if layer is module:
        for child in module.children():
            yield from _weighted(child, others)


def _inside(name: str, scope: str) -> bool:
    return name == scope or not scope or name.startswith(scope + ".")


def is_container(module: nn.Module) -> bool:
    """Whether a module has no forward of its own, as a ModuleList: its parts are run by what holds it."""
    return type(module).forward is nn.Module.forward
