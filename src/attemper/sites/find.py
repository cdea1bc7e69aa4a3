"""Finding the sites of a model: one walk over its modules, with what each library's adapter knows."""

import fnmatch
import importlib.metadata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from torch import nn

from attemper.errors import NoSiteError
from attemper.sites import timm, torchvision, transformers
from attemper.sites.adapted import inner
from attemper.sites.adapter import Adapter
from attemper.sites.base import AttentionSite, BlockSite, Geometry, MlpSite, PatchSite, Sites
from attemper.sites.detect import computes_attention, find_heads, find_projections
from attemper.sites.gates import is_gate
from attemper.sites.mlp import find_mlp


@cache
def adapters() -> tuple[Adapter, ...]:
    """What is known about each library; other packages add theirs under the entry point `attemper.sites`."""
    added = [entry.load() for entry in importlib.metadata.entry_points(group="attemper.sites")]
    return (*added, timm.ADAPTER, transformers.ADAPTER, torchvision.ADAPTER)


@dataclass(frozen=True)
class Tree:
    """A model's modules by name."""

    modules: dict[str, nn.Module]

    def ancestors(self, name: str) -> Iterator[str]:
        """The names above `name`, nearest first, the root ('') last."""
        while name:
            name = name.rpartition(".")[0]
            yield name

    def listed(self, name: str) -> bool:
        """Whether a module is an element of a ModuleList or Sequential."""
        return bool(name) and isinstance(self.modules[name.rpartition(".")[0]], nn.ModuleList | nn.Sequential)

    def holder(self, name: str) -> nn.Module | None:
        """The nearest module above `name` that has a forward of its own and is no Sequential; None: there is none."""
        for above in self.ancestors(name):
            module = self.modules[above]
            if not isinstance(module, nn.Sequential) and type(module).forward is not nn.Module.forward:
                return module
        return None

    def inside(self, name: str, others: Sequence[str]) -> bool:
        """Whether one of `others` lies below `name`."""
        return any(_below(other, name) for other in others)


def _below(name: str, above: str) -> bool:
    return name != above and (not above or name.startswith(above + "."))


def find_sites(model: nn.Module, targets: Sequence[str] | str | None = None) -> Sites:
    """Every attention, MLP, block and patch embedding of a model.

    targets: globs on module names. Attention is then looked for only in the modules that they match, and a matched
        module in which none is recognised is assumed to be attention.
    """
    tree = Tree(dict(model.named_modules()))
    left_alone: dict[str, str] = {}
    attentions = _attention_names(tree, left_alone)
    mlps = {
        name: mlp
        for name, module in tree.modules.items()
        if not any(name == a or _below(name, a) for a in (*attentions, *left_alone))
        and (mlp := find_mlp(module)) is not None
        and not is_gate(module, tree.holder(name), *mlp)
    }
    blocks = _block_of_attention(tree, attentions, mlps)
    if any(tree.listed(block) for block in blocks.values()):
        for name in [name for name in attentions if not tree.listed(blocks[name])]:
            left_alone[name] = "it stands outside the blocks; name it in targets= to include it"
            attentions.remove(name)
            del blocks[name]
    mlp_blocks = {
        name: block
        for name in mlps
        if (block := _block_of_mlp(tree, name, attentions, set(blocks.values()))) is not None
    }

    if targets is not None:
        attentions = _targeted(tree, attentions, [targets] if isinstance(targets, str) else list(targets))
        outside = _block_of_attention(tree, [name for name in attentions if name not in blocks], mlps)
        blocks |= {name: block if tree.listed(block) else name for name, block in outside.items()}
    owners = set(blocks.values()) | set(mlp_blocks.values())
    order = [name for name in tree.modules if name in owners]
    index = {name: i for i, name in enumerate(order)}

    return Sites(
        attentions=tuple(_attention_site(tree, name, index[blocks[name]]) for name in attentions),
        mlps=tuple(MlpSite(name, index[mlp_blocks[name]], *mlps[name]) for name in mlps if name in mlp_blocks),
        blocks=tuple(BlockSite(name, tree.modules[name], i) for name, i in index.items()),
        patches=tuple(_patches(tree)),
        left_alone={name: reason for name, reason in left_alone.items() if name not in attentions},
        targeted=None if targets is None else _reached(tree, targets),
    )


def _attention_names(tree: Tree, left_alone: dict[str, str]) -> list[str]:
    """Modules that compute attention; where two are nested, the inner one does the work."""
    found = []
    for name, module in tree.modules.items():
        reason = next((reason for adapter in adapters() if (reason := adapter.leave_alone(module))), None)
        if reason:
            left_alone[name] = reason
        elif computes_attention(module):
            found.append(name)
    return [name for name in found if not tree.inside(name, found)]


def _block_of_attention(tree: Tree, attentions: Sequence[str], mlps: Iterable[str]) -> dict[str, str]:
    """The nearest list element that holds the attention; else itself, if it is one; else what holds it.

    A block whose attentions and MLP are listed inside of it, as T5's, is the element that holds them all.
    """
    blocks = {}
    for name in attentions:
        above = [ancestor for ancestor in tree.ancestors(name) if tree.listed(ancestor)]
        whole = [
            block
            for block in above
            if tree.inside(block, list(mlps)) and sum(_below(other, block) for other in attentions) <= PER_BLOCK
        ]
        blocks[name] = (whole or above or [name if tree.listed(name) else name.rpartition(".")[0]])[0]
    return blocks


PER_BLOCK = 2
"""How many attentions a block may have: one over its own tokens, and one over those of an encoder."""


def _block_of_mlp(tree: Tree, name: str, attentions: Sequence[str], blocks: set[str]) -> str | None:
    """The same for an MLP, whose layers may belong to the block itself. None: it is in no block (a head, say).

    blocks: those of attentions. An MLP inside of one belongs to it, even where it is listed there once more, as the
        experts of a mixture are, or as the parts of a layer that is a ModuleList.
    """
    if tree.inside(name, attentions) and (tree.listed(name) or name == ""):
        return name
    above = [ancestor for ancestor in tree.ancestors(name) if tree.listed(ancestor)]
    if above:
        return next((ancestor for ancestor in above if ancestor in blocks), above[0])
    parent = name.rpartition(".")[0]
    beside = [attention for attention in attentions if attention.rpartition(".")[0] == parent]
    return parent if name and beside else None


def _targeted(tree: Tree, attentions: Sequence[str], targets: Sequence[str]) -> list[str]:
    """The attentions inside what the globs match, and matched modules themselves where there is none."""
    chosen: set[str] = set()
    for target in targets:
        matched = fnmatch.filter(tree.modules, target)
        if not matched:
            raise NoSiteError(f"targets: '{target}' matches no module. {_some(tree)}")
        known = [a for a in attentions if any(a == m or _below(a, m) for m in matched)]
        chosen.update(known or [m for m in matched if not any(_below(m, other) for other in matched)])
    return [name for name in tree.modules if name in chosen]


def _reached(tree: Tree, targets: Sequence[str] | str) -> frozenset[str]:
    """The names that the globs match, and everything below them."""
    globs = [targets] if isinstance(targets, str) else targets
    matched = {name for target in globs for name in fnmatch.filter(tree.modules, target)}
    return frozenset(name for name in tree.modules if name in matched or matched & set(tree.ancestors(name)))


def _some(tree: Tree) -> str:
    names = [name for name in tree.modules if name]
    return f"The model has {len(names)} modules: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"


def _attention_site(tree: Tree, name: str, block: int) -> AttentionSite:
    module = tree.modules[name]
    return AttentionSite(name, module, block, find_heads(module), _geometry(tree, name), find_projections(module))


def _geometry(tree: Tree, name: str) -> Geometry | None:
    """What the nearest enclosing model of a known library says about the keys' grid."""
    for owner in (name, *tree.ancestors(name)):
        for adapter in adapters():
            geometry = adapter.geometry(tree.modules[owner], tree.modules[name])
            if geometry is not None:
                return geometry
    return None


def _patches(tree: Tree) -> Iterator[PatchSite]:
    inside: set[nn.Module] = set()  # of adapters, which stand for the convolution as a whole
    for name, module in tree.modules.items():
        conv = inner(module)
        if module in inside or not isinstance(conv, nn.Conv2d):
            continue
        inside |= set(module.modules()) if conv is not module else set()
        if conv.in_channels <= 4 and min(conv.kernel_size) > 1:
            if conv.kernel_size == conv.stride and conv.padding in ((0, 0), "valid"):
                yield PatchSite(name, module, (conv.kernel_size[0], conv.kernel_size[1]))
